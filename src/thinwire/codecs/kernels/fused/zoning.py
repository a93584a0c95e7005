"""Kernels of ``DeadZone``: its step and noise found on the card, levels in two bits, larger ones apart.

``flags``, int32, zeros at first: 1 where something is wrong; then the largest magnitude, as bits. Of
``sums``, int64, the first is what the key of the noise is made of.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thinwire.codecs.kernels.fused.arithmetic import NOT_FINITE, bits_of, rounded_up, size_bits
from thinwire.codecs.kernels.fused.quantising import put_back, put_words, residual_of

MESSAGE, TENSOR, ONE = (tl.constexpr(i) for i in range(3))  # whose mean magnitude is meant; or none
_LARGE = tl.constexpr(3)
_TABLE = tl.constexpr(1 << 16)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
_MIX1 = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_MIX2 = tl.constexpr(0x94D049BB133111EB - (1 << 64))


@triton.jit
def mixed_key(z: tl.tensor) -> tl.tensor:
    """Return the hash of int64, as ``noise.mix``."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _MIX1
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _MIX2
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


@triton.jit
def measured(
    x: tl.tensor,
    reference: tl.tensor,
    flags: tl.tensor,
    sums: tl.tensor,
    partial: tl.tensor,
    n: tl.tensor,
    laps: tl.tensor,
    share: tl.tensor,
    size: tl.constexpr,
    unit: tl.constexpr,
    dither: tl.constexpr,
    against: tl.constexpr,
) -> None:
    """Store a part of the mean magnitude, raise the largest one, and add up what the noise depends on."""
    total = tl.zeros([size], tl.float32)
    peak = tl.zeros([size], tl.int32)
    words = tl.zeros([size], tl.int64)
    for lap in range(laps):
        at = (tl.program_id(0) * laps + lap) * size + tl.arange(0, size)
        inside = at < n
        y, _ = residual_of(x, reference, at, inside, against)
        peak = tl.maximum(peak, size_bits(y))
        if dither:
            bits = bits_of(y).to(tl.int64)
            even = tl.where(at == n - 1, bits, bits & 0xFFFFFFFF)  # the last of an odd number is signed
            words += tl.where(inside, tl.where(at % 2 == 0, even, bits << 32), 0)
        if unit == TENSOR:
            y = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        total += tl.abs(y) * share
    tl.store(partial + tl.program_id(0), tl.sum(total))
    tl.atomic_max(flags + 1, tl.max(peak))
    if dither:
        tl.atomic_add(sums, tl.sum(words))


@triton.jit
def settled(
    flags: tl.tensor,
    sums: tl.tensor,
    partial: tl.tensor,
    stored: tl.tensor,
    key: tl.tensor,
    count: tl.tensor,
    size: tl.constexpr,
    by: tl.constexpr,
    unit: tl.constexpr,
    top: tl.constexpr,
    low: tl.constexpr,
    high: tl.constexpr,
    dither: tl.constexpr,
) -> None:
    """Store the step, bfloat16, and the key of the noise as it is sent."""
    i = tl.arange(0, size)
    peak = tl.load(flags + 1)
    step = tl.sum(tl.load(partial + i, mask=i < count, other=0.0)) * by
    if unit == TENSOR:
        step = tl.maximum(step, low)
    if unit == ONE:
        step = step * 0.0 + by
    step = tl.maximum(step, tl.div_rn(peak.to(tl.float32, bitcast=True), 1.0 * top))
    tl.store(stored, rounded_up(step, 16, low, high).to(tl.bfloat16))
    if dither:
        tl.store(key, mixed_key(tl.load(sums) + _GOLDEN) ^ (-(1 << 63)))
    if peak >= NOT_FINITE:
        tl.store(flags, 1)


