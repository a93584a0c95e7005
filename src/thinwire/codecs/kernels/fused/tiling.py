"""Kernels of ``TileAdaptive``: what tiles are like, which get few bits, their codes, and the way back.

``flags``, int32, zeros at first: 1 where something is wrong. ``bins``, int32, zeros at first: how many tiles
of each sample have each byte of a score, for the four bytes one after another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thinwire.codecs.kernels.fused.arithmetic import (
    NOT_FINITE,
    bits_of,
    mixed,
    narrowed,
    rounded_up,
    size_bits,
    within,
)
from thinwire.codecs.kernels.fused.selecting import position_at

_ZERO_TOP = tl.constexpr(32767)


@triton.jit
def tiles_at(
    tile: tl.tensor,
    tiles: tl.tensor,
    width: tl.constexpr,
    last: tl.constexpr,
    in_row: tl.constexpr,
) -> tl.tensor:
    """Return where the values of tiles are, [tiles, width], and which of them are in the tensor."""
    column = tl.arange(0, width)
    left = tile % in_row * width
    at = (tile // in_row * last + left)[:, None] + column[None, :]
    return at, (tile < tiles)[:, None] & (column[None, :] < (last - left)[:, None])


@triton.jit
def described(
    x: tl.tensor,
    score: tl.tensor,
    lonely: tl.tensor,
    flags: tl.tensor,
    tiles: tl.tensor,
    width: tl.constexpr,
    last: tl.constexpr,
    in_row: tl.constexpr,
    some: tl.constexpr,
    threshold: tl.constexpr,
) -> None:
    """Store the entropy of tiles as a number in the same order, and whether each has a lone outlier."""
    tile = tl.program_id(0) * some + tl.arange(0, some)
    at, inside = tiles_at(tile, tiles, width, last, in_row)
    size = tl.abs(tl.load(x + at, mask=inside, other=0.0).to(tl.float32))
    bits = bits_of(size)
    peak = tl.max(bits, 1)
    bound = bits_of(tl.div_rn(peak.to(tl.float32, bitcast=True), 1.0 * threshold))
    below = tl.sum((bits < bound[:, None]).to(tl.int32), 1)
    total = tl.maximum(tl.sum(size, 1), 1e-30)
    moment = tl.sum(bits.to(tl.float32) * 1.1920928955078125e-07 * size, 1) / total - 127.0
    key = bits_of(tl.log2(total) - moment)
    tl.store(score + tile, key ^ ((key >> 31) & 0x7FFFFFFF), mask=tile < tiles)
    tl.store(lonely + tile, (below == width - 1).to(tl.int32), mask=tile < tiles)
    if tl.max(peak) >= NOT_FINITE:
        tl.store(flags, 1)


@triton.jit
def edge_of(bins: tl.tensor, sample: tl.tensor, lows: tl.tensor, rounds: tl.constexpr) -> tl.tensor:
    """Return the first bytes of the last score with few bits, and how many more are wanted there."""
    edge = 0
    wanted = lows
    digit = tl.arange(0, 256)
    for byte in tl.static_range(rounds):
        count = tl.load(bins + (sample * 4 + byte) * 256 + digit)
        before = tl.cumsum(count) - count
        here = (before < wanted) & (before + count >= wanted)
        edge = (edge << 8) | tl.sum(tl.where(here, digit, 0))
        wanted = wanted - tl.sum(tl.where(here, before, 0))
    return edge, wanted


@triton.jit
def key_of(score: tl.tensor, at: tl.tensor, there: tl.tensor) -> tl.tensor:
    """Return the scores of tiles, int32, as bits that without a sign are ordered as they are."""
    return tl.load(score + at, mask=there, other=0) ^ (-(1 << 31))


@triton.jit
def byte_counted(
    score: tl.tensor,
    bins: tl.tensor,
    per: tl.tensor,
    lows: tl.tensor,
    size: tl.constexpr,
    byte: tl.constexpr,
) -> None:
    """Add up how many tiles have each value of a byte, of those whose bytes before are the edge's."""
    sample = tl.program_id(1)
    i = tl.program_id(0) * size + tl.arange(0, size)
    key = key_of(score, sample * per + i, i < per)
    mine = i < per
    if byte > 0:
        edge, _ = edge_of(bins, sample, lows, byte)
        mine = mine & (((key >> (32 - 8 * byte)) & ((1 << (8 * byte)) - 1)) == edge)
    digit = tl.where(mine, (key >> (24 - 8 * byte)) & 0xFF, 256)
    found = tl.histogram(digit, 512)
    bin = tl.arange(0, 512)
    tl.atomic_add(bins + (sample * 4 + byte) * 256 + bin, found, mask=(bin < 256) & (found > 0))


