"""Positions on a grid, and the order of Morton's curve through it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from thinwire.types import InputError, require
from thinwire.uses.scenes.scene import Array

MOST_DEPTH = 20  # bits of a coordinate: three of them fit in one number
Codes = npt.NDArray[np.uint64]
Cells = npt.NDArray[np.int64]
Places = npt.NDArray[np.float64]
NEAREST = 2e-3  # radii from where the endless comes to lie: a million radii out
_SPREAD = (
    (32, 0x1F00000000FFFF),
    (16, 0x1F0000FF0000FF),
    (8, 0x100F00F00F00F00F),
    (4, 0x10C30C30C30C30C3),
    (2, 0x1249249249249249),
)


@dataclass(frozen=True)
class Bend:
    """Space drawn in around a ball, within which nothing moves: what is far out takes little of a grid.

    A place n radii out comes to lie 3 - 2 / sqrt(n) radii out, so steps there are as far apart as n ** 1.5
    says: seen from the ball, errors of the direction stay, and those of the distance grow slowly.
    """

    middle: tuple[float, float, float]
    radius: float

    def inward(self, positions: Array) -> Places:
        """Return where places [n, 3] come to lie."""
        return self._along(positions.astype(np.float64), lambda n: 3 - 2 / np.sqrt(n))

    def outward(self, places: Places) -> Places:
        """Return the places that come to lie there."""
        return self._along(places, lambda n: (2 / np.maximum(3 - n, NEAREST)) ** 2)

    def _along(self, places: Places, lengths: Callable[[Places], Places]) -> Places:
        away = places - np.array(self.middle)
        length = np.linalg.norm(away, axis=1, keepdims=True) / self.radius
        scale = lengths(np.maximum(length, 1)) / np.maximum(length, 1)
        return np.where(length > 1, np.array(self.middle) + away * scale, places)


@dataclass(frozen=True)
class PositionGrid:
    """Cells from ``origin`` on, of ``step`` along each axis; as many as ``depth`` bits can count.

    Where there is a ``bend``, cells are equal in the space that it draws in.
    """

    origin: tuple[float, float, float]
    step: tuple[float, float, float]
    depth: int
    bend: Bend | None = None

    @classmethod
    def cubic(cls, positions: Array, step: float, bend: Bend | None = None) -> PositionGrid:
        """Return a grid over all positions, of cubes of ``step``, or larger where there would be too many."""
        low, extent = _extent(positions if bend is None else bend.inward(positions))
        most = float(extent.max())
        step = max(step, most / ((1 << MOST_DEPTH) - 1), 1e-30)
        depth = min(MOST_DEPTH, max(1, int(most / step + 1).bit_length()))
        half = step / 2  # so that the lowest positions are in the middle of a cell
        return cls((low[0] - half, low[1] - half, low[2] - half), (step, step, step), depth, bend)

    @classmethod
    def fitted(cls, positions: Array, depth: int) -> PositionGrid:
        """Return a grid that has 2**depth cells along each axis of what positions take."""
        require(1 <= depth <= MOST_DEPTH, InputError, f"depth={depth} is not in 1..{MOST_DEPTH}")
        low, extent = _extent(positions)
        step = np.maximum(extent / (1 << depth), 1e-30)
        return cls((low[0], low[1], low[2]), (step[0], step[1], step[2]), depth)

    def cells(self, positions: Array) -> Cells:
        """Return the cell of each position [n, 3]."""
        places = positions.astype(np.float64) if self.bend is None else self.bend.inward(positions)
        where = (places - np.array(self.origin)) / np.array(self.step)
        return np.clip(where, 0, (1 << self.depth) - 1).astype(np.int64)

    def positions(self, cells: Cells, within: float = 0.5) -> Array:
        """Return where cells [n, 3] are: their middles, or another share of the way through."""
        places = (cells + within) * np.array(self.step) + np.array(self.origin)
        return (places if self.bend is None else self.bend.outward(places)).astype(np.float32)

    def times(self, step: float, depth: int) -> PositionGrid:
        """Return the grid of cubes of another ``step``, from the same corner on."""
        return replace(self, step=(step, step, step), depth=depth)


def _extent(positions: Array | Places) -> tuple[list[float], npt.NDArray[np.float64]]:
    low = positions.min(0).astype(np.float64)
    return low.tolist(), positions.max(0).astype(np.float64) - low


def morton(cells: Cells) -> Codes:
    """Return the place of each cell [n, 3] on the curve: the bits of x, y, z in turn.

    >>> morton(np.array([[1, 0, 0], [0, 1, 1]])).tolist()
    [4, 3]
    """
    x, y, z = (_apart(v) for v in cells.T)
    return x << np.uint64(2) | y << np.uint64(1) | z


def cells_of(codes: Codes) -> Cells:
    """Return the cells [n, 3] of places on the curve."""
    return np.stack([_together(codes >> np.uint64(k)) for k in (2, 1, 0)], axis=1)


def _apart(v: Cells) -> Codes:
    found = v.astype(np.uint64) & np.uint64(0x1FFFFF)
    for shift, mask in _SPREAD:
        found = (found | found << np.uint64(shift)) & np.uint64(mask)
    return found


def _together(codes: Codes) -> Cells:
    found = codes & np.uint64(_SPREAD[-1][1])
    for (shift, _), mask in zip(_SPREAD[::-1], [m for _, m in _SPREAD[-2::-1]] + [0x1FFFFF], strict=True):
        found = (found | found >> np.uint64(shift)) & np.uint64(mask)
    return found.astype(np.int64)
