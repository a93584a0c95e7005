"""Kernels of ``RankOne``: sums of magnitudes in whole numbers, scales of rows and columns, levels.

``flags``, int32, zeros at first: 1 where something is wrong; then each matrix's largest magnitude among some
of its values, as bits; then that among all. ``sums``, int64, zeros at first: that of each matrix, those of
all rows, those of all columns, in units that follow from the former magnitude; then all of them again, in
units that follow from the latter, for matrices where these are others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thinwire.codecs.kernels.fused.arithmetic import NOT_FINITE, rounded_up, size_bits
from thinwire.codecs.kernels.fused.quantising import put_back, put_words, residual_of


@triton.jit
def peaks_of_matrices(
    x: tl.tensor,
    reference: tl.tensor,
    flags: tl.tensor,
    per: tl.tensor,
    size: tl.constexpr,
    laps: tl.constexpr,
    stride: tl.constexpr,
    against: tl.constexpr,
) -> None:
    """Raise each matrix's peak to one in ``stride`` of its ``per`` values, ``laps`` times ``size``."""
    matrix = tl.program_id(1)
    peak = tl.zeros([size], tl.int32)
    for lap in tl.static_range(laps):
        i = (tl.program_id(0) * laps * stride + lap) * size + tl.arange(0, size)
        y, _ = residual_of(x, reference, matrix * per + i, i < per, against)
        peak = tl.maximum(peak, size_bits(y))
    tl.atomic_max(flags + 1 + matrix, tl.max(peak))


@triton.jit
def sums_of_matrices(
    x: tl.tensor,
    reference: tl.tensor,
    flags: tl.tensor,
    sums: tl.tensor,
    matrices: tl.tensor,
    rows: tl.tensor,
    width: tl.constexpr,
    tall: tl.constexpr,
    wide: tl.constexpr,
    laps: tl.constexpr,
    again: tl.constexpr,
    against: tl.constexpr,
) -> None:
    """Add up magnitudes of ``laps`` times ``tall`` rows, as far as they reach 2**-20 of the largest.

    That one is guessed, and found out on the way; so where the guess was wrong, this is done ``again``.
    """
    matrix = tl.program_id(2)
    column = tl.program_id(1) * wide + tl.arange(0, wide)
    exponent = exponent_of(flags + 1 + matrix)
    wanted = rows
    if again:
        sums += matrices * (1 + rows + width)
        wanted = tl.where(exponent == exponent_of(flags + 1 + matrices + matrix), 0, rows)
        exponent = exponent_of(flags + 1 + matrices + matrix)
    unit = ((274 - exponent) << 23).to(tl.float32, bitcast=True)
    by_row = sums + matrices + matrix * rows
    by_column = sums + matrices * (1 + rows) + matrix * width
    down = tl.zeros([wide], tl.int32)
    peak = tl.zeros([wide], tl.int32)
    for lap in tl.static_range(laps):
        row = (tl.program_id(0) * laps + lap) * tall + tl.arange(0, tall)
        inside = (row < wanted)[:, None] & (column < width)[None, :]
        at = (matrix * rows + row)[:, None] * width + column[None, :]
        y, _ = residual_of(x, reference, at, inside, against)
        numbers = (tl.abs(y) * unit).to(tl.int32)
        down += tl.sum(numbers, 0)
        peak = tl.maximum(peak, tl.max(size_bits(y), 0))
        tl.atomic_add(by_row + row, tl.sum(numbers, 1).to(tl.int64), mask=row < wanted)
    tl.atomic_add(by_column + column, down.to(tl.int64), mask=column < width)
    tl.atomic_add(sums + matrix, tl.sum(down.to(tl.int64)))
    if not again:
        tl.atomic_max(flags + 1 + matrices + matrix, tl.max(peak))


@triton.jit
def exponent_of(peak: tl.tensor) -> tl.tensor:
    """Return the biased exponent of magnitudes: below 2**-100 they count for nothing."""
    return tl.maximum(tl.load(peak) >> 23, 27)


