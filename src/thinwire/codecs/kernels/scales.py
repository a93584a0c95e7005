"""Quantiser scales: which values share one (``Grid``), and how it is stored, rounded up, so nothing clips.

On the wire they are positive normal floats of few significant bits.

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
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from thinwire.types import PayloadError, TensorSpec
from thinwire.verdicts import refuse_outside

OCTAVES = 32 * 8  # codes of one e5m3 byte: 32 octaves of 8 steps
SHARED_BY = ("tensor", "channel", "token", "group")
BLOCK = 1 << 18  # values to work on at a time on a CPU: enough to hide call overhead, and near its caches
_kept = threading.local()


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
        refuse_outside(*torch.aminmax(scale), (f.low, f.high), lambda: outside(name))
    return scale


def outside(name: str) -> PayloadError:
    """Return the error for a scale that ``store`` never writes."""
    return PayloadError("a {} scale lies outside {:g}..{:g}".format(name, *bounds(name)))


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


def matrices(spec: TensorSpec) -> tuple[int, int, int]:
    """Return a tensor's number of matrices, their rows and their width, the length of its last dimension.

    A sample is a matrix; but one of a tensor of two dimensions or fewer is a row of the only one. All three
    are 0 where the tensor is empty.
    """
    if not spec.numel:
        return 0, 0, 0
    width = spec.shape[-1] if spec.shape else 1
    count = spec.shape[0] if len(spec.shape) > 2 else 1
    return count, spec.numel // (count * width), width


@dataclass(frozen=True)
class Grid:
    """A tensor as [rows, width], where each row, each column or the whole has one scale.

    Rows of the last dimension that are no whole number of groups are filled up with zeros.
    """

    by: str  # "row", "column" or "whole"
    rows: int
    width: int
    scales: int
    last: int  # length of the last dimension
    padded: int  # the same, filled up to whole groups

    @classmethod
    def of(cls, spec: TensorSpec, shared_by: str, group: int) -> Grid:
        """Return the grid of a tensor whose scales are shared by one of ``SHARED_BY``."""
        return _grid(spec.shape, shared_by, group)

    def spread(self, x: Tensor) -> Tensor:
        """Return ``x`` as [rows, width]."""
        if self.padded != self.last:
            x = functional.pad(x.reshape(-1, self.last), (0, self.padded - self.last))
        return x.reshape(self.rows, self.width)

    def gather(self, values: Tensor) -> Tensor:
        """Return [rows, width] as the flat tensor it was spread from."""
        if self.padded != self.last:
            values = values.reshape(-1, self.padded)[:, : self.last]
        return values.reshape(-1)

    def broadcast(self, scale: Tensor) -> Tensor:
        """Return ``scale`` [scales] in the shape that multiplies [rows, width]."""
        return scale[:, None] if self.by == "row" else scale[None, :]

    def blocks(self, values: Tensor, scale: Tensor | None = None) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield first row, values and broadcast scale of each block of rows."""
        n = block_rows(self.rows, self.width, values.device)
        wide = values if scale is None else self.broadcast(scale)
        for at in range(0, self.rows, n):
            yield at, values[at : at + n], wide[at : at + n] if self.by == "row" else wide

    def peaks(self, values: Tensor) -> Tensor:
        """Return the largest magnitude that each scale covers, [scales]."""
        parts = []
        for _, block, _ in self.blocks(values):
            # Magnitudes are ordered as their bits are, NaN on top, and integers reduce faster.
            bits = scratch(tuple(block.shape), torch.int32, block.device)
            torch.bitwise_and(block.view(torch.int32), 0x7FFFFFFF, out=bits)
            parts.append(bits.amax(1) if self.by == "row" else bits.amax(0))
        if self.by == "row":
            return torch.cat(parts).view(torch.float32)
        peaks = torch.stack(parts).amax(0)
        return (peaks if self.by == "column" else peaks.amax(0, keepdim=True)).view(torch.float32)

    def means(self, values: Tensor) -> Tensor:
        """Return the mean magnitude that each scale covers, filling not counted, [scales]."""
        if self.by != "row":
            share = 1 / self.rows
            dims = (0,) if self.by == "column" else (0, 1)
            parts = [block.abs().mul_(share).sum(dims) for _, block, _ in self.blocks(values)]
            return torch.stack(parts).sum(0).reshape(-1)
        mean = torch.cat([block.abs().mul_(1 / self.width).sum(1) for _, block, _ in self.blocks(values)])
        if self.padded != self.last:
            mean.view(-1, self.padded // self.width)[:, -1] *= self.width / (self.last % self.width)
        return mean


@lru_cache(maxsize=1024)  # asked for several times a message
def _grid(shape: tuple[int, ...], shared_by: str, group: int) -> Grid:
    last = shape[-1] if shape else 1
    outer = math.prod(shape[:-1])
    if shared_by == "tensor":
        return Grid("whole", outer * last, 1, min(1, outer * last), last, last)
    if shared_by == "channel":
        return Grid("column", outer, last, last if outer else 0, last, last)
    width = max(1, last if shared_by == "token" else min(group, last))
    padded = -(-last // width) * width
    rows = outer * padded // width
    return Grid("row", rows, width, rows, last, padded)


def block_rows(rows: int, width: int, device: torch.device) -> int:
    """Return how many rows of ``width`` values to work on at a time: all of them on an accelerator."""
    return max(1, BLOCK // max(1, width)) if device.type == "cpu" else max(1, rows)


def scratch(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, slot: int = 0) -> Tensor:
    """Return uninitialised memory; the next call with the same ``slot`` in this thread returns it again.

    For temporaries that never leave a function: a fresh megabyte often comes from the kernel page by page,
    which then costs more than what is computed in it. On an accelerator torch keeps freed memory itself.
    """
    nbytes = dtype.itemsize
    for n in shape:
        nbytes *= n
    if device.type != "cpu" or nbytes > 4 * BLOCK:
        return torch.empty(shape, dtype=dtype, device=device)
    slots: dict[int, Tensor] = _kept.__dict__.setdefault("slots", {})
    if slot not in slots or slots[slot].numel() < nbytes:
        with torch.inference_mode(False):  # what is made in that mode may not be written to outside it
            slots[slot] = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    return slots[slot][:nbytes].view(dtype).view(shape)
