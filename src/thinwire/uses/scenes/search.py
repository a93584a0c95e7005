"""The slope for a budget of bytes, or for a quality: one search."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from thinwire.types import InputError, require

COARSEST, FINEST = 1e-1, 1e-12  # slopes
FROM = 1e-6
FIRST, CLOSE = 8.0, 1.5  # the first step away from where a search starts: nowhere near, or near
WITHIN = 0.02  # of a budget of bytes
NEAR = 0.05  # dB of a quality
TRIES = 24
APART = 5e-3  # logarithms of slopes that are one: what lies between leaps there, as few splats do
Made = TypeVar("Made")


def to_budget(
    make: Callable[[float], Made], size: Callable[[Made], int], most: int, start: float = FROM
) -> Made:
    """Return what is made at the finest slope found whose size is ``most`` or less, and within 2 % of it.

    ``start`` is a slope near it. Smaller where even the finest slope is. Errors: ``InputError`` that names
    the smallest size there is.
    """
    kept = list[Made]()

    def over(slope: float) -> float:
        made = make(slope)
        nbytes = size(made)
        if nbytes <= most:
            kept[:] = [made]
        return math.log(nbytes / most)

    _search(over, math.log(1 - WITHIN), 0.0, start)
    if kept:
        return kept[0]
    made = make(COARSEST)
    least = size(made)
    told = f"the scene takes {least} bytes at least, and {most} are asked for; ask for {least} or more"
    require(least <= most, InputError, told)
    return made


def to_quality(
    make: Callable[[float], Made],
    quality: Callable[[Made], float],
    least: float,
    start: float = FROM,
    near: float = NEAR,
) -> Made:
    """Return what is made at the coarsest slope found whose quality in dB is ``least`` to ``near`` more.

    Errors: ``InputError`` that names the best quality there is.
    """
    kept, best = list[Made](), [-math.inf]

    def below(slope: float) -> float:
        made = make(slope)
        found = quality(made)
        best[0] = max(best[0], found)
        if found >= least:
            kept[:] = [made]
        return found - least

    _search(below, 0.0, near, start)
    told = f"{least:g} dB are asked for, and the finest steps reach {best[0]:.1f} dB; ask for less"
    require(bool(kept), InputError, told)
    return kept[0]


def _search(excess: Callable[[float], float], low: float, high: float, start: float) -> None:
    """Try slopes, from ``start`` on, until the excess is from ``low`` to ``high``; finer slopes have more.

    Wider and wider steps find a slope that is too fine and one that is too coarse; then a line through the
    last two says where to look, and every third time the middle.
    """
    fine, coarse = math.log(FINEST), math.log(COARSEST)
    above, below = math.nan, math.nan  # how far off both are, once they are tried
    at, width, aim = math.log(start), math.log(FIRST if start == FROM else CLOSE), (low + high) / 2
    for i in range(TRIES):
        found = excess(math.exp(at))
        if low <= found <= high:
            return
        if found > high:
            fine, above = at, found - aim
        else:
            coarse, below = at, found - aim
        if coarse - fine < APART:
            return
        if math.isnan(above) or math.isnan(below):
            at = max(fine, coarse - width) if math.isnan(above) else min(coarse, fine + width)
            width *= 2
        else:
            share = above / (above - below) if i % 3 and math.isfinite(above - below) else 0.5
            at = fine + min(max(share, 0.05), 0.95) * (coarse - fine)
