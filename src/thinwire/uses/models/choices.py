"""The ways to code a matrix, and what each costs: steps by one slope, or widths of bits.

Both are estimated from some of the rows; what they make of all of them is known once they are coded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from thinwire.choosing.allocate import Site
from thinwire.types import InputError, require
from thinwire.uses.models.moments import MOST, Moments, inverse_factor, pieces_of, quantised
from thinwire.uses.models.streams import bits_of
from thinwire.uses.models.tensors import (
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

SAMPLE = 1 << 16  # weights that a choice is estimated from, about
PER_OCTAVE = 4  # choices of steps
FINEST, COARSEST = -7, 1  # octaves of the step, from the weights' deviation
ROWS, COLUMNS = 0.5, 1.0  # how far steps follow what errors of a row and of a column cost
FLOOR = 1e-3  # of the mean of rows: what nothing was seen of still matters
SIDE = 0.8  # bytes that a row or a column takes besides its codes, about
CLIPS = (1.0, 0.92, 0.84, 0.76, 0.68)  # of the range that a group's scale spans
TINY = 1e-30
ROUGH = 2.0**-17  # of scales: float16 has fewer bits for smaller ones than bfloat16
LEAST = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-126}  # of scales
MISFIT = 4.0  # times what an error could cost: a group gets another scale than it had in an earlier version
FAR = 2.0**14  # times the mean square of nearly all rows: steps do not follow rows of more
GROWN = 0.5  # octaves: a matrix that grew or shrank by more since an earlier version gets other steps
USUAL = 4  # bits of what was all zero in an earlier version
FEW = 100  # one row of so many may be far out


@dataclass(frozen=True, eq=False)
class Matrix:
    """A matrix to be coded: ``x`` [rows, columns] in float32, and what is known of its errors.

    ``rows``: whether steps follow the moments of the rows; those of an embedding depend on the words that a
    text happens to have. ``power``: what ``x`` is divided by, see ``power_of``.
    """

    name: str
    x: Tensor
    moments: Moments
    shape: tuple[int, ...]
    dtype: torch.dtype
    swapped: bool = False
    rows: bool = True
    power: int = 0

    @cached_property
    def row_costs(self) -> Tensor:
        """What errors in each row cost [rows], their sum 1."""
        found = self.moments.rows.float() if self.rows else self.x.new_ones(len(self.x))
        floored = found + FLOOR * found.mean().clamp(min=TINY)
        return floored / floored.sum()

    @cached_property
    def upper(self) -> Tensor | None:
        """What errors are fed forward by [columns, columns], if anything; see ``inverse_factor``."""
        columns = self.moments.columns
        if columns.ndim == 1:
            return None
        told = f"{self.name} has inputs that are no finite numbers on this text: is the model broken?"
        require(bool(columns.isfinite().all()), InputError, f"{told} Pack it without --calibration-data")
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
        return parts_of(rows), parts_of(columns * deviation_of(self.x))

    @cached_property
    def sample(self) -> Tensor:
        """Numbers of the rows that choices are estimated from."""
        n = len(self.x)
        few = min(n, max(1, SAMPLE // max(self.x.shape[1], 1)))
        return torch.linspace(0, n - 1, few).long().to(self.x.device)  # drawn alike wherever it is

    def cost(self, error: Tensor) -> float:
        """Return what an error [sampled rows, columns] costs in all rows, in nats a token."""
        rows = self.row_costs[self.sample]
        found = float(rows.double() @ (error.square() @ self.column_costs).double())
        return 0.5 * found / max(float(rows.sum()), TINY)


def deviation_of(x: Tensor) -> Tensor:
    """Return the deviation of a matrix [rows, columns] from zero, without the few rows that are far out."""
    squares = x.double().square().mean(1)
    seen = squares[squares > 0]
    if len(seen) >= FEW:
        usual = seen.kthvalue(len(seen) - len(seen) // FEW).values
        squares = squares[squares <= FAR * usual]
    return squares.mean().sqrt().clamp(min=TINY)


def stepped_site(matrix: Matrix) -> Site:
    """Return the choices of steps of a matrix: the entropy of the codes counts."""
    rows, columns = matrix.unit
    x, scale = matrix.x[matrix.sample], len(matrix.x) / len(matrix.sample)
    side = SIDE * sum(matrix.x.shape)
    costs, nbytes = list[float](), list[float]()
    for shift in shifts():
        steps = exact_steps(columns + shift)
        unit_rows = exact_steps(_reaching(x, rows[matrix.sample], steps))[:, None]
        codes = quantised(x / unit_rows, steps)
        costs.append(matrix.cost(codes * steps * unit_rows - x))
        nbytes.append(scale * bits_of(codes.cpu().numpy()) / 8 + side)
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
    steps = exact_steps(columns)
    rows = _reaching(matrix.x, rows, steps)
    codes = quantised(matrix.x / exact_steps(rows)[:, None], steps, upper, kept)
    wide, of = not is_narrow(codes), matrix
    return Stepped(codes, rows, columns, of.shape, of.dtype, of.swapped, wide, of.power)


def _reaching(x: Tensor, rows: Tensor, steps: Tensor) -> Tensor:
    """Return parts of row steps that are larger where a code of a row would be beyond what there is."""
    unit = exact_steps(rows)
    if not x.numel() or bool((x.abs().amax(1) / unit).max() <= MOST * steps.min()):
        return rows
    over = ((x.abs() / steps).amax(1) / unit / MOST).clamp(min=1).double()
    return (rows + (OCTAVE * over.log2()).ceil().int()).clamp(-REACH, REACH)


def renewed(matrix: Matrix, old: Stepped, feedback: bool = True) -> Stepped | None:
    """Return a matrix coded with other steps than in an earlier version where those do not fit it any more.

    None where they do. Steps then grow as the matrix did: codes spread as before. Where all was zero before,
    they are a quarter of the deviation.
    """
    shared = replace(old, power=0, dtype=torch.float32, swapped=False, shape=tuple(old.codes.shape))
    was, now = shared.decoded().double().square().mean().sqrt(), matrix.x.double().square().mean().sqrt()
    if not now:
        return None
    if not was:
        return stepped(matrix, shifts().index(-2 * OCTAVE), feedback)
    grown = float((now / was).log2())
    if abs(grown + matrix.power - old.power) < GROWN and matrix.power == old.power:
        return None
    return with_steps(matrix, old.row_parts, old.column_parts + round(OCTAVE * grown), feedback)


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
    return Grouped(codes, scales, width, matrix.shape, matrix.dtype, matrix.swapped, matrix.power)


def with_scales(matrix: Matrix, old: Grouped, feedback: bool = True) -> Grouped:
    """Return a matrix coded with the scales of an earlier version, near its codes.

    Groups that these do not fit any more get new ones; what was zero gets a usual width.
    """
    width = old.width if bool(old.codes.any()) else max(old.width, USUAL)
    _, scales = _rounded(matrix.x, matrix.column_costs, width)
    if (width, old.power) == (old.width, matrix.power) and scales.dtype in (torch.float16, old.scales.dtype):
        blocks, costs = _in_groups(matrix.x, matrix.column_costs)
        was, now = (_losses(blocks, costs, own, width) for own in (old.scales, scales))
        scales = torch.where(was <= MISFIT * now, old.scales, scales.to(old.scales.dtype))
    steps, most = spread_scales(scales, old.codes.shape[1]), 1 << width - 1
    upper = matrix.upper if feedback else None
    codes = quantised(matrix.x, steps, upper, old.codes, (-most, most - 1))
    found = replace(old, codes=codes, scales=scales, width=width)
    return replace(found, dtype=matrix.dtype, power=matrix.power)


def nearest(matrix: Matrix, width: int) -> Grouped:
    """Return a matrix whose weights are each rounded to the nearest code, as the simplest quantisers do."""
    codes, scales = _rounded(matrix.x, matrix.x.new_ones(matrix.x.shape[1]), width, clips=(1.0,))
    return Grouped(codes, scales, width, matrix.shape, matrix.dtype, matrix.swapped, matrix.power)


def _rounded(
    x: Tensor, column_costs: Tensor, width: int, clips: tuple[float, ...] = CLIPS
) -> tuple[Tensor, Tensor]:
    """Return codes, and scales of groups whose weighted error is least, each weight rounded alone.

    The largest of a group has the lowest code: a scale may be negative, so that no level is lost.
    """
    spans = [_spans(x[own], column_costs, width) for own in pieces_of(x)]
    dtype = _type_of(torch.cat(spans).abs()) if spans else torch.float16
    codes = torch.empty(x.shape, dtype=torch.int16, device=x.device)
    scales = torch.empty(len(x), groups_of(x.shape[1]), dtype=dtype, device=x.device)
    for own, span in zip(pieces_of(x), spans, strict=True):
        codes[own], scales[own] = _best(x[own], [span * c for c in clips], column_costs, width, dtype)
    return codes, scales


def _spans(x: Tensor, column_costs: Tensor, width: int) -> Tensor:
    """Return the scale [rows, groups] that spans each group."""
    blocks, _ = _in_groups(x, column_costs)
    most = 1 << width - 1
    return blocks.gather(2, blocks.abs().argmax(2, keepdim=True))[..., 0] / -most


def _best(
    x: Tensor, tried: Sequence[Tensor], column_costs: Tensor, width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return codes, and of the scales that are tried those of least error."""
    most = 1 << width - 1
    blocks, costs = _in_groups(x, column_costs)
    best = torch.full_like(tried[0], math.inf)
    scales = torch.zeros_like(tried[0], dtype=dtype)
    for own in tried:
        kept = _kept_off_zero(own, dtype)
        loss = _losses(blocks, costs, kept, width)
        scales = torch.where(loss < best, kept, scales)
        best = torch.minimum(best, loss)
    codes = (x / spread_scales(scales, x.shape[1])).round_().clamp_(-most, most - 1)
    return codes.to(torch.int16), scales


