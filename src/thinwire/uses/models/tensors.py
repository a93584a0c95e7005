"""What is coded of a model, tensor by tensor: whole numbers and their steps, or the bytes as they are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.uses.models.moments import pieces_of

OCTAVE = 8  # parts of it in which steps are given
NARROW = 127  # of codes in one byte
WIDTHS = range(2, 9)  # bits of codes in groups
REACH = 120 * OCTAVE  # of a step, from 1 either way
SPAN = 40  # octaves from 1 either way that a tensor's largest value may be at: float32 has its squares
FARTHEST = 1100  # octaves from 1 that any number of float64 is at
_PARTS = torch.tensor([2.0 ** (i / OCTAVE) for i in range(OCTAVE)])


def exact_steps(parts: Tensor) -> Tensor:
    """Return 2 ** (``parts`` / 8) in float32, the same on any machine.

    >>> exact_steps(torch.tensor([-8, 0, 16])).tolist()
    [0.5, 1.0, 4.0]
    """
    octaves = torch.div(parts, OCTAVE, rounding_mode="floor")
    return torch.ldexp(_PARTS.to(parts.device)[(parts - OCTAVE * octaves).long()], octaves)


def parts_of(steps: Tensor) -> Tensor:
    """Return positive steps in the nearest parts of an octave."""
    return (OCTAVE * steps.double().log2()).round().clamp(-REACH, REACH).to(torch.int32)


@dataclass(frozen=True, eq=False)
class Stepped:
    """A matrix as int16 ``codes`` [rows, columns]: each times the step of its row and that of its column.

    ``row_parts`` [rows] and ``column_parts`` [columns] are int32, for ``exact_steps``. ``swapped``: the
    tensor is the matrix turned over, as in GPT-2. ``shape``: the tensor's, all behind its first axis are
    columns. ``wide``: codes are of two bytes each in a checkpoint of codes, as they were in the one before.
    ``power``: see ``power_of``.
    """

    kind: ClassVar[str] = "steps"
    codes: Tensor
    row_parts: Tensor
    column_parts: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    swapped: bool = False
    wide: bool = False
    power: int = 0

    def decoded(self) -> Tensor:
        """Return the tensor that this stands for."""
        x = self.codes.to(torch.float32)
        x.mul_(exact_steps(self.row_parts)[:, None]).mul_(exact_steps(self.column_parts))
        return _shaped(x, self.shape, self.swapped, self.dtype, self.power)


@dataclass(frozen=True, eq=False)
class Grouped:
    """A matrix as codes of ``width`` bits [rows, columns], each times the scale of its group.

    ``scales`` [rows, groups] in float16, or in bfloat16 where float16 has no such numbers; a group is
    ``GROUP`` columns of a row, the last one what is left. ``power``: see ``power_of``.
    """

    kind: ClassVar[str] = "groups"
    GROUP: ClassVar[int] = 64
    codes: Tensor
    scales: Tensor
    width: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    swapped: bool = False
    power: int = 0

    def decoded(self) -> Tensor:
        """Return the tensor that this stands for."""
        x = self.codes.float()
        for own in pieces_of(x):
            x[own] *= spread_scales(self.scales[own], x.shape[1])
        return _shaped(x, self.shape, self.swapped, self.dtype, self.power)

    @property
    def memory(self) -> int:
        """Bytes in memory at this width, scales included."""
        rows, columns = self.codes.shape
        return memory_of(rows, columns, self.width)


@dataclass(frozen=True, eq=False)
class Plain:
    """A tensor as it is."""

    kind: ClassVar[str] = "plain"
    values: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return tuple(self.values.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's type."""
        return self.values.dtype

    def decoded(self) -> Tensor:
        """Return the tensor."""
        return self.values


@dataclass(frozen=True, eq=False)
class Tied:
    """A tensor that has the values of another one, called ``name``: a tied head."""

    kind: ClassVar[str] = "same"
    name: str


Coded = Stepped | Grouped | Plain | Tied


def spread_scales(scales: Tensor, columns: int) -> Tensor:
    """Return the scale [rows, columns] of each weight in float32."""
    return scales.float().repeat_interleave(min(Grouped.GROUP, columns), 1)[:, :columns]


def groups_of(columns: int) -> int:
    """Return how many groups a row of so many columns has.

    >>> groups_of(65)
    2
    """
    return -(-columns // Grouped.GROUP)


def memory_of(rows: int, columns: int, width: int) -> int:
    """Return the bytes in memory of codes of ``width`` bits, and of the scales of their groups.

    >>> memory_of(2, 64, 3)
    52
    """
    return -(-rows * columns * width // 8) + 2 * rows * groups_of(columns)


def matrix_shape(shape: tuple[int, ...], swapped: bool) -> tuple[int, int]:
    """Return rows and columns of the matrix that a tensor is coded as.

    >>> matrix_shape((4, 3, 2), swapped=False)
    (4, 6)
    """
    rows, columns = shape[0], math.prod(shape[1:])
    return (columns, rows) if swapped else (rows, columns)


def is_narrow(codes: Tensor) -> bool:
    """Say whether codes go into a byte each."""
    return not codes.numel() or int(codes.abs().max()) <= NARROW


def power_of(x: Tensor) -> int:
    """Return the power of two that a tensor is divided by to be coded: 0 but for very large and small ones.

    >>> power_of(torch.tensor([1e9, 1.0])), power_of(torch.tensor([1e-30]))
    (0, -99)
    """
    octave = math.frexp(float(x.abs().max()))[1] if x.numel() else 0
    return octave if abs(octave) > SPAN else 0


def times_power(x: Tensor, power: int) -> Tensor:
    """Return ``x`` times 2 ** ``power`` in float64, which may have neither the power nor its inverse."""
    half = power // 2
    return x.double().mul(2.0**half).mul_(2.0 ** (power - half))


def as_matrix(x: Tensor, swapped: bool = False, power: int = 0) -> Tensor:
    """Return a tensor as a matrix [rows, columns] in float32: what is behind the first axis are columns.

    Divided by 2 ** ``power``.
    """
    flat = (times_power(x, -power) if power else x).reshape(len(x), -1).float()
    return flat.t().contiguous() if swapped else flat.contiguous()


def _shaped(x: Tensor, shape: tuple[int, ...], swapped: bool, dtype: torch.dtype, power: int) -> Tensor:
    """Return a matrix as the tensor that it was, no value of it beyond what its type reaches."""
    if power:
        x = times_power(x, power)
    if power or dtype == torch.float16:
        x.clamp_(torch.finfo(dtype).min, torch.finfo(dtype).max)
    return (x.t() if swapped else x).reshape(shape).contiguous().to(dtype)
