"""How many splats are best in few bytes: where steps are coarse, fewer splats in finer ones look better.

Merging splats and coarser steps both save bytes for error. At the best count neither saves more for the same
error than the other does: a search by Lagrange's multiplier.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from thinwire.similarity import psnr
from thinwire.types import InputError
from thinwire.uses.scenes import search
from thinwire.uses.scenes.importance_coder import Analysis, encode, quantised
from thinwire.uses.scenes.merging import merged, merged_more
from thinwire.uses.scenes.part import Part
from thinwire.uses.scenes.view.render import Pictures

SHARES = (0.95, 0.8, 0.6, 0.4, 0.25, 0.12, 0.05, 0.02, 0.008, 0.003, 0.001)  # of the splats, that are tried
WORTH = 0.97  # a larger share is not worth it
FEWEST = 100  # splats that are tried
COARSE = 1e-4  # a slope, where only the fewest splats fit
ABOUT = 0.3  # dB that the first search may be off
# The error that a bit more saves, for a slope: steps of one more bit a value have a quarter of the error.
# Half as much again gave the best pictures [measured].
PER_BIT = 1.5 * 2 * math.log(2)
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Thinner:
    """A scene with ever fewer splats, which are merged: ``shares`` of them, falling, and their errors."""

    scene: Analysis
    shares: Floats
    errors: Floats  # mean squares

    @classmethod
    def of(cls, scene: Analysis, pictures: Pictures, shares: Sequence[float] = SHARES) -> Thinner:
        """Return how a scene looks with fewer splats, against its ``pictures``."""
        n = scene.splats.count
        counts = [int(share * n) for share in shares if int(share * n) >= FEWEST]
        less = merged_more(scene.splats, scene.seen.weights, scene.frame.radius, counts)
        errors = [0.0, *(pictures.error(pictures.of(fewer)) for fewer in less)]
        found = np.array([1.0, *(count / n for count in counts)])
        return cls(scene, found, np.maximum.accumulate(errors))

    def best(self, slope: float, nbytes: int) -> tuple[float, float]:
        """Return the best share of splats where all take ``nbytes`` at a slope, and the error of merging."""
        tried = np.geomspace(1.0, self.shares[-1], 200)
        errors = np.interp(-np.log(tried), -np.log(self.shares), np.sqrt(self.errors)) ** 2
        own = errors + PER_BIT * slope / self.scene.splats.count * 8 * nbytes * tried
        at = int(np.argmin(own))
        return float(tried[at]), float(errors[at])

    def thinned(self, share: float) -> Analysis:
        """Return the scene with a share of its splats; itself where that is nearly all."""
        if share >= WORTH:
            return self.scene
        scene, count = self.scene, max(int(share * self.scene.splats.count), 1)
        fewer = merged(scene.splats, scene.seen.weights, scene.frame.radius, count)
        return replace(Analysis.through(scene.views, fewer), transforms=scene.transforms)


def searched(scene: Analysis) -> Pictures:
    """Return the pictures of a scene that a search looks at, by some of the cameras that say what matters."""
    return Pictures(scene.splats, scene.views.searched)


def thinned_to_budget(scene: Analysis, most: int) -> tuple[Analysis, float]:
    """Return a scene with as many splats as look best in ``most`` bytes, perhaps all, and their slope.

    Both are about right.
    """
    pictures, slope = searched(scene), COARSE
    first = Thinner.of(scene, pictures, SHARES[:1])
    with suppress(InputError):  # not even the coarsest steps take so little
        slope, part = search.to_budget(lambda slope: (slope, encode(scene, slope)), _nbytes, most)
        if first.best(slope, part.nbytes)[0] >= WORTH:
            return scene, slope
    thinner, share = Thinner.of(scene, pictures), 0.0

    def nbytes(made: tuple[float, Part]) -> int:
        return int(thinner.best(made[0], made[1].nbytes)[0] * made[1].nbytes)

    with suppress(InputError):  # the fewest splats, then
        slope, part = search.to_budget(lambda slope: (slope, encode(scene, slope)), nbytes, most, slope)
        share = thinner.best(slope, part.nbytes)[0]
    return thinner.thinned(max(share, float(thinner.shares[-1]))), slope


def fewest(scene: Analysis) -> Analysis:
    """Return a scene with the fewest splats that are tried."""
    return Thinner(scene, np.ones(1), np.zeros(1)).thinned(max(SHARES[-1], FEWEST / scene.splats.count))


def thinned_to_quality(scene: Analysis, pictures: Pictures, least: float) -> tuple[Analysis, float]:
    """Return a scene with as many splats as take fewest bytes at ``least`` dB, perhaps all, and their slope.

    Both are about right. ``pictures`` are those that ``least`` is of. Errors: ``InputError`` for a quality
    that even the finest steps do not reach.
    """
    thinner = Thinner.of(scene, searched(scene))

    def made(slope: float) -> tuple[float, float, float]:
        coded = quantised(scene, slope)
        share, error = thinner.best(slope, coded.part().nbytes)
        return slope, share, psnr(error + pictures.error(pictures.of(coded.splats())))

    slope, share, _ = search.to_quality(made, lambda found: found[2], least, near=ABOUT)
    return thinner.thinned(share), slope


def _nbytes(made: tuple[float, Part]) -> int:
    return made[1].nbytes
