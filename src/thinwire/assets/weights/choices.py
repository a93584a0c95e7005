"""The ways to code a matrix, and what each costs: steps by one slope, or widths of bits.

Both are estimated from some of the rows; what they make of all of them is known once they are coded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from thinwire.assets.weights.feedback import inverse_factor, quantised
from thinwire.assets.weights.moments import Moments
from thinwire.assets.weights.streams import bits_of
from thinwire.assets.weights.tensors import (
    OCTAVE,
    REACH,
    WIDTHS,
    Grouped,
    Stepped,
    exact_steps,
    groups_of,
    is_narrow,
    memory_of,
    parts_of,
    spread_scales,
)
from thinwire.policies.allocate import Site
from thinwire.types import InputError, require

SAMPLE = 1 << 16  # weights that a choice is estimated from, about
PER_OCTAVE = 4  # choices of steps
FINEST, COARSEST = -7, 1  # octaves of the step, from the weights' deviation
ROWS, COLUMNS = 0.5, 1.0  # how far steps follow what errors of a row and of a column cost
FLOOR = 1e-3  # of the mean of rows: what nothing was seen of still matters
SIDE = 0.8  # bytes that a row or a column takes besides its codes, about
CLIPS = (1.0, 0.92, 0.84, 0.76, 0.68)  # of the range that a group's scale spans
TINY = 1e-30
LEAST = 2.0**-24  # of float16 above zero


@dataclass(frozen=True, eq=False)
class Matrix:
    """A matrix to be coded: ``x`` [rows, columns] in float32, and what is known of its errors.

    ``rows``: whether steps follow the moments of the rows; those of an embedding depend on the words that a
    text happens to have.
    """

    name: str
    x: Tensor
    moments: Moments
    shape: tuple[int, ...]
    dtype: torch.dtype
    swapped: bool = False
    rows: bool = True

    @cached_property
    def row_costs(self) -> Tensor:
        """What errors in each row cost [rows], their sum 1."""
        found = self.moments.rows.float() if self.rows else torch.ones(len(self.x))
        floored = found + FLOOR * found.mean().clamp(min=TINY)
        return floored / floored.sum()

    @cached_property
    def upper(self) -> Tensor | None:
        """What errors are fed forward by [columns, columns], if anything; see ``inverse_factor``."""
        columns = self.moments.columns
        if columns.ndim == 1:
            return None
        told = f"{self.name} has inputs that are no finite numbers on this text: is the model broken?"
        require(bool(columns.isfinite().all()), InputError, f"{told} Pack it without --calibrate")
        return inverse_factor(columns)

    @property
    def column_costs(self) -> Tensor:
        """What errors in each column cost [columns] once those after it have made them good."""
        return self.moments.columns if self.upper is None else self.upper.diagonal() ** -2

    @cached_property
    def unit(self) -> tuple[Tensor, Tensor]:
        """Steps of rows and columns in parts of an octave whose mean error is that of one deviation."""
        rows, columns = self.row_costs ** (-ROWS / 2), self.column_costs ** (-COLUMNS / 2)
        rows = rows / rows.log().mean().exp()
        columns = columns / columns.log().mean().exp()
        deviation = self.x.double().square().mean().sqrt().clamp(min=TINY)
        return parts_of(rows), parts_of(columns * deviation)

    @cached_property
    def sample(self) -> Tensor:
        """Numbers of the rows that choices are estimated from."""
        n = len(self.x)
        few = min(n, max(1, SAMPLE // max(self.x.shape[1], 1)))
        return torch.linspace(0, n - 1, few).long()

    def cost(self, error: Tensor) -> float:
        """Return what an error [sampled rows, columns] costs in all rows, in nats a token."""
        rows = self.row_costs[self.sample]
        found = float(rows.double() @ (error.square() @ self.column_costs).double())
        return 0.5 * found / max(float(rows.sum()), TINY)


def stepped_site(matrix: Matrix) -> Site:
    """Return the choices of steps of a matrix: the entropy of the codes counts."""
    rows, columns = matrix.unit
    x, scale = matrix.x[matrix.sample], len(matrix.x) / len(matrix.sample)
    side = SIDE * sum(matrix.x.shape)
    unit_rows, costs, nbytes = exact_steps(rows)[matrix.sample][:, None], list[float](), list[float]()
    for shift in shifts():
        steps = exact_steps(columns + shift)
        codes = quantised(x / unit_rows, steps)
        costs.append(matrix.cost(codes * steps * unit_rows - x))
        nbytes.append(scale * bits_of(codes.numpy()) / 8 + side)
    return Site(matrix.name, tuple(costs), tuple(nbytes))


def shifts() -> list[int]:
    """Return the parts of an octave that the choices add to the steps, the coarsest last."""
    return list(range(FINEST * OCTAVE, COARSEST * OCTAVE + 1, OCTAVE // PER_OCTAVE))


def stepped(matrix: Matrix, choice: int, feedback: bool = True) -> Stepped:
    """Return a matrix coded with the steps of a choice."""
    rows, columns = matrix.unit
    return with_steps(matrix, rows, columns + shifts()[choice], feedback)


def with_steps(
    matrix: Matrix, rows: Tensor, columns: Tensor, feedback: bool = True, kept: Tensor | None = None
) -> Stepped:
    """Return a matrix coded with steps in parts of an octave; ``kept`` are codes to stay near."""
    upper, columns = matrix.upper if feedback else None, columns.clamp(-REACH, REACH)
    scaled = matrix.x / exact_steps(rows)[:, None]
    codes = quantised(scaled, exact_steps(columns), upper, kept)
    return Stepped(codes, rows, columns, matrix.shape, matrix.dtype, matrix.swapped, not is_narrow(codes))


def grouped_site(matrix: Matrix) -> Site:
    """Return the choices of widths of a matrix: the bytes in memory count."""
    x = matrix.x[matrix.sample]
    found = [_rounded(x, matrix.column_costs, width) for width in WIDTHS]
    costs = [matrix.cost(codes * spread_scales(scales, x.shape[1]) - x) for codes, scales in found]
    rows, columns = matrix.x.shape
    return Site(matrix.name, tuple(costs), tuple(float(memory_of(rows, columns, w)) for w in WIDTHS))


def grouped(matrix: Matrix, choice: int, feedback: bool = True) -> Grouped:
    """Return a matrix coded with the width of a choice."""
    width = WIDTHS[choice]
    codes, scales = _rounded(matrix.x, matrix.column_costs, width)
    if feedback:
        steps, most = spread_scales(scales, codes.shape[1]), 1 << width - 1
        codes = quantised(matrix.x, steps, matrix.upper, bounds=(-most, most - 1))
    return Grouped(codes, scales, width, matrix.shape, matrix.dtype, matrix.swapped)


def with_scales(matrix: Matrix, old: Grouped, feedback: bool = True) -> Grouped:
    """Return a matrix coded with the scales of an earlier version, near its codes."""
    steps, most = spread_scales(old.scales, old.codes.shape[1]), 1 << old.width - 1
    upper = matrix.upper if feedback else None
    codes = quantised(matrix.x, steps, upper, old.codes, (-most, most - 1))
    return replace(old, codes=codes, dtype=matrix.dtype)


def nearest(matrix: Matrix, width: int) -> Grouped:
    """Return a matrix whose weights are each rounded to the nearest code, as the simplest quantisers do."""
    codes, scales = _rounded(matrix.x, torch.ones(matrix.x.shape[1]), width, clips=(1.0,))
    return Grouped(codes, scales, width, matrix.shape, matrix.dtype, matrix.swapped)


def _rounded(
    x: Tensor, column_costs: Tensor, width: int, clips: tuple[float, ...] = CLIPS
) -> tuple[Tensor, Tensor]:
    """Return codes and float16 scales of groups whose weighted error is least, each weight rounded alone.

    The largest of a group has the lowest code: a scale may be negative, so that no level is lost.
    """
    rows, columns = x.shape
    groups, most = groups_of(columns), 1 << width - 1
    padded = torch.nn.functional.pad(x, (0, groups * Grouped.GROUP - columns)).view(rows, groups, -1)
    costs = torch.nn.functional.pad(column_costs, (0, groups * Grouped.GROUP - columns)).view(groups, -1)
    span = padded.gather(2, padded.abs().argmax(2, keepdim=True))[..., 0] / -most
    best = torch.full(span.shape, math.inf)
    scales = torch.zeros_like(span, dtype=torch.float16)
    for clip in clips:
        tried = _half(span * clip)
        steps = tried.float()[..., None]
        error = ((padded / steps).round_().clamp_(-most, most - 1) * steps - padded).square_()
        loss = (error * costs).sum(2)
        scales = torch.where(loss < best, tried, scales)
        best = torch.minimum(best, loss)
    codes = (x / spread_scales(scales, columns)).round_().clamp_(-most, most - 1)
    return codes.to(torch.int16), scales


def _half(scales: Tensor) -> Tensor:
    """Return scales in float16, none of them zero or infinite."""
    least, most = LEAST, torch.finfo(torch.float16).max
    return torch.copysign(scales.abs().clamp(least, most), scales).to(torch.float16)
