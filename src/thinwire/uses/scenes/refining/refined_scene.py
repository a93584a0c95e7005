"""A scene for our coder, refined: fewer splats, by rounds of removal, which learn to bear their rounding."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from thinwire.uses.scenes import search
from thinwire.uses.scenes.importance_coder import Analysis, quantised
from thinwire.uses.scenes.refining.refinement import refined
from thinwire.uses.scenes.refining.removal import without
from thinwire.uses.scenes.refining.rounding import Rounding
from thinwire.uses.scenes.refining.teacher import Teacher
from thinwire.uses.scenes.scene import Splats
from thinwire.uses.scenes.view.render import Pictures

Told = Callable[[str], None]
# Found on level 3 of PLAYBOT, which no figure is reported of.
ROUND = 0.67  # the share that stays in a round of removal
# Steps of refining, and their share of the rates.
BETWEEN, SETTLING, LEARNING, AGAIN = (40, 0.35), (80, 0.6), (100, 0.5), (50, 0.3)
SHARE = 0.65  # of the splats that are best in so many bytes without refining
FEWEST = 100
SHORT = 0.7  # dB that splats may be short of what is asked for after a round: settling gains more
LEARNS = 1.5  # dB that learning a rounding gives back, about
HALVES = 1.1  # dB that half the slope gains, about
TRIES = 3  # slopes that a rounding is learnt at
ABOUT = 0.3  # dB that a slope may be off before it is learnt
# Of a budget: what is aimed at, since learning takes more bytes, and what is near enough.
LESS, LESS_AGAIN, UNDER = 0.98, 0.99, 0.96


def thinned(splats: Splats, teacher: Teacher, few: Callable[[Splats], bool], told: Told) -> Splats:
    """Return the splats of the last round of removal before there are too ``few``, as they settle.

    Where a round is too much, half rounds follow, as long as they are not.
    """
    found, share = splats, ROUND
    while found.count * share >= FEWEST:
        fewer = _fewer(found, teacher, int(share * found.count), told)
        if not few(fewer):
            found = fewer
        elif share > ROUND:
            break
        else:
            share = ROUND**0.5
    return refined(found, teacher, *SETTLING, told=told)


def thinned_to(splats: Splats, teacher: Teacher, count: int, told: Told) -> Splats:
    """Return ``count`` splats, or all where there are no more, as they settle after rounds of removal."""
    rounds = math.ceil(math.log(min(count / splats.count, 1)) / math.log(ROUND))
    for left in range(rounds, 0, -1):
        now = int(splats.count * (count / splats.count) ** (1 / left)) if left > 1 else count
        splats = _fewer(splats, teacher, now, told)
    return refined(splats, teacher, *SETTLING, told=told)


def _fewer(splats: Splats, teacher: Teacher, count: int, told: Told) -> Splats:
    told(f"removing splats, {splats.count:,} are left")
    return refined(without(splats, teacher, count), teacher, *BETWEEN, told=told)


def learnt(scene: Analysis, teacher: Teacher, slope: float, pace: tuple[int, float], told: Told) -> Analysis:
    """Return a scene whose splats, coded at a slope, come back nearer to a teacher's pictures.

    ``pace``: how many steps, and their share of the rates.
    """
    rounding = Rounding.at(scene, slope)
    return rounding.held(refined(scene.splats, teacher, *pace, rounded=rounding, told=told))


def to_budget(
    scene: Analysis, teacher: Teacher, size: Callable[[Analysis, float], int], most: int, told: Told
) -> tuple[Analysis, float]:
    """Return a scene that has learnt the rounding of a slope, at which its ``size`` is ``most`` at most.

    Errors: ``InputError`` where even the coarsest steps take more.
    """
    slope = _within(partial(size, scene), int(LESS * most), search.FROM)
    for i in range(TRIES):
        scene = learnt(scene, teacher, slope, AGAIN if i else LEARNING, told)
        if UNDER * most <= size(scene, slope) <= most:
            return scene, slope
        slope = _within(partial(size, scene), int(LESS_AGAIN * most), slope)
    return scene, slope


def _within(size: Callable[[float], int], most: int, start: float) -> float:
    return search.to_budget(lambda slope: (slope, size(slope)), lambda made: made[1], most, start)[0]


def to_quality(
    scene: Analysis, teacher: Teacher, pictures: Pictures, least: float, told: Told
) -> tuple[Analysis, float]:
    """Return a scene that has learnt the rounding of a slope, at which its ``pictures`` have ``least`` dB.

    Errors: ``InputError`` where even the finest steps have less.
    """

    def quality(scene: Analysis, slope: float) -> float:
        return pictures.psnr(pictures.of(quantised(scene, slope).splats()))

    def nearest(start: float, asked: float) -> float:
        def made(slope: float) -> tuple[float, float]:
            return slope, quality(scene, slope)

        return search.to_quality(made, lambda found: found[1], asked, start, near=ABOUT)[0]

    slope, best = nearest(search.FROM, least - LEARNS), list[tuple[Analysis, float]]()
    for i in range(TRIES):
        scene = learnt(scene, teacher, slope, AGAIN if i else LEARNING, told)
        above = quality(scene, slope) - least
        if above >= 0:
            best = [(scene, slope)]
        if 0 <= above <= search.NEAR:
            break
        slope *= 2 ** ((above - search.NEAR / 2) / HALVES)
    if not best:
        best = [(scene, nearest(slope, least))]
    return best[0]