@triton.jit
def compared(
    score: tl.tensor,
    bins: tl.tensor,
    order: tl.tensor,
    per: tl.tensor,
    lows: tl.tensor,
    size: tl.constexpr,
) -> None:
    """Store 1 for a tile whose score is the edge's."""
    sample = tl.program_id(1)
    i = tl.program_id(0) * size + tl.arange(0, size)
    key = key_of(score, sample * per + i, i < per)
    edge, _ = edge_of(bins, sample, lows, 4)
    tl.store(order + sample * per + i, (key == edge).to(tl.int32), mask=i < per)


@triton.jit
def lowered(
    score: tl.tensor,
    bins: tl.tensor,
    order: tl.tensor,
    is_low: tl.tensor,
    per: tl.tensor,
    lows: tl.tensor,
    size: tl.constexpr,
) -> None:
    """Store which tiles get few bits; the first ones of those at the edge, as ``order`` counts."""
    sample = tl.program_id(1)
    i = tl.program_id(0) * size + tl.arange(0, size)
    score_of = tl.load(score + sample * per + i, mask=i < per, other=0)
    rank = tl.load(order + sample * per + i, mask=i < per, other=0)
    edge, wanted = edge_of(bins, sample, lows, 4)
    edge = edge ^ (-(1 << 31))
    found = (score_of < edge) | (score_of == edge) & (rank <= wanted)
    tl.store(is_low + sample * per + i, (found & (lows > 0)).to(tl.int32), mask=i < per)


@triton.jit
def exchanged(y: tl.tensor, column: tl.tensor, pivot: tl.tensor) -> tl.tensor:
    """Return tiles with their first value and the one at their pivot exchanged."""
    at_pivot = column == pivot[:, None]
    first = tl.sum(tl.where(column == 0, y, 0.0), 1)
    other = tl.sum(tl.where(at_pivot, y, 0.0), 1)
    return tl.where(column == 0, other[:, None], tl.where(at_pivot, first[:, None], y))


@triton.jit
def tiled(
    x: tl.tensor,
    marks: tl.tensor,
    ranks: tl.tensor,
    codes: tl.tensor,
    stored: tl.tensor,
    zeros: tl.tensor,
    pivots: tl.tensor,
    tiles: tl.tensor,
    highs: tl.tensor,
    width: tl.constexpr,
    stages: tl.constexpr,
    last: tl.constexpr,
    in_row: tl.constexpr,
    some: tl.constexpr,
    high: tl.constexpr,
    low: tl.constexpr,
    least_step: tl.constexpr,
    most_step: tl.constexpr,
) -> None:
    """Store codes of tiles, those of many bits first; scales, zero-points, and where outliers were."""
    tile = tl.program_id(0) * some + tl.arange(0, some)
    column = tl.arange(0, width)[None, :]
    at, inside = tiles_at(tile, tiles, width, last, in_row)
    y = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    is_low = tl.load(marks + tile, mask=tile < tiles, other=0) > 0
    lonely = tl.load(marks + tiles + tile, mask=tile < tiles, other=0) > 0
    if tl.max(lonely.to(tl.int32)) > 0:
        sizes = size_bits(y)
        pivot = tl.max(tl.where(sizes == tl.max(sizes, 1)[:, None], column, 0), 1)
        swapped = tl.reshape(exchanged(y, column, pivot), [some * width])
        turned = tl.reshape(mixed(swapped, some * width, width, stages), [some, width]) * (1.0 / width)
        y = tl.where(lonely[:, None], turned, y)
        rank = tl.load(ranks + tiles + tile, mask=tile < tiles, other=1) - 1
        tl.store(pivots + rank, pivot.to(tl.uint8), mask=lonely)
    least, most = tl.min(y, 1), tl.max(y, 1)
    levels = tl.where(is_low, 2.0**low - 1.0, 2.0**high - 1.0)
    step = tl.maximum(
        tl.div_rn(most, levels) - tl.div_rn(least, levels),
        tl.div_rn(tl.maximum(-least, most), 1.0 * _ZERO_TOP),
    )
    step = rounded_up(step, 16, least_step, most_step)
    inverse = tl.div_rn(1.0, step)
    zero = tl.minimum(tl.maximum(least * inverse, -1.0 * _ZERO_TOP), 1.0 * _ZERO_TOP)
    zero = (zero + 12582912.0) - 12582912.0
    code = tl.minimum(tl.maximum(y * inverse[:, None] - zero[:, None], 0.0), 2.0**high - 1.0)
    code = bits_of(code + 12582912.0) & 0xFF
    code = tl.where(is_low[:, None], tl.minimum(code, 2**low - 1), code)
    lower = tl.load(ranks + tile, mask=tile < tiles, other=1)
    place = tl.where(is_low, highs + lower - 1, tile - lower)
    mine = (tile < tiles)[:, None] & (column >= 0)
    tl.store(codes + place[:, None] * width + column, code.to(tl.uint8), mask=mine)
    tl.store(stored + tile, step.to(tl.bfloat16), mask=tile < tiles)
    tl.store(zeros + tile, zero.to(tl.int16), mask=tile < tiles)


