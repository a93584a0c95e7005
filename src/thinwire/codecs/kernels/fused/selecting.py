"""Kernels of ``ChunkTopK``: the largest magnitudes of each run, their positions, and the way back.

Among equal magnitudes the first ones are chosen. What torch chooses among them is not said anywhere, so there
the payload of a card may differ from that of a CPU; each says which values it holds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thinwire.codecs.kernels.fused.arithmetic import narrowed, size_bits
from thinwire.codecs.kernels.fused.quantising import residual_of

_NEAR = tl.constexpr(4 << 23)  # four octaves, as bits: where the last one that is chosen nearly always lies


@triton.jit
def largest_of_runs(
    x: tl.tensor,
    reference: tl.tensor,
    restored: tl.tensor,
    position: tl.tensor,
    kept: tl.tensor,
    n: tl.tensor,
    chunk: tl.tensor,
    each: tl.tensor,
    of_last: tl.tensor,
    size: tl.constexpr,
    against: tl.constexpr,
    back: tl.constexpr,
) -> None:
    """Store position and value of the ``each`` largest of a run, ``of_last`` of one that is shorter."""
    run = tl.program_id(0)
    i = tl.arange(0, size)
    at = run * chunk + i
    inside = (i < chunk) & (at < n)
    y, held = residual_of(x, reference, at, inside, against)
    if back:
        tl.store(restored + at, held + 0.0 if against else held * 0.0, mask=inside)
    bits = tl.where(inside, size_bits(y), -1)
    k = tl.where((run + 1) * chunk <= n, each, of_last)
    over = tl.max(bits) + 1  # fewer than k reach it
    edge = tl.maximum(over - _NEAR, 0)
    count = tl.sum((bits >= edge).to(tl.int32))
    if count < k:  # which is rare
        over, edge = edge, edge * 0
        count = tl.sum((bits >= 0).to(tl.int32))
    while (count != k) & (over - edge > 1):  # k or more reach the edge
        middle = edge + (over - edge) // 2
        reached = tl.sum((bits >= middle).to(tl.int32))
        over = tl.where(reached < k, middle, over)
        edge = tl.where(reached < k, edge, middle)
        count = tl.where(reached < k, count, reached)
    chosen = (bits >= edge).to(tl.int32)
    if count > k:  # several are equal to the last one that is chosen
        equal = (bits == edge).to(tl.int32)
        spare = tl.cumsum(equal) > k - (count - tl.sum(equal))
        chosen = chosen & (1 - equal * spare.to(tl.int32))
    place = run * each + tl.cumsum(chosen) - 1
    tl.store(position + place, i, mask=chosen > 0)
    y, _ = residual_of(x, reference, at, chosen > 0, against)  # again: few, and the loop holds less
    tl.store(kept + place, narrowed(y, kept.dtype.element_ty), mask=chosen > 0)


@triton.jit
def packed_positions(
    position: tl.tensor,
    packed: tl.tensor,
    n: tl.tensor,
    m: tl.tensor,
    width: tl.constexpr,
    planes: tl.constexpr,
    size: tl.constexpr,
) -> None:
    """Pack numbers of ``width`` bits, as ``bits.pack_wide`` does."""
    whole: tl.constexpr = width // 8
    rest: tl.constexpr = width % 8
    i = tl.program_id(0) * size + tl.arange(0, size)
    word = tl.zeros([size], tl.int64)
    for k in tl.static_range(planes):
        at = k * m + i
        inside = (i < m) & (at < n)
        number = tl.load(position + at, mask=inside, other=0).to(tl.int32)
        for byte in tl.static_range(whole):
            tl.store(packed + byte * n + at, ((number >> (8 * byte)) & 0xFF).to(tl.uint8), mask=inside)
        word |= (number >> (8 * whole)).to(tl.int64) << (k * rest)
    for byte in tl.static_range(planes * rest // 8):
        at = whole * n + byte * m + i
        tl.store(packed + at, ((word >> (8 * byte)) & 0xFF).to(tl.uint8), mask=i < m)


@triton.jit
def position_at(
    packed: tl.tensor,
    j: tl.tensor,
    inside: tl.tensor,
    n: tl.tensor,
    m: tl.tensor,
    width: tl.constexpr,
) -> tl.tensor:
    """Return the numbers that were packed, int32."""
    whole: tl.constexpr = width // 8
    rest: tl.constexpr = width % 8
    number = tl.zeros_like(j)
    for byte in tl.static_range(whole):
        number |= tl.load(packed + byte * n + j, mask=inside, other=0).to(tl.int32) << (8 * byte)
    if rest > 0:
        bit = j // m * rest
        from_byte = packed + whole * n + bit // 8 * m + j % m
        high = tl.load(from_byte, mask=inside, other=0).to(tl.int32)
        more = inside & (bit % 8 + rest > 8)
        high |= tl.load(from_byte + m, mask=more, other=0).to(tl.int32) << 8
        number |= ((high >> (bit % 8)) & ((1 << rest) - 1)) << (8 * whole)
    return number


@triton.jit
def scattered(
    packed: tl.tensor,
    kept: tl.tensor,
    reference: tl.tensor,
    restored: tl.tensor,
    flags: tl.tensor,
    n: tl.tensor,
    count: tl.tensor,
    m: tl.tensor,
    chunk: tl.tensor,
    each: tl.tensor,
    width: tl.constexpr,
    size: tl.constexpr,
    against: tl.constexpr,
) -> None:
    """Put kept values where they belong, on top of a reference or not; find positions in disorder."""
    j = tl.program_id(0) * size + tl.arange(0, size)
    inside = j < count
    before = tl.maximum(j - 1, 0)
    at = j // each * chunk + position_at(packed, j, inside, count, m, width)
    lower = before // each * chunk + position_at(packed, before, inside, count, m, width)
    good = (at < n) & (at >= 0) & ((at > lower) | (j == 0))
    value = tl.load(kept + j, mask=inside, other=0.0)
    if against:
        value = tl.load(reference + at, mask=inside & good, other=0.0) + value
    tl.store(restored + at, value, mask=inside & good)
    if tl.max((inside & ~good).to(tl.int32)) > 0:
        tl.store(flags, 1)
