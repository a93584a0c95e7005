"""What kernels have in common, to the bits that torch's operations give: see ``..scales`` and ``..bits``."""

from __future__ import annotations

import triton
import triton.language as tl

BFLOAT16, FLOAT16, E5M3 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # forms of scales
FLAT, ROWS, COLUMN, WHOLE = (tl.constexpr(i) for i in range(4))  # which values share a scale
NOT_FINITE = tl.constexpr(0x7F800000)  # the bits of magnitudes from here on are none
_OCTAVES = tl.constexpr(256)


@triton.jit
def bits_of(x: tl.tensor) -> tl.tensor:
    """Return the bits of float32, int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def size_bits(x: tl.tensor) -> tl.tensor:
    """Return the bits of magnitudes, which are ordered as these are; those of a NaN are on top."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def rounded_up(step: tl.tensor, drop: tl.constexpr, low: tl.constexpr, high: tl.constexpr) -> tl.tensor:
    """Return scales within their format's range, without their ``drop`` low bits: ``scales.store``."""
    bits = bits_of(tl.minimum(tl.maximum(step, low), high)) + ((1 << drop) - 1)
    return tl.minimum(((bits >> drop) << drop).to(tl.float32, bitcast=True), high)


@triton.jit
def share_of(peak: tl.tensor, share: tl.constexpr) -> tl.tensor:
    """Return wanted scales: ``share`` of the largest magnitudes, which are given as bits."""
    return peak.to(tl.float32, bitcast=True) * share


@triton.jit
def tick_of(step: tl.tensor, low: tl.constexpr, high: tl.constexpr) -> tl.tensor:
    """Return how many eighths of octaves a scale is above 2**-127, rounded up."""
    return (bits_of(tl.minimum(tl.maximum(step, low), high)) + 0xFFFFF) >> 20


@triton.jit
def e5m3_code(tick: tl.tensor, exponent: tl.tensor) -> tl.tensor:
    """Return the byte of a scale below the largest, whose exponent is given."""
    return tl.maximum(tick - ((exponent + 1) * 8 - _OCTAVES), 0)


@triton.jit
def e5m3_scale(code: tl.tensor, exponent: tl.tensor, low: tl.constexpr, high: tl.constexpr) -> tl.tensor:
    """Return the scale that a byte stands for."""
    tick = code + ((exponent + 1) * 8 - _OCTAVES)
    scale = (tl.minimum(tl.maximum(tick, 0), 255 * 8) << 20).to(tl.float32, bitcast=True)
    return tl.minimum(tl.maximum(scale, low), high)


@triton.jit
def code_of(x: tl.tensor, inverse: tl.tensor, top: tl.constexpr) -> tl.tensor:
    """Return the codes of values, int32: the nearest levels from ``-top``, which is 0, to ``top``."""
    y = tl.minimum(tl.maximum(x * inverse, -1.0 * top), 1.0 * top)
    return bits_of(y + (12582912.0 + top)) & 0xFF


@triton.jit
def level_of(code: tl.tensor, top: tl.constexpr, bits: tl.constexpr) -> tl.tensor:
    """Return the levels of codes, float32; a byte that no encoder writes is what torch makes of it."""
    level = (code - top) & 0xFF
    if bits == 1:
        level = (level + code) & 0xFF
    return (level - ((level & 0x80) << 1)).to(tl.float32)


@triton.jit
def scale_of(
    at: tl.tensor, shared: tl.constexpr, width: tl.constexpr, last: tl.constexpr, in_row: tl.constexpr
) -> tl.tensor:
    """Return the number of the scale of the value ``at``; ``in_row`` are those of ``last`` values."""
    if shared == FLAT:
        return at // width
    if shared == ROWS:
        return at // last * in_row + at % last // width
    if shared == COLUMN:
        return at % last
    return at * 0


@triton.jit
def mixed(y: tl.tensor, size: tl.constexpr, block: tl.constexpr, stages: tl.constexpr) -> tl.tensor:
    """Return the Hadamard transform of each ``block`` of ``size`` values, added in torch's order."""
    for stage in tl.static_range(stages):
        y = _butterflies(y, size, block >> (stage + 1))
    return y


@triton.jit
def _butterflies(y: tl.tensor, size: tl.constexpr, half: tl.constexpr) -> tl.tensor:
    pairs = tl.reshape(y, [size // (2 * half), 2, half])
    own = bits_of(pairs)
    other = (own ^ tl.xor_sum(own, 1, keep_dims=True)).to(tl.float32, bitcast=True)
    is_first = (tl.arange(0, 2) == 0)[None, :, None]
    return tl.reshape(tl.where(is_first, pairs + other, other - pairs), [size])


@triton.jit
def within(x: tl.tensor, limit: tl.constexpr) -> tl.tensor:
    """Return ``x`` clamped to what its format holds; 0 stands for no limit."""
    if limit > 0:
        x = tl.minimum(tl.maximum(x, -1.0 * limit), 1.0 * limit)
    return x


@triton.jit
def narrowed(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return finite float32 in another dtype, rounded to nearest even: the interpreter cuts bfloat16 off."""
    if dtype == tl.bfloat16:
        bits = bits_of(x)
        bits += 0x7FFF + ((bits >> 16) & 1)
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)
