"""Which values share a scale: a tensor seen as rows and columns."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from thinwire.codecs.kernels.scratch import block_rows, scratch
from thinwire.types import TensorSpec

SHARED_BY = ("tensor", "channel", "token", "group")


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
        last = spec.shape[-1] if spec.shape else 1
        outer = math.prod(spec.shape[:-1])
        if shared_by == "tensor":
            return cls("whole", outer * last, 1, min(1, outer * last), last, last)
        if shared_by == "channel":
            return cls("column", outer, last, last if outer else 0, last, last)
        width = max(1, last if shared_by == "token" else min(group, last))
        padded = -(-last // width) * width
        rows = outer * padded // width
        return cls("row", rows, width, rows, last, padded)

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