@triton.jit
def unmasked(
    low_bits: tl.tensor,
    lonely_bits: tl.tensor,
    marks: tl.tensor,
    tiles: tl.tensor,
    m: tl.tensor,
    size: tl.constexpr,
) -> None:
    """Store the two bits of each tile as numbers."""
    tile = tl.program_id(0) * size + tl.arange(0, size)
    for part in tl.static_range(2):
        bits = low_bits if part == 0 else lonely_bits
        byte = tl.load(bits + tile % m, mask=tile < tiles, other=0).to(tl.int32)
        tl.store(marks + part * tiles + tile, (byte >> (tile // m)) & 1, mask=tile < tiles)


@triton.jit
def untiled(
    high_codes: tl.tensor,
    low_codes: tl.tensor,
    stored: tl.tensor,
    zeros: tl.tensor,
    pivots: tl.tensor,
    marks: tl.tensor,
    ranks: tl.tensor,
    restored: tl.tensor,
    flags: tl.tensor,
    tiles: tl.tensor,
    highs: tl.tensor,
    m_high: tl.tensor,
    m_low: tl.tensor,
    m_pivots: tl.tensor,
    width: tl.constexpr,
    stages: tl.constexpr,
    last: tl.constexpr,
    in_row: tl.constexpr,
    some: tl.constexpr,
    high: tl.constexpr,
    low: tl.constexpr,
    pivot_bits: tl.constexpr,
    pivot_planes: tl.constexpr,
    least_step: tl.constexpr,
    most_step: tl.constexpr,
    limit: tl.constexpr,
) -> None:
    """Store what tiles stand for. Flags: masks that do not fit, a scale out of range."""
    tile = tl.program_id(0) * some + tl.arange(0, some)
    column = tl.arange(0, width)[None, :]
    mine = tile < tiles
    is_low = tl.load(marks + tile, mask=mine, other=0) > 0
    lonely = tl.load(marks + tiles + tile, mask=mine, other=0) > 0
    lower = tl.load(ranks + tile, mask=mine, other=1)
    j = tl.where(is_low, lower - 1, tile - lower)[:, None] * width + column
    lows, fits = tiles - highs, mine & tl.where(is_low, lower <= tiles - highs, tile - lower < highs)
    many = position_at(high_codes, j, (fits & ~is_low)[:, None] & (column >= 0), highs * width, m_high, high)
    few = position_at(low_codes, j, (fits & is_low)[:, None] & (column >= 0), lows * width, m_low, low)
    code = tl.where(is_low[:, None], few, many)
    zero = tl.load(zeros + tile, mask=mine, other=0).to(tl.int32)
    step = tl.load(stored + tile, mask=mine, other=0.0).to(tl.float32)
    y = (code + zero[:, None]).to(tl.float32)
    if tl.max(lonely.to(tl.int32)) > 0:
        count = tl.load(ranks + 2 * tiles - 1)
        k = tl.load(ranks + tiles + tile, mask=mine, other=1) - 1
        pivot = position_at(pivots, k, lonely & (k < m_pivots * pivot_planes), count, m_pivots, pivot_bits)
        back = tl.reshape(code.to(tl.float32), [some * width])
        back = tl.reshape(mixed(back, some * width, width, stages), [some, width])
        back += tl.where(column == 0, (zero * width).to(tl.float32)[:, None], 0.0)
        y = tl.where(lonely[:, None], exchanged(back, column, pivot), y)
    at, inside = tiles_at(tile, tiles, width, last, in_row)
    y = narrowed(within(y * step[:, None], limit), restored.dtype.element_ty)
    tl.store(restored + at, y, mask=inside)
    if tl.max(tl.where(mine & ~((step >= least_step) & (step <= most_step)), 1, 0)) > 0:
        tl.store(flags + 1, 1)
    if tl.program_id(0) == 0:
        words = (tl.load(ranks + 2 * tiles - 1) + pivot_planes - 1) // pivot_planes
        wrong = (tl.load(ranks + tiles - 1) != tiles - highs) | (words != m_pivots)
        tl.store(flags, wrong.to(tl.int32))