@triton.jit
def noise_at(table: tl.tensor, key: tl.tensor, at: tl.tensor, start: tl.tensor) -> tl.tensor:
    """Return the noise of values ``at``, all within a lap of ``start``, the first."""
    lap = (start // _TABLE).to(tl.int64)
    here = (mixed_key(key + lap * _GOLDEN) & (_TABLE - 1)).to(tl.int32)
    there = (mixed_key(key + (lap + 1) * _GOLDEN) & (_TABLE - 1)).to(tl.int32)
    return tl.load(table + tl.where(at // _TABLE == lap, here, there) + at % _TABLE)


@triton.jit
def levels_of(y: tl.tensor, step: tl.tensor, offset: tl.constexpr) -> tl.tensor:
    """Return the levels of values, int32."""
    y = y * tl.div_rn(1.0, step)
    signed = ((bits_of(y) & (-(1 << 31))) | bits_of(tl.zeros_like(y) + offset)).to(tl.float32, bitcast=True)
    return tl.minimum(tl.maximum(y + signed, -32767.0), 32767.0).to(tl.int32)


@triton.jit
def noisy(
    y: tl.tensor,
    table: tl.tensor,
    key: tl.tensor,
    at: tl.tensor,
    start: tl.tensor,
    step: tl.tensor,
    most: tl.constexpr,
) -> tl.tensor:
    """Return values with ``step`` times their noise, finite if they are."""
    y = noise_at(table, key, at, start) * step + y
    return tl.minimum(tl.maximum(y, -1.0 * most), 1.0 * most)


@triton.jit
def zoned(
    x: tl.tensor,
    reference: tl.tensor,
    restored: tl.tensor,
    packed: tl.tensor,
    counts: tl.tensor,
    numbers: tl.tensor,
    stored: tl.tensor,
    key: tl.tensor,
    table: tl.tensor,
    n: tl.tensor,
    m: tl.tensor,
    size: tl.constexpr,
    offset: tl.constexpr,
    most: tl.constexpr,
    dither: tl.constexpr,
    against: tl.constexpr,
    limit: tl.constexpr,
) -> None:
    """Store codes of two bits, what levels stand for, and those that each stretch of a plane leaves out."""
    i = tl.program_id(0) * size + tl.arange(0, size)
    step = tl.load(stored).to(tl.float32)
    own = tl.load(key) ^ (-(1 << 63)) if dither else 0
    word = tl.zeros([size], tl.int32)
    for k in tl.static_range(4):
        at = k * m + i
        start = k * m + tl.program_id(0) * size
        inside = (i < m) & (at < n)
        y, held = residual_of(x, reference, at, inside, against)
        if dither:
            y = noisy(y, table, own, at, start, step, most)
        level = levels_of(y, step, offset)
        small = (level >= -1) & (level <= 1)
        word |= tl.where(inside, tl.where(small, level + 1, _LARGE), 0) << (2 * k)
        left = inside & ~small
        stretch = k * tl.num_programs(0) + tl.program_id(0)
        place = stretch * size + tl.cumsum(left.to(tl.int32)) - 1
        tl.store(numbers + place, ((level << 1) ^ (level >> 31)).to(tl.int16), mask=left)
        tl.store(counts + stretch, tl.sum(left.to(tl.int32)))
        y = level.to(tl.float32) * step
        if dither:
            y = noisy(y, table, own, at, start, -step, most)
        put_back(restored, at, inside, y, held, against, limit)
    put_words(packed, word, i, m, 1)


@triton.jit
def larger(
    numbers: tl.tensor,
    counts: tl.tensor,
    ends: tl.tensor,
    large: tl.tensor,
    count: tl.tensor,
    size: tl.constexpr,
) -> None:
    """Store the levels that codes leave out, ``count`` in all, without gaps: low bytes, then high ones."""
    stretch = tl.program_id(0)
    some = tl.load(counts + stretch)
    start = tl.load(ends + stretch) - some
    j = tl.arange(0, size)
    number = tl.load(numbers + stretch * size + j, mask=j < some, other=0).to(tl.int32)
    tl.store(large + start + j, (number & 0xFF).to(tl.uint8), mask=j < some)
    tl.store(large + count + start + j, ((number >> 8) & 0xFF).to(tl.uint8), mask=j < some)


@triton.jit
def counted(packed: tl.tensor, counts: tl.tensor, n: tl.tensor, m: tl.tensor, size: tl.constexpr) -> None:
    """Store how many levels codes leave out of each stretch of a plane."""
    i = tl.program_id(0) * size + tl.arange(0, size)
    word = tl.load(packed + i, mask=i < m, other=0).to(tl.int32)
    for k in tl.static_range(4):
        left = (((word >> (2 * k)) & 3) == _LARGE) & (i < m) & (k * m + i < n)
        tl.store(counts + k * tl.num_programs(0) + tl.program_id(0), tl.sum(left.to(tl.int32)))


@triton.jit
def unzoned(
    packed: tl.tensor,
    large: tl.tensor,
    ends: tl.tensor,
    stored: tl.tensor,
    key: tl.tensor,
    table: tl.tensor,
    reference: tl.tensor,
    restored: tl.tensor,
    flags: tl.tensor,
    n: tl.tensor,
    m: tl.tensor,
    count: tl.tensor,
    size: tl.constexpr,
    most: tl.constexpr,
    low: tl.constexpr,
    high: tl.constexpr,
    dither: tl.constexpr,
    against: tl.constexpr,
    limit: tl.constexpr,
) -> None:
    """Store what codes and the levels that they leave out stand for, on top of a reference or not.

    Flag 0 tells whether the step is out of range, flag 1 whether codes and levels do not fit.
    """
    i = tl.program_id(0) * size + tl.arange(0, size)
    step = tl.load(stored).to(tl.float32)
    if tl.program_id(0) == 0:
        tl.store(flags, tl.where((step >= low) & (step <= high), 0, 1))
        tl.store(flags + 1, tl.where(tl.load(ends + 4 * tl.num_programs(0) - 1) == count, 0, 1))
    own = tl.load(key) ^ (-(1 << 63)) if dither else 0
    word = tl.load(packed + i, mask=i < m, other=0).to(tl.int32)
    for k in tl.static_range(4):
        at = k * m + i
        inside = (i < m) & (at < n)
        code = (word >> (2 * k)) & 3
        left = (code == _LARGE) & inside
        end = tl.load(ends + k * tl.num_programs(0) + tl.program_id(0)).to(tl.int32)
        place = end - tl.sum(left.to(tl.int32)) + tl.cumsum(left.to(tl.int32)) - 1
        found = left & (place < count)  # where a stranger left out too few
        number = tl.load(large + place, mask=found, other=0).to(tl.int32)
        number |= tl.load(large + count + place, mask=found, other=0).to(tl.int32) << 8
        level = tl.where(left, (number >> 1) ^ -(number & 1), code - 1)
        y = level.to(tl.float32) * step
        if dither:
            y = noisy(y, table, own, at, k * m + tl.program_id(0) * size, -step, most)
        held = y
        if against:
            held = tl.load(reference + at, mask=inside, other=0.0)
        put_back(restored, at, inside, y, held, against, limit)
