"""When a claim holds: rules over intervals alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from bench.study.cells import interval


class Verdict(StrEnum):
    """What became of a claim."""

    HOLDS = "holds"
    FAILS = "does not hold"
    UNDECIDED = "undecided"
    BLOCKED = "cannot be run here"
    MISSING = "not measured"


SIZE = "in its size: the interval excludes what is published, and holds no effect"


class Interval(NamedTuple):
    """A mean, and the ends of its 95 % interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float], ratios: bool = False) -> Interval | None:
        """Return the interval by Student's t, of ratios that of their logarithms; None of no values.

        One value has an interval without ends.

        >>> [round(x, 2) for x in Interval.of([1.0, 2.0, 3.0])]
        [2.0, -0.48, 4.48]
        >>> [round(x, 2) for x in Interval.of([1.0, 4.0, 16.0], ratios=True)]
        [4.0, 0.13, 125.25]
        """
        if not values:
            return None
        mean, *half = interval([math.log(x) for x in values] if ratios else values)
        ends = [mean - half[0], mean + half[0]] if half else [-math.inf, math.inf]
        return cls(*map(_exp, [mean, *ends])) if ratios else cls(mean, *ends)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def decided(
    found: Interval | None, above: float, published: float | None = None, cause: str = ""
) -> tuple[Verdict, str]:
    """Return whether a claim holds, and what is to be said of it.

    It holds where the whole interval is above ``above``, the figure of no effect. How large an effect was
    ``published`` is said apart, because most settings here are others. A claim fails where the whole interval
    is below and a ``cause`` was measured, or where it holds no effect and excludes the published one.

    >>> decided(Interval(2.0, 1.5, 2.5), above=1.0, published=3.0)[1]
    'holds, smaller than published'
    >>> decided(Interval(1.2, 0.9, 1.5), above=1.0, published=3.0)[1]
    'does not hold in its size: the interval excludes what is published, and holds no effect'
    """
    if found is None:
        return Verdict.MISSING, Verdict.MISSING
    if found.low > above:
        return Verdict.HOLDS, Verdict.HOLDS + _size(found, published)
    if found.high < above:
        if cause:
            return Verdict.FAILS, f"{Verdict.FAILS}, because {cause}"
        return Verdict.UNDECIDED, f"{Verdict.UNDECIDED}: the interval is below, and no measurement says why"
    if published is not None and found.high < published:
        return Verdict.FAILS, f"{Verdict.FAILS} {SIZE}" + (f", because {cause}" if cause else "")
    why = "one run has no interval" if math.isinf(found.high) else "the interval holds both"
    return Verdict.UNDECIDED, f"{Verdict.UNDECIDED}: {why}"


def _size(found: Interval, published: float | None) -> str:
    if published is None:
        return ""
    if found.low >= published:
        return ", as large as published"
    return ", smaller than published" if found.high < published else "; as large as published: undecided"