def _in_groups(x: Tensor, column_costs: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix as [rows, groups, columns of a group], and costs [groups, columns of a group]."""
    rows, columns = x.shape
    groups = groups_of(columns)
    more = 0, groups * Grouped.GROUP - columns
    pad = torch.nn.functional.pad
    return pad(x, more).view(rows, groups, -1), pad(column_costs, more).view(groups, -1)


def _losses(blocks: Tensor, costs: Tensor, scales: Tensor, width: int) -> Tensor:
    """Return what the errors of each group [rows, groups] cost with its scale."""
    steps, most = scales.float()[..., None], 1 << width - 1
    error = ((blocks / steps).round_().clamp_(-most, most - 1) * steps - blocks).square_()
    return (error * costs).sum(2)


def _type_of(sizes: Tensor) -> torch.dtype:
    """Return the type of scales of these sizes: float16, but where that has too few bits for some."""
    seen = sizes[sizes > 0]
    good = not len(seen) or bool(seen.min() >= ROUGH and seen.max() <= torch.finfo(torch.float16).max)
    return torch.float16 if good else torch.bfloat16


def _kept_off_zero(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return scales in a type, none of them zero or infinite."""
    sizes = scales.abs().clamp(LEAST[dtype], torch.finfo(dtype).max)
    return torch.copysign(sizes, scales).to(dtype)
