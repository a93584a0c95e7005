"""Range coding, the way back: bytes that nobody vouches for to symbols.

What does not fit sets a flag; no load or store goes outside its tensor, whatever the bytes say.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thinwire.codecs.kernels.fused.rans_writing import BYTES, NUMBERS, exponent, precision


@triton.jit
def _short(body: tl.tensor, at: tl.tensor, there: tl.tensor) -> tl.tensor:
    low = tl.load(body + at, mask=there, other=0).to(tl.int32)
    return low | tl.load(body + at + 1, mask=there, other=0).to(tl.int32) << 8


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=BYTES)
def locate(
    body: tl.tensor,
    offsets: tl.tensor,
    wrong: tl.tensor,
    length: tl.tensor,
    segments: tl.tensor,
    per: tl.tensor,
    each: tl.tensor,
    base: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Find where segments begin, int64 [segments]; base is where the first does, within the length."""
    end = tl.zeros([1], tl.int64) + base
    for i in range(0, segments, BLOCK):
        segment = i + tl.arange(0, BLOCK)
        there = segment < segments
        own = _short(body, 2 * segment, there).to(tl.int64)
        for row in range(4):
            stream = segment % per * 4 + row
            known = there & (stream < each)
            own += 2 * _short(body, 2 * (segments + segment // per * each + stream), known).to(tl.int64)
        tl.store(offsets + segment, end + tl.cumsum(own) - own, mask=there)
        end += tl.sum(own)
    tl.store(wrong + tl.arange(0, 1), 1, mask=end != length)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=BYTES)
def untabulate(
    body: tl.tensor,
    offsets: tl.tensor,
    starts: tl.tensor,
    wrong: tl.tensor,
    length: tl.tensor,
    n: tl.tensor,
    per: tl.tensor,
    SEGMENT: tl.constexpr,
) -> None:
    """Read the table of a segment: where each symbol starts, int32 [segments, 257], and the sum behind.

    Of a segment of one symbol, that and -1 behind.
    """
    segment, symbol = tl.program_id(0), tl.arange(0, 256)
    at = tl.load(offsets + segment)
    size = _short(body, 2 * segment, True)
    end = tl.minimum(at + size, length)
    parameter = tl.load(body + at, mask=at < end, other=254).to(tl.int32)
    top = tl.load(body + at + 1, mask=at + 1 < end, other=0).to(tl.int32)
    constant = parameter == 255
    bad = (parameter > 11) & (parameter != 255) | (size < 2) | (constant & (size != 2))
    k = tl.where(parameter > 11, 0, parameter)
    bits = precision(tl.minimum(n - segment % per * SEGMENT, SEGMENT))
    left, bit = 1 << bits, 16
    freq = tl.zeros([256], tl.int32)
    for s in range(tl.where(constant | bad, 0, top)):
        byte = at + (bit >> 3)
        window = tl.load(body + byte, mask=byte < end, other=0).to(tl.int64)
        for i in tl.static_range(1, 4):
            more = tl.load(body + byte + i, mask=byte + i < end, other=0).to(tl.int64)
            window |= more << (8 * i)
        window = window >> (bit & 7)
        zeros = exponent(tl.maximum(window & -window, 1))
        bad |= (window == 0) | (zeros > 12)
        zeros = tl.minimum(zeros, 12)
        q = (window >> (zeros + 1)).to(tl.int32) & ((1 << zeros) - 1) | 1 << zeros
        f = (q - 1) << k | (window >> (2 * zeros + 1)).to(tl.int32) & ((1 << k) - 1)
        left -= f
        bad |= left <= 0
        left = tl.maximum(left, 0)
        freq = tl.where(symbol == s, f, freq)
        bit += 2 * zeros + 1 + k
    bad |= (constant == 0) & ((left == 1 << bits) | ((bit + 7) >> 3 != size))
    freq = tl.where(symbol == top, left, freq)
    start = tl.where(bad, 0, tl.cumsum(freq) - freq)
    own = starts + segment * 257
    tl.store(own + symbol, tl.where(constant, top, start))
    tl.store(own + 256, tl.where(constant, -1, tl.where(bad, 0, 1 << bits)))
    tl.store(wrong, 1, mask=bad)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=BYTES)
