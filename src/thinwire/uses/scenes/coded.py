"""Splats as whole numbers, to bytes and back; and from coarse numbers to finer ones.

Splats are in the order of the curve through the cells of their grid, by class within a cell. A coarse form
keeps the order of the fine one, so finer numbers need only say what they add.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from thinwire.codecs.symbols import Ints, pack_numbers, unpack_numbers
from thinwire.types import WRONG_VALUES, ByteCursor, PayloadError, require
from thinwire.uses.scenes.code import orientations
from thinwire.uses.scenes.code.channels import Floats, Numbers, Transform, pack_finer, unpack_finer
from thinwire.uses.scenes.code.morton import MOST_DEPTH, Bend, Codes, PositionGrid, cells_of
from thinwire.uses.scenes.code.octree import ROOT, pack_cells, unpack_cells
from thinwire.uses.scenes.code.raht import HaarPlan
from thinwire.uses.scenes.importance import MOST_CLASS
from thinwire.uses.scenes.part import Part
from thinwire.uses.scenes.scene import COEFFICIENTS, Splats

# Of parts whose grid is plain, and of those that have a bend, which earlier versions do not know.
NAME, BENT = NAMES = "thinwire", "thinwire:bent"
CLASSES = MOST_CLASS + 1
CHANNELS = {"opacities": 1, "rotations": 3, "log_scales": 3, "colours": 3}
MOST_LEVELS = 21  # three bits each fit in one number
DEEPER = 2  # levels of the octree that the coarse form leaves out


@dataclass(frozen=True, eq=False)
class Coded:
    """Splats in whole steps: cells of a grid by rising ``codes`` [n], ``classes`` [n], and each attribute."""

    bands: int
    grid: PositionGrid
    codes: Codes
    classes: Ints
    groups: Mapping[str, Numbers]
    above: int = 0  # levels below the cells that a transform takes together

    @property
    def count(self) -> int:
        """How many splats there are."""
        return len(self.codes)

    def coarser(self, most: Mapping[str, float]) -> Coded:
        """Return the same splats in coarser steps, which are at most those given by attribute."""
        fewer = _fewer(self.grid.depth)
        grid = self.grid.times(self.grid.step[0] * (1 << fewer), self.grid.depth - fewer)
        groups = {name: numbers.coarser(most[name]) for name, numbers in self.groups.items()}
        return Coded(self.bands, grid, self.codes >> np.uint64(3 * fewer), self.classes, groups, 0)

    def part(self) -> Part:
        """Return them as a part."""
        unique, repeats = np.unique(self.codes, return_counts=True)
        streams = {
            "positions": pack_cells(unique, self.grid.depth) + pack_numbers((repeats - 1).astype(np.int32)),
            "classes": pack_numbers(self.classes),
        }
        streams |= {name: numbers.pack() for name, numbers in self.groups.items()}
        about = {"origin": list(self.grid.origin), "step": self.grid.step[0]}
        about |= {"depth": self.grid.depth, "cells": len(unique), "above": self.above}
        if self.grid.bend is None:
            return Part(NAME, self.count, self.bands, about, streams)
        about["bend"] = [*self.grid.bend.middle, self.grid.bend.radius]
        return Part(BENT, self.count, self.bands, about, streams)

    def splats(self) -> Splats:
        """Return the scene that they stand for."""
        by_class = np.argsort(self.classes, kind="stable")
        back = self._back(by_class) if any(x.transformed for x in self.groups.values()) else None
        found = dict[str, Floats]()
        for name, numbers in self.groups.items():
            found[name] = np.empty((self.count, len(numbers.columns)))
            found[name][by_class] = numbers.values(back)
        n, harmonics = self.count, found.get("harmonics", np.zeros((self.count, 0)))
        return Splats.of(
            self.grid.positions(cells_of(self.codes)),
            log_scales=found["log_scales"],
            rotations=orientations.whole(found["rotations"]),
            opacities=found["opacities"][:, 0],
            colours=found["colours"],
            harmonics=harmonics.reshape(n, harmonics.shape[1] // 3, 3),
        )

    def _back(self, by_class: npt.NDArray[np.intp]) -> Transform:
        return _by_class(plan_of(self.codes, self.grid.depth, self.above).inverse, by_class)


def forward(codes: Codes, classes: Ints, depth: int) -> Transform:
    """Return the Haar transform of columns that are class by class, for rising codes [n] and classes [n]."""
    return _by_class(plan_of(codes, depth, _fewer(depth)).forward, np.argsort(classes, kind="stable"))


def _by_class(way: Callable[[Floats], Floats], by_class: npt.NDArray[np.intp]) -> Transform:
    """Return a transform of values [n, 1] along the curve as one of columns that are class by class."""

    def transform(column: npt.NDArray[np.floating]) -> Floats:
        along = np.empty((len(column), 1))
        along[by_class, 0] = column
        return np.asarray(way(along)[by_class, 0], np.float64)

    return transform


def plan_of(codes: Codes, depth: int, above: int) -> HaarPlan:
    """Return the plan for rising codes [n], seen ``above`` levels higher; those of a cell go one by one.

    It is the same for fine and coarse positions. Errors: ``PayloadError`` where cells hold too many.
    """
    cells = codes >> np.uint64(3 * above)
    at = np.arange(len(cells))
    begins = np.concatenate([[True], cells[1:] != cells[:-1]])
    within = at - np.maximum.accumulate(np.where(begins, at, 0))
    levels = -(-int(within.max()).bit_length() // 3)
    total = depth - above + levels
    require(0 <= above < depth and total <= MOST_LEVELS, PayloadError, f"a transform of {total} levels")
    return HaarPlan.of(cells << np.uint64(3 * levels) | within.astype(np.uint64), total)


def _fewer(depth: int) -> int:
    return min(DEEPER, depth - 1)


def of_part(part: Part) -> Coded:
    """Return what a part holds. Errors: ``PayloadError``."""
    try:
        return _of_part(part)
    except WRONG_VALUES as e:
        raise PayloadError(f"a damaged part: {str(e)[:80]}") from e


def _of_part(part: Part) -> Coded:
    n, about = part.count, part.about
    depth, cells, step = int(about["depth"]), int(about["cells"]), float(about["step"])
    require(1 <= depth <= MOST_DEPTH and 1 <= cells <= n, PayloadError, f"{cells} cells at depth {depth}")
    x, y, z = map(float, about["origin"])
    bend = _bend(about["bend"]) if part.codec == BENT else None
    cursor = ByteCursor(part.streams["positions"], "positions")
    codes = _unpack_positions(cursor, n, cells, depth, ROOT)
    cursor.close()
    classes = _classes(part.streams["classes"], n)
    counts = np.bincount(classes, minlength=CLASSES).tolist()
    groups = {
        name: Numbers.unpack(part.streams[name], d, counts, name) for name, d in widths(part.bands).items()
    }
    grid = PositionGrid((x, y, z), (step, step, step), depth, bend)
    return Coded(part.bands, grid, codes, classes, groups, int(about["above"]))


def _bend(given: Sequence[float]) -> Bend:
    x, y, z, radius = map(float, given)
    good = np.isfinite([x, y, z, radius]).all() and radius > 0
    require(bool(good), PayloadError, f"a bend of radius {radius}")
    return Bend((x, y, z), radius)


def widths(bands: int) -> dict[str, int]:
    """Return how many channels each attribute but positions has."""
    coefficients = next(k for k, b in COEFFICIENTS.items() if b == bands)
    return CHANNELS | ({"harmonics": 3 * coefficients} if coefficients else {})


def finer_part(coarse: Sequence[Coded], fine: Sequence[Coded]) -> Part:
    """Return what leads from coarse splats to the ``fine`` ones that they were made of, as one part."""
    positions, cells = list[bytes](), list[int]()
    for before, after in zip(coarse, fine, strict=True):
        unique, repeats = np.unique(after.codes, return_counts=True)
        tree = pack_cells(unique, after.grid.depth, before.grid.depth)
        positions.append(tree + pack_numbers((repeats - 1).astype(np.int32)))
        cells.append(len(unique))
    streams = {"positions": b"".join(positions)}
    for name in coarse[0].groups:
        streams[name] = pack_finer([x.groups[name] for x in coarse], [x.groups[name] for x in fine])
    about: dict[str, Any] = {"cells": cells, "depths": [after.grid.depth for after in fine]}
    return Part(NAME, sum(x.count for x in fine), fine[0].bands, about, streams)


def refined(coarse: Sequence[Coded], part: Part) -> list[Coded]:
    """Return the fine splats that coarse ones become by a part. Errors: ``PayloadError``."""
    try:
        return _refined(coarse, part)
    except WRONG_VALUES as e:
        raise PayloadError(f"a damaged part: {str(e)[:80]}") from e


def _refined(coarse: Sequence[Coded], part: Part) -> list[Coded]:
    fits = part.count == sum(x.count for x in coarse) and all(x.bands == part.bands for x in coarse)
    require(fits and bool(coarse), PayloadError, f"finer steps of {part.count} other splats")
    names = widths(part.bands)
    groups = {n: unpack_finer(part.streams[n], [x.groups[n] for x in coarse], n) for n in names}
    cursor, found = ByteCursor(part.streams["positions"], "positions"), list[Coded]()
    for i, (before, cells, depth) in enumerate(
        zip(coarse, part.about["cells"], part.about["depths"], strict=True)
    ):
        more = int(depth) - before.grid.depth
        good = 0 <= more <= DEEPER and depth <= MOST_DEPTH and 1 <= cells <= before.count
        require(good, PayloadError, f"{cells} cells at depth {depth}")
        codes = _unpack_positions(cursor, before.count, cells, more, np.unique(before.codes))
        same = bool((codes >> np.uint64(3 * more) == before.codes).all())
        require(same, PayloadError, "finer positions of other splats")
        grid = before.grid.times(before.grid.step[0] / (1 << more), int(depth))
        own = {name: numbers[i] for name, numbers in groups.items()}
        found.append(Coded(before.bands, grid, codes, before.classes, own, before.above + more))
    cursor.close()
    return found


def _unpack_positions(cursor: ByteCursor, n: int, cells: int, depth: int, above: Codes) -> Codes:
    unique = unpack_cells(cursor, cells, depth, above)
    repeats = unpack_numbers(cursor, cells) + 1
    require(int(repeats.sum()) == n, PayloadError, f"{int(repeats.sum())} positions, expected {n}")
    return np.repeat(unique, repeats)


def _classes(data: bytes, n: int) -> npt.NDArray[np.int32]:
    cursor = ByteCursor(data, "classes")
    classes = unpack_numbers(cursor, n)
    cursor.close()
    require(int(classes.max()) < CLASSES, PayloadError, f"class {int(classes.max())} of {CLASSES}")
    return classes
