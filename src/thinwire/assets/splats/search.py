"""The slope for a budget of bytes, or for a quality: one search."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from thinwire.types import InputError, require

COARSEST, FINEST = 1e-1, 1e-12  # slopes
FROM = 1e-6
WITHIN = 0.02  # of a budget of bytes
NEAR = 0.05  # dB of a quality
TRIES = 24
Made = TypeVar("Made")


def to_budget(make: Callable[[float], Made], size: Callable[[Made], int], most: int) -> Made:
    """Return what is made at the finest slope found whose size is ``most`` or less, and within 2 % of it.

    Smaller where even the finest slope is. Errors: ``InputError`` that names the smallest size there is.
    """
    kept = list[Made]()

    def over(slope: float) -> float:
        made = make(slope)
        nbytes = size(made)
        if nbytes <= most:
            kept[:] = [made]
        return nbytes / most - 1

    _search(over, -WITHIN)
    if not kept:
        least = size(make(COARSEST))
        raise InputError(
            f"the scene takes {least} bytes at least, and {most} are asked for; ask for {least} or more"
        )
    return kept[0]


def to_quality(make: Callable[[float], Made], quality: Callable[[Made], float], least: float) -> Made:
    """Return what is made at the coarsest slope found whose quality in dB is ``least`` or a little more.

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

    _search(below, NEAR, kept_above=True)
    told = f"{least:g} dB are asked for, and the finest steps reach {best[0]:.1f} dB; ask for less"
    require(bool(kept), InputError, told)
    return kept[0]


def _search(excess: Callable[[float], float], room: float, kept_above: bool = False) -> None:
    """Halve the range of slopes until what is kept is within ``room``; finer slopes have more ``excess``."""
    low, high = math.log(FINEST), math.log(COARSEST)
    at, width = math.log(FROM), math.log(8)
    seen_fine = seen_coarse = False
    for _ in range(TRIES):
        found = excess(math.exp(at))
        if (0 <= found <= room) if kept_above else (room <= found <= 0):
            return
        if found > 0:
            low, seen_fine = at, True  # too fine
        else:
            high, seen_coarse = at, True
        if high - low < 1e-4:
            return
        if seen_fine and seen_coarse:
            at = (low + high) / 2
        else:
            at = min(high, low + width) if seen_fine else max(low, high - width)
            width *= 2
