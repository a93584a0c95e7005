"""Quantiser scales on the wire: positive normal floats of few significant bits, rounded up: nothing clips.

=========  =====  ===========================================================================================
format     bytes  a scale is
=========  =====  ===========================================================================================
bfloat16   2      8 significant bits, from 2**-100 to 2**120: any gradient, any activation
float16    2      11 significant bits, from 2**-14 to 65504: values below 2**-15 or so become zero
e5m3       1      4 significant bits over the 31 octaves below the tensor's largest scale, whose exponent is
                  one more byte at the end of the part
=========  =====  ===========================================================================================

A code of at most 8 bits times such a scale has at most 19 significant bits, so the product is exact in
float32, and none is denormal: fused or separate multiply-add, on any device, give the same reconstruction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.types import PayloadError


@dataclass(frozen=True)
class ScaleFormat:
    """Width and range of one way to store scales."""

    dtype: torch.dtype
    mantissa: int  # stored mantissa bits
    low: float
    high: float


FORMATS = {
    "bfloat16": ScaleFormat(torch.bfloat16, 7, 2.0**-100, 2.0**120),
    "float16": ScaleFormat(torch.float16, 10, 2.0**-14, 65504.0),
    "e5m3": ScaleFormat(torch.uint8, 3, 2.0**-100, 2.0**120),
}
OCTAVES = 32 * 8  # codes of one e5m3 byte: 32 octaves of 8 steps


def store(scale: Tensor, name: str) -> Tensor:
    """Return ``scale`` (float32 [n], finite, not negative) in wire form, rounded up within the range."""
    f = FORMATS[name]
    drop = 23 - f.mantissa
    ticks = (scale.clamp(f.low, f.high).view(torch.int32) + ((1 << drop) - 1)) >> drop
    if name != "e5m3":
        return (ticks << drop).view(torch.float32).clamp_max_(f.high).to(f.dtype)
    if not scale.numel():
        return ticks.to(torch.uint8)
    exponent = ticks.amax() >> 3
    codes = (ticks - ((exponent + 1) * 8 - OCTAVES)).clamp_min_(0)
    return torch.cat([codes, exponent.reshape(1)]).to(torch.uint8)


def load(stored: Tensor, name: str) -> Tensor:
    """Return the scales of a wire form, float32 [n]; ``PayloadError`` for one that ``store`` never writes."""
    f = FORMATS[name]
    scale = expand(stored, name)
    if scale.numel() and name != "e5m3":  # every e5m3 byte is a scale
        low, high = torch.aminmax(scale)
        if not bool((low >= f.low) & (high <= f.high)):  # false for NaN too
            raise PayloadError(f"a {name} scale lies outside {f.low:g}..{f.high:g}")
    return scale


def expand(stored: Tensor, name: str) -> Tensor:
    """Return the scales of a trusted wire form, float32 [n]."""
    if name != "e5m3":
        return stored.to(torch.float32)
    f = FORMATS[name]
    ticks = stored[:-1].to(torch.int32) + ((stored[-1:].to(torch.int32) + 1) * 8 - OCTAVES)
    return (ticks.clamp_(_ticks(f.low), _ticks(f.high)) << 20).view(torch.float32)


def bounds(name: str) -> tuple[float, float]:
    """Return the smallest and the largest scale of a format."""
    return FORMATS[name].low, FORMATS[name].high


def stored_numel(n: int, name: str) -> int:
    """Return the elements that ``n`` scales take in wire form."""
    return n + 1 if name == "e5m3" and n else n


def powers_of_two(exponents: Tensor) -> Tensor:
    """Return 2**exponents, float32, of exponents in -126..127: exact, which a device's ``pow`` may not be."""
    return ((exponents.to(torch.int32) + 127) << 23).view(torch.float32)


def _ticks(power_of_two: float) -> int:
    return (127 + int(math.log2(power_of_two))) * 8
