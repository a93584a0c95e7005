"""Kernels of ``Uniform``, with a Hadamard transform or without: codes, scales and values in one pass.

A program works on a stretch of each plane (see ``..bits``), so that it writes whole words. What kernels have
to say stands in ``flags``, int32, zeros at first: 1 where something is wrong; the largest magnitude of all,
as bits; then that of each scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thinwire.codecs.kernels.fused.arithmetic import (
    E5M3,
    FLAT,
    NOT_FINITE,
    ROWS,
    WHOLE,
    code_of,
    e5m3_code,
    e5m3_scale,
    level_of,
    mixed,
    narrowed,
    rounded_up,
    scale_of,
    share_of,
    size_bits,
    tick_of,
    within,
)


@triton.jit
def residual_of(
    x: tl.tensor, reference: tl.tensor, at: tl.tensor, inside: tl.tensor, against: tl.constexpr
) -> tl.tensor:
    """Return values, float32, and the reference they are coded against: what is coded is their difference."""
    y = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    held = y
    if against:
        held = tl.load(reference + at, mask=inside, other=0.0)
        y = y - held
    return y, held


@triton.jit
def put_back(
    restored: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    y: tl.tensor,
    held: tl.tensor,
    against: tl.constexpr,
    limit: tl.constexpr,
) -> None:
    """Store what decoded values ``y`` stand for."""
    y = within(y, limit)
    if against:
        y = held + y
    tl.store(restored + at, narrowed(y, restored.dtype.element_ty), mask=inside)


@triton.jit
def put_words(packed: tl.tensor, word: tl.tensor, i: tl.tensor, m: tl.tensor, nbytes: tl.constexpr) -> None:
    """Store the low bytes of words, each ``m`` bytes behind the one before."""
    for byte in tl.static_range(nbytes):
        tl.store(packed + byte * m + i, ((word >> (8 * byte)) & 0xFF).to(tl.uint8), mask=i < m)


@triton.jit
def by_groups(
    x: tl.tensor,
    reference: tl.tensor,
    restored: tl.tensor,
    packed: tl.tensor,
    stored: tl.tensor,
    flags: tl.tensor,
    n: tl.tensor,
    m: tl.tensor,
    bits: tl.constexpr,
    planes: tl.constexpr,
    share: tl.constexpr,
    low: tl.constexpr,
    high: tl.constexpr,
    drop: tl.constexpr,
    group: tl.constexpr,
    some: tl.constexpr,
    block: tl.constexpr,
    stages: tl.constexpr,
    against: tl.constexpr,
    back: tl.constexpr,
    limit: tl.constexpr,
) -> None:
    """Quantise groups of consecutive values, each plane being a whole number of them."""
    size: tl.constexpr = some * group
    top: tl.constexpr = 2 ** (bits - 1) - 1
    first = tl.program_id(0) * size
    i = first + tl.arange(0, size)
    word = tl.zeros([size], tl.int64 if planes * bits > 32 else tl.int32)
    worst = tl.zeros([some], tl.int32)
    for k in tl.static_range(planes):
        at = k * m + i
        inside = (i < m) & (at < n)
        y, held = residual_of(x, reference, at, inside, against)
        if stages > 0:
            y = mixed(y * (1.0 / block), size, block, stages)
        rows = tl.reshape(y, [some, group])
        peak = tl.max(size_bits(rows), 1)
        worst = tl.maximum(worst, peak)
        step = rounded_up(share_of(peak, share), drop, low, high)
        number = (k * m + first) // group + tl.arange(0, some)
        mine = (first + tl.arange(0, some) * group < m) & (number < n // group)
        tl.store(stored + number, step.to(stored.dtype.element_ty), mask=mine)
        codes = code_of(rows, tl.div_rn(1.0, step)[:, None], top)
        word |= tl.where(inside, tl.reshape(codes, [size]), 0).to(word.dtype) << (k * bits)
        if back:
            y = tl.reshape(level_of(codes, top, bits) * step[:, None], [size])
            if stages > 0:
                y = mixed(y, size, block, stages)
            put_back(restored, at, inside, y, held, against, limit)
    put_words(packed, word, i, m, planes * bits // 8)
    if tl.max(worst) >= NOT_FINITE:
        tl.store(flags, 1)


@triton.jit
def peaks_of_rows(
    x: tl.tensor,
    reference: tl.tensor,
    flags: tl.tensor,
    rows: tl.tensor,
    width: tl.constexpr,
    last: tl.constexpr,
    in_row: tl.constexpr,
    some: tl.constexpr,
    wide: tl.constexpr,
    against: tl.constexpr,
    overall: tl.constexpr,
) -> None:
    """Store the largest magnitude of each row of ``width`` values, as bits; ``overall`` that of all too."""
    row = tl.program_id(0) * some + tl.arange(0, some)
    start = row // in_row * last + row % in_row * width
    length = tl.minimum(width, last - row % in_row * width)
    peak = tl.zeros([some], tl.int32)
    for left in tl.range(0, width, wide):
        column = left + tl.arange(0, wide)
        inside = (row < rows)[:, None] & (column[None, :] < length[:, None])
        y, _ = residual_of(x, reference, start[:, None] + column[None, :], inside, against)
        peak = tl.maximum(peak, tl.max(size_bits(y), 1))
    tl.store(flags + 2 + row, peak, mask=row < rows)
    if overall:
        tl.atomic_max(flags + 1, tl.max(peak))


@triton.jit
def peaks_of_columns(
    x: tl.tensor,
    reference: tl.tensor,
    flags: tl.tensor,
    rows: tl.tensor,
    last: tl.constexpr,
    tall: tl.constexpr,
    wide: tl.constexpr,
    against: tl.constexpr,
    whole: tl.constexpr,
    overall: tl.constexpr,
) -> None:
    """Raise ``peaks``, of each column or the only one, to the magnitudes of 16 ``tall`` rows, as bits."""
    column = tl.program_id(1) * wide + tl.arange(0, wide)
    first = tl.program_id(0) * (16 * tall)
    peak = tl.zeros([wide], tl.int32)
    for down in tl.range(0, 16 * tall, tall):
        row = first + down + tl.arange(0, tall)
        inside = (row < rows)[:, None] & (column < last)[None, :]
        y, _ = residual_of(x, reference, row[:, None] * last + column[None, :], inside, against)
        peak = tl.maximum(peak, tl.max(size_bits(y), 0))
    if whole:
        tl.atomic_max(flags + 2, tl.max(peak))
    else:
        tl.atomic_max(flags + 2 + column, peak, mask=column < last)
    if overall:
        tl.atomic_max(flags + 1, tl.max(peak))


@triton.jit
def by_peaks(
    x: tl.tensor,
    reference: tl.tensor,
    restored: tl.tensor,
    packed: tl.tensor,
    stored: tl.tensor,
    flags: tl.tensor,
    n: tl.tensor,
    m: tl.tensor,
    scales: tl.tensor,
    bits: tl.constexpr,
    planes: tl.constexpr,
    share: tl.constexpr,
    low: tl.constexpr,
    high: tl.constexpr,
    drop: tl.constexpr,
    form: tl.constexpr,
    shared: tl.constexpr,
    width: tl.constexpr,
    last: tl.constexpr,
    in_row: tl.constexpr,
    size: tl.constexpr,
    against: tl.constexpr,
    back: tl.constexpr,
    limit: tl.constexpr,
) -> None:
    """Quantise values of any layout, the largest magnitude under each scale being known; store scales."""
    top: tl.constexpr = 2 ** (bits - 1) - 1
    i = tl.program_id(0) * size + tl.arange(0, size)
    word = tl.zeros([size], tl.int64 if planes * bits > 32 else tl.int32)
    worst = tl.zeros([size], tl.int32)
    exponent = 0
    if form == E5M3:
        exponent = tick_of(share_of(tl.load(flags + 1), share), low, high) >> 3
        tl.store(stored + scales, exponent.to(tl.uint8), mask=tl.program_id(0) == 0)
    for k in tl.static_range(planes):
        at = k * m + i
        inside = (i < m) & (at < n)
        y, held = residual_of(x, reference, at, inside, against)
        number = scale_of(at, shared, width, last, in_row)
        peak = tl.load(flags + 2 + number, mask=inside, other=0)
        worst = tl.maximum(worst, peak)
        new = inside & is_first(at, shared, width, last)
        if form == E5M3:
            code = e5m3_code(tick_of(share_of(peak, share), low, high), exponent)
            step = e5m3_scale(code, exponent, low, high)
            tl.store(stored + number, code.to(tl.uint8), mask=new)
        else:
            step = rounded_up(share_of(peak, share), drop, low, high)
            tl.store(stored + number, step.to(stored.dtype.element_ty), mask=new)
        codes = code_of(y, tl.div_rn(1.0, step), top)
        word |= tl.where(inside, codes, 0).to(word.dtype) << (k * bits)
        if back:
            put_back(restored, at, inside, level_of(codes, top, bits) * step, held, against, limit)
    put_words(packed, word, i, m, planes * bits // 8)
    if tl.max(worst) >= NOT_FINITE:
        tl.store(flags, 1)


@triton.jit
def is_first(at: tl.tensor, shared: tl.constexpr, width: tl.constexpr, last: tl.constexpr) -> tl.tensor:
    """Return whether the value ``at`` is the first one of its scale."""
    if shared == FLAT:
        return at % width == 0
    if shared == WHOLE:
        return at == 0
    if shared == ROWS:
        return at % last % width == 0
    return at < last


@triton.jit
def dequantised(
    packed: tl.tensor,
    stored: tl.tensor,
    reference: tl.tensor,
    restored: tl.tensor,
    flags: tl.tensor,
    n: tl.tensor,
    m: tl.tensor,
    scales: tl.tensor,
    bits: tl.constexpr,
    planes: tl.constexpr,
    low: tl.constexpr,
    high: tl.constexpr,
    form: tl.constexpr,
    shared: tl.constexpr,
    width: tl.constexpr,
    last: tl.constexpr,
    in_row: tl.constexpr,
    size: tl.constexpr,
    block: tl.constexpr,
    stages: tl.constexpr,
    against: tl.constexpr,
    limit: tl.constexpr,
) -> None:
    """Store what codes and scales stand for, on top of a reference or not; find scales out of range."""
    top: tl.constexpr = max(1, 2 ** (bits - 1) - 1)
    nbytes: tl.constexpr = planes * bits // 8
    i = tl.program_id(0) * size + tl.arange(0, size)
    word = tl.zeros([size], tl.int64 if planes * bits > 32 else tl.int32)
    for byte in tl.static_range(nbytes):
        word |= tl.load(packed + byte * m + i, mask=i < m, other=0).to(word.dtype) << (8 * byte)
    exponent = 0
    if form == E5M3:
        exponent = tl.load(stored + scales).to(tl.int32)
    wrong = tl.zeros([size], tl.int32)
    for k in tl.static_range(planes):
        at = k * m + i
        inside = (i < m) & (at < n)
        scale = tl.load(stored + scale_of(at, shared, width, last, in_row), mask=inside, other=0)
        if form == E5M3:
            step = e5m3_scale(scale.to(tl.int32), exponent, low, high)
        else:
            step = scale.to(tl.float32)
            wrong = tl.where((step >= low) & (step <= high) | ~inside, wrong, 1)
        y = level_of(((word >> (k * bits)) & (2**bits - 1)).to(tl.int32), top, bits) * step
        if stages > 0:
            y = mixed(y, size, block, stages)
        held = y
        if against:
            held = tl.load(reference + at, mask=inside, other=0.0)
        put_back(restored, at, inside, y, held, against, limit)
    if tl.max(wrong) > 0:
        tl.store(flags, 1)