@triton.jit
def scales_of_matrices(
    flags: tl.tensor,
    sums: tl.tensor,
    stored: tl.tensor,
    matrices: tl.tensor,
    rows: tl.tensor,
    width: tl.constexpr,
    size: tl.constexpr,
    least_row: tl.constexpr,
    most_row: tl.constexpr,
    least_column: tl.constexpr,
    most_column: tl.constexpr,
) -> None:
    """Store the scales of all rows, then those of all columns, bfloat16."""
    i = tl.program_id(0) * size + tl.arange(0, size)
    of_row = i < matrices * rows
    inside = i < matrices * (rows + width)
    matrix = tl.where(of_row, i // rows, (i - matrices * rows) // width)
    guess = tl.maximum(tl.load(flags + 1 + matrix, mask=inside, other=0) >> 23, 27)
    peak = tl.load(flags + 1 + matrices + matrix, mask=inside, other=0)
    exponent = tl.maximum(peak >> 23, 27)
    again = tl.where(exponent == guess, 0, matrices * (1 + rows + width))
    number = tl.load(sums + again + matrices + i, mask=inside, other=0).to(tl.float64)
    total = tl.maximum(tl.load(sums + again + matrix, mask=inside, other=1), 1).to(tl.float64)
    unit = ((exponent - 20) << 23).to(tl.float32, bitcast=True).to(tl.float64)
    row = ((number / width) * unit).to(tl.float32)
    column = (number * width / total).to(tl.float32)
    row = tl.minimum(tl.maximum(row, least_row), most_row)
    column = tl.minimum(tl.maximum(column, least_column), most_column)
    scale = rounded_up(tl.where(of_row, row, column), 16, least_row, most_row)
    tl.store(stored + i, scale.to(tl.bfloat16), mask=inside)
    if tl.max(peak) >= NOT_FINITE:
        tl.store(flags, 1)


@triton.jit
def value_of(
    code: tl.tensor, row: tl.tensor, column: tl.tensor, table: tl.tensor, bits: tl.constexpr
) -> tl.tensor:
    """Return what codes stand for under their scales, float32; ``table`` has the levels, after the edges."""
    half: tl.constexpr = 2 ** (bits - 1)
    if bits == 1:
        size = row * column
    else:
        level = tl.where(code >= half, code - half, half - 1 - code)
        size = row * tl.load(table + half - 1 + level) * column
    return tl.where(code >= half, size, -size)


@triton.jit
def code_of(
    y: tl.tensor, row: tl.tensor, column: tl.tensor, table: tl.tensor, bits: tl.constexpr
) -> tl.tensor:
    """Return the codes of values: levels from the lowest up; ``table`` has the edges between magnitudes."""
    half: tl.constexpr = 2 ** (bits - 1)
    level = tl.zeros_like(size_bits(y))
    for j in tl.static_range(half - 1):
        level += (size_bits(y) >= size_bits(row * tl.load(table + j) * column)).to(tl.int32)
    return tl.where(y.to(tl.int32, bitcast=True) >= 0, half + level, half - 1 - level)


@triton.jit
def levelled(
    x: tl.tensor,
    reference: tl.tensor,
    restored: tl.tensor,
    packed: tl.tensor,
    stored: tl.tensor,
    table: tl.tensor,
    n: tl.tensor,
    m: tl.tensor,
    rows: tl.tensor,
    per: tl.tensor,
    width: tl.constexpr,
    size: tl.constexpr,
    bits: tl.constexpr,
    planes: tl.constexpr,
    against: tl.constexpr,
    back: tl.constexpr,
    limit: tl.constexpr,
) -> None:
    """Code values by their scales; ``rows`` are those of all matrices, ``per`` the values of each."""
    i = tl.program_id(0) * size + tl.arange(0, size)
    word = tl.zeros([size], tl.int32)
    for k in tl.static_range(planes):
        at = k * m + i
        inside = (i < m) & (at < n)
        y, held = residual_of(x, reference, at, inside, against)
        row = tl.load(stored + at // width, mask=inside, other=0).to(tl.float32)
        column = tl.load(stored + rows + at // per * width + at % width, mask=inside, other=0).to(tl.float32)
        code = code_of(y, row, column, table, bits)
        word |= tl.where(inside, code, 0) << (k * bits)
        if back:
            put_back(restored, at, inside, value_of(code, row, column, table, bits), held, against, limit)
    put_words(packed, word, i, m, planes * bits // 8)


@triton.jit
def scaled(
    packed: tl.tensor,
    by_row: tl.tensor,
    by_column: tl.tensor,
    reference: tl.tensor,
    restored: tl.tensor,
    flags: tl.tensor,
    table: tl.tensor,
    n: tl.tensor,
    m: tl.tensor,
    per: tl.tensor,
    width: tl.constexpr,
    size: tl.constexpr,
    bits: tl.constexpr,
    planes: tl.constexpr,
    least_row: tl.constexpr,
    most_row: tl.constexpr,
    least_column: tl.constexpr,
    most_column: tl.constexpr,
    against: tl.constexpr,
    limit: tl.constexpr,
) -> None:
    """Store what codes and scales stand for; flag 1 or 2 is for a row's or a column's scale out of range."""
    i = tl.program_id(0) * size + tl.arange(0, size)
    word = tl.zeros([size], tl.int32)
    for byte in tl.static_range(planes * bits // 8):
        word |= tl.load(packed + byte * m + i, mask=i < m, other=0).to(tl.int32) << (8 * byte)
    wrong = tl.zeros([size], tl.int32)
    for k in tl.static_range(planes):
        at = k * m + i
        inside = (i < m) & (at < n)
        row = tl.load(by_row + at // width, mask=inside, other=0).to(tl.float32)
        column = tl.load(by_column + at // per * width + at % width, mask=inside, other=0).to(tl.float32)
        wrong |= tl.where((row >= least_row) & (row <= most_row) | ~inside, 0, 1)
        wrong |= tl.where((column >= least_column) & (column <= most_column) | ~inside, 0, 2)
        y = value_of((word >> (k * bits)) & (2**bits - 1), row, column, table, bits)
        held = y
        if against:
            held = tl.load(reference + at, mask=inside, other=0.0)
        put_back(restored, at, inside, y, held, against, limit)
    if tl.max(wrong & 1) > 0:
        tl.store(flags, 1)
    if tl.max(wrong & 2) > 0:
        tl.store(flags + 1, 1)
