"""Range coding, one way: symbols to tables and words. ``codecs/rans/grid.py`` has the layout and its numbers.

A program has one segment, or some of its streams: a row of 32 lanes each. What a lane writes in a step has
its place by how many lanes below it write too.
"""

from __future__ import annotations

import triton
import triton.language as tl

NUMBERS = [
    "n",
    "per",
    "each",
    "segments",
    "base",
    "head",
    "heads",
    "room",
    "length",
]  # of any size: one kernel
BYTES = ["symbols", "body", "out"]  # which may begin anywhere


@triton.jit
def precision(n: tl.tensor) -> tl.tensor:
    """Return the bits of the sum of the frequencies of n symbols, at most 2^17."""
    some = (n > 256).to(tl.int32) + (n > 512).to(tl.int32)
    return 8 + some + (n > 1024).to(tl.int32) + (n > 2048).to(tl.int32)


@triton.jit
def exponent(x: tl.tensor) -> tl.tensor:
    """Return floor(log2(x)) of whole numbers x >= 1 that float32 holds."""
    return (x.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=BYTES)
def count(
    symbols: tl.tensor,
    counts: tl.tensor,
    n: tl.tensor,
    per: tl.tensor,
    SEGMENT: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add to counts, int32 [segments, 256], how often each symbol is in a chunk of a segment."""
    segment = tl.program_id(0)
    first = segment % per * SEGMENT
    begin, length = segment // per * n + first, tl.minimum(n - first, SEGMENT)
    at, number = tl.program_id(1) * CHUNK, tl.arange(0, 256)
    total = tl.zeros([256], tl.int32)
    for i in range(at, tl.minimum(at + CHUNK, length), BLOCK):
        here = i + tl.arange(0, BLOCK)
        symbol = tl.load(symbols + begin + here, mask=here < length, other=0).to(tl.int32)
        beyond = BLOCK - tl.minimum(length - i, BLOCK)  # they were counted as zeros
        total += tl.histogram(symbol, 256) - tl.where(number == 0, beyond, 0)
    tl.atomic_add(counts + segment * 256 + number, total, mask=total > 0)


@triton.jit
def _shares(counts: tl.tensor, scale: tl.tensor, n: tl.tensor) -> tl.tensor:
    return tl.where(counts > 0, tl.maximum((counts * scale + n // 2) // n, 1), 0)


@triton.jit
def _put(table: tl.tensor, at: tl.tensor, value: tl.tensor, there: tl.tensor) -> None:
    """Set bits of a table of zeros, from bit ``at`` on."""
    wide = value.to(tl.int64) << (at & 31).to(tl.int64)
    tl.atomic_or(table + (at >> 5), wide.to(tl.int32), mask=there)
    tl.atomic_or(table + (at >> 5) + 1, (wide >> 32).to(tl.int32), mask=there)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=BYTES)
def tabulate(
    counts: tl.tensor,
    entries: tl.tensor,
    tables: tl.tensor,
    sizes: tl.tensor,
    n: tl.tensor,
    per: tl.tensor,
    SEGMENT: tl.constexpr,
    TABLE: tl.constexpr,
) -> None:
    """Make of the counts of a segment its entries, table, and the bytes of that.

    int32 [segments, 256]: frequency << 12 | start, 0 in a segment of one symbol; int32 [segments, TABLE],
    zeros before; int32 [segments].
    """
    segment, symbol = tl.program_id(0), tl.arange(0, 256)
    length = tl.minimum(n - segment % per * SEGMENT, SEGMENT)
    own = tl.load(counts + segment * 256 + symbol)
    mixed = tl.sum((own > 0).to(tl.int32)) > 1
    top = tl.max(tl.where(own > 0, symbol, 0))
    bits = precision(length)
    low, high = 0, (1 << bits) + 257
    for _ in range(13):
        scale = (low + high) // 2
        fits = tl.sum(_shares(own, scale, length)) <= 1 << bits
        low, high = tl.where(fits, scale, low), tl.where(fits, high, scale)
    freq = _shares(own, low, length)
    rising = (_shares(own, high, length) > freq).to(tl.int32)
    ahead = tl.cumsum(rising) - rising
    freq += tl.where(ahead < (1 << bits) - tl.sum(freq), rising, 0)
    start = tl.cumsum(freq) - freq
    tl.store(entries + segment * 256 + symbol, tl.where(mixed, freq << 12 | start, 0))

    below = symbol < top
    best, least = 0, 1 << 30
    for k in range(12):
        width = tl.where(below, 2 * exponent((freq >> k) + 1) + 1 + k, 0)
        total = tl.sum(width)
        best, least = tl.where(total < least, k, best), tl.minimum(total, least)
    q = (freq >> best) + 1
    w = exponent(q)
    width = tl.where(below, 2 * w + 1 + best, 0)
    value = 1 << w | (q ^ 1 << w) << (w + 1) | (freq & ((1 << best) - 1)) << (2 * w + 1)
    table = tables + segment * TABLE
    _put(table, 16 + tl.cumsum(width) - width, value, tl.where(mixed, width, 0) > 0)
    _put(table, symbol, tl.where(mixed, best, 255) | top << 8, symbol == 0)
    tl.store(sizes + segment, tl.where(mixed, 2 + (least + 7) // 8, 2))


@triton.jit
def _put_states(end: tl.tensor, lanes: tl.tensor, x: tl.tensor) -> None:
    lane = tl.arange(0, 32)[None, :]
    at = end[:, None] + 2 * (lane - lanes[:, None])
    tl.store(at, x.to(tl.int16), mask=lane < lanes[:, None])
    tl.store(at + 1, (x >> 16).to(tl.int16), mask=lane < lanes[:, None])


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=BYTES)
def encode(
    symbols: tl.tensor,
    entries: tl.tensor,
    sizes: tl.tensor,
    words: tl.tensor,
    used: tl.tensor,
    n: tl.tensor,
    per: tl.tensor,
    each: tl.tensor,
    LANE: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Code streams, each to end where its slot of words ends, and say how many words they are.

    int16 [streams, 32 * LANE + 64]; int32 [streams].
    """
    STREAM: tl.constexpr = 32 * LANE
    segment, row = tl.program_id(0), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    first = segment % per * (4 * STREAM)
    offset = first + row * STREAM
    length = tl.minimum(tl.maximum(n - offset, 0), STREAM)
    symbol_at = symbols + (segment // per * n + offset)
    stream = segment // per * each + segment % per * 4 + row
    bits = precision(tl.minimum(n - first, 4 * STREAM))
    mixed = tl.sum(tl.load(entries + segment * 256 + tl.arange(0, 256))) > 0
    exists = length > 0
    length = tl.where(mixed, length, 0)
    lanes = (length + LANE - 1) // LANE
    lane = tl.arange(0, 32)[None, :]
    steps = tl.max((length + lanes - 1) // tl.maximum(lanes, 1))
    slot = words + (stream.to(tl.int64) + 1) * (STREAM + 64)
    count = tl.zeros([ROWS], tl.int32)
    x = tl.full([ROWS, 32], 1 << 15, tl.int32)
    own = entries + segment * 256
    # Symbols are read two steps ahead, and entries one. A shorter row has nothing in the first steps.
    at = (steps - 1) * lanes[:, None] + lane
    there = (lane < lanes[:, None]) & (at < length[:, None]) & (at >= 0)
    ahead = tl.load(symbol_at[:, None] + at, mask=there, other=0).to(tl.int32)
    entry = tl.load(own + ahead, mask=there, other=0)
    later = at - lanes[:, None]
    fits = (lane < lanes[:, None]) & (later >= 0) & (later < length[:, None])
    ahead = tl.load(symbol_at[:, None] + later, mask=fits, other=0).to(tl.int32)
    for _i in range(steps):
        coming = tl.load(own + ahead, mask=fits, other=0)
        after = later - lanes[:, None]
        next_fits = (lane < lanes[:, None]) & (after >= 0) & (after < length[:, None])
        ahead = tl.load(symbol_at[:, None] + after, mask=next_fits, other=0).to(tl.int32)
        freq, start = tl.maximum(entry >> 12, 1), entry & 4095
        full = there & (x >= freq << (31 - bits))
        ones = full.to(tl.int32)
        total = tl.sum(ones, 1)
        place = tl.cumsum(ones, 1) - ones - total[:, None] - count[:, None]
        tl.store(slot[:, None] + place, x.to(tl.int16), mask=full)
        count += total
        x = tl.where(full, x >> 16, x)
        q = x // freq
        x = tl.where(there, (q << bits) + start + x - q * freq, x)
        entry, there, later, fits = coming, fits, after, next_fits
    _put_states(slot - count, lanes, x)
    tl.store(used + stream, count + 2 * lanes, mask=exists)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=BYTES)
def place(
    sizes: tl.tensor,
    used: tl.tensor,
    offsets: tl.tensor,
    total: tl.tensor,
    segments: tl.tensor,
    per: tl.tensor,
    each: tl.tensor,
    base: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Find where segments go, int64 [segments], in bytes, and how long all is, int64 [1]."""
    end = tl.zeros([1], tl.int64) + base
    for i in range(0, segments, BLOCK):
        segment = i + tl.arange(0, BLOCK)
        there = segment < segments
        own = tl.load(sizes + segment, mask=there, other=0).to(tl.int64)
        for row in range(4):
            stream = segment % per * 4 + row
            known = there & (stream < each)
            own += 2 * tl.load(used + segment // per * each + stream, mask=known, other=0).to(tl.int64)
        tl.store(offsets + segment, end + tl.cumsum(own) - own, mask=there)
        end += tl.sum(own)
    tl.store(total + tl.arange(0, 1), end)


@triton.jit
def _short(out: tl.tensor, at: tl.tensor, value: tl.tensor, room: tl.tensor) -> None:
    tl.store(out + at, (value & 255).to(tl.uint8), mask=at < room)
    tl.store(out + at + 1, (value >> 8).to(tl.uint8), mask=at + 1 < room)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=BYTES)
def gather(
    tables: tl.tensor,
    sizes: tl.tensor,
    words: tl.tensor,
    used: tl.tensor,
    offsets: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    per: tl.tensor,
    each: tl.tensor,
    head: tl.tensor,
    more: tl.tensor,
    heads: tl.tensor,
    room: tl.tensor,
    LANE: tl.constexpr,
    TABLE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the table of a segment (in program 4 of each), or a stream, and what the heads say of it.

    ``head`` and ``more`` are the first three bytes and the next four as numbers; nothing is written from
    ``room`` on.
    """
    segment, row = tl.program_id(0), tl.program_id(1)
    at, size = tl.load(offsets + segment), tl.load(sizes + segment)
    segments, byte = tl.num_programs(0), tl.arange(0, BLOCK)
    if row == 4:
        own = tl.load(tables + segment * TABLE + (byte >> 2), mask=byte < size, other=0)
        own = own >> ((byte & 3) * 8)
        tl.store(out + at + byte, own.to(tl.uint8), mask=(byte < size) & (at + byte < room))
        _short(out, heads + 2 * segment, size, room)
        if segment == 0:
            later = tl.minimum(tl.maximum(byte - 3, 0), 3)
            first = tl.where(byte < 3, head >> (tl.minimum(byte, 3) * 8), more >> (later * 8))
            tl.store(out + byte, first.to(tl.uint8), mask=byte < heads)
    else:
        first = segment // per * each + segment % per * 4
        stream = first + row
        if segment % per * 4 + row < each:
            at += size
            for before in range(row):
                at += 2 * tl.load(used + first + before)
            length = tl.load(used + stream)
            source = words + (stream.to(tl.int64) + 1) * (32 * LANE + 64) - length
            for i in range(0, 2 * length, BLOCK):
                here = i + byte
                word = tl.load(source + (here >> 1), mask=here < 2 * length, other=0).to(tl.int32)
                fits = (here < 2 * length) & (at + here < room)
                tl.store(out + at + here, (word >> ((here & 1) * 8)).to(tl.uint8), mask=fits)
            _short(out, heads + 2 * segments + 2 * stream, length, room)