def spread(starts: tl.tensor, slots: tl.tensor) -> None:
    """Say of each slot what it stands for, int32 [segments, 4096]: symbol << 24 | frequency << 12 | place."""
    segment, slot = tl.program_id(0), tl.program_id(1) * 1024 + tl.arange(0, 1024)
    own = starts + segment * 257
    symbol = tl.zeros([1024], tl.int32)
    for i in tl.static_range(8):
        higher = symbol + (128 >> i)
        symbol = tl.where(tl.load(own + higher) <= slot, higher, symbol)
    start = tl.load(own + symbol)
    freq = (tl.load(own + symbol + 1) - start) & 4095
    tl.store(slots + segment * 4096 + slot, symbol << 24 | freq << 12 | (slot - start) & 4095)


@triton.jit
def _states(body: tl.tensor, at: tl.tensor, end: tl.tensor, lanes: tl.tensor) -> tl.tensor:
    """Return the states of lanes, of which those that are not there, or too large, are too small."""
    lane = tl.arange(0, 32)[None, :]
    place = at[:, None] + 4 * lane
    there = (lane < lanes[:, None]) & (place + 3 < end[:, None])
    x = _short(body, place, there) | _short(body, place + 2, there) << 16
    return tl.where(lane < lanes[:, None], x, 1 << 15)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=BYTES)
def decode(
    body: tl.tensor,
    offsets: tl.tensor,
    starts: tl.tensor,
    slots: tl.tensor,
    out: tl.tensor,
    wrong: tl.tensor,
    length: tl.tensor,
    n: tl.tensor,
    per: tl.tensor,
    each: tl.tensor,
    segments: tl.tensor,
    LANE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Decode streams of a segment to uint8 [planes * n]."""
    STREAM: tl.constexpr = 32 * LANE
    segment, row = tl.program_id(0), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    plane, first = segment // per, segment % per * (4 * STREAM)
    offset = first + row * STREAM
    symbols, target = tl.minimum(tl.maximum(n - offset, 0), STREAM), out + (plane * n + offset)
    exists = symbols > 0
    heads = 2 * segments + 2 * (plane * each + segment % per * 4)
    used = _short(body, heads + 2 * row, exists)
    constant = tl.load(starts + segment * 257 + 256) < 0
    at = tl.load(offsets + segment) + _short(body, 2 * segment, True) + tl.zeros([ROWS], tl.int64)
    for before in range(3):
        at += 2 * _short(body, heads + 2 * tl.minimum(before, row), (before < row) & exists)
    if constant:
        fill = tl.load(starts + segment * 257).to(tl.uint8)
        for i in range(0, STREAM, BLOCK):
            here = i + tl.arange(0, BLOCK)[None, :]
            inside = here < symbols[:, None]
            tl.store(target[:, None] + here, tl.zeros([ROWS, BLOCK], tl.uint8) + fill, mask=inside)
        tl.store(wrong, 1, mask=tl.sum(used) > 0)
    else:
        end = tl.minimum(at + 2 * used, length)
        bits = precision(tl.minimum(n - first, 4 * STREAM))
        lanes = (symbols + LANE - 1) // LANE
        lane = tl.arange(0, 32)[None, :]
        steps = tl.max((symbols + lanes - 1) // tl.maximum(lanes, 1))
        x = _states(body, at, end, lanes)
        bad, x = x < 1 << 15, tl.maximum(x, 1 << 15)
        at += 4 * lanes
        own = slots + segment * 4096
        for step in range(steps):
            here = step * lanes[:, None] + lane
            there = (lane < lanes[:, None]) & (here < symbols[:, None])
            entry = tl.load(own + (x & ((1 << bits) - 1)), mask=there, other=0)
            tl.store(target[:, None] + here, (entry >> 24).to(tl.uint8), mask=there)
            x = tl.where(there, (entry >> 12 & 4095) * (x >> bits) + (entry & 4095), x)
            empty = there & (x < 1 << 15)
            ones = empty.to(tl.int32)
            place = at[:, None] + 2 * (tl.cumsum(ones, 1) - ones)
            word = _short(body, place, empty & (place + 1 < end[:, None]))
            x = tl.where(empty, x << 16 | word, x)
            at += 2 * tl.sum(ones, 1)
        bad |= (x != 1 << 15) | (at != end)[:, None] & exists[:, None]
        tl.store(wrong, 1, mask=tl.sum(bad.to(tl.int32)) > 0)
