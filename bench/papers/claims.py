"""The claims, read from ``claims.toml``, and what was found of each."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bench.papers.measures import MEASURES
from bench.papers.verdicts import Interval, Verdict, decided

FILE = Path(__file__).with_name("claims.toml")
RATIO = "×"


@dataclass(frozen=True)
class Cause:
    """What explains that a claim fails, if its interval is above ``above``; ``text`` has ``{figure}``."""

    text: str
    measure: str
    above: float
    unit: str = RATIO

    def told(self) -> str:
        """Return the cause with its figure; nothing where it was not measured, or is none."""
        found = figure(self.measure, self.unit)
        return self.text.format(figure=shown(found, self.unit)) if found and found.low > self.above else ""


@dataclass(frozen=True)
class Claim:
    """What a paper claims: where it holds is ``above``, in ``unit``; larger is better for the paper.

    ``blocked``: why it cannot be run here. ``until``: another claim, once measured, says more. ``wanting``:
    what is to be built before it can be measured. ``target``: of make; ``runs``: seeds or rounds planned.
    """

    name: str
    paper: str
    field: str
    claim: str
    setting: str
    here: str = ""
    unit: str = RATIO
    above: float = 1.0
    published: float | None = None
    measure: str = ""
    target: str = ""
    runs: int = 3
    cause: Cause | None = None
    blocked: str = ""
    wanting: str = ""
    until: str = ""

    @property
    def values(self) -> list[float]:
        """The figure of each seed or round that has run."""
        return MEASURES[self.measure]() if self.measure else []

    @property
    def found(self) -> Interval | None:
        """The figure with its interval, or None."""
        return Interval.of(self.values, self.unit == RATIO)

    @property
    def verdict(self) -> tuple[Verdict, str]:
        """What became of it, and that in words."""
        if self.blocked:
            return Verdict.BLOCKED, f"{Verdict.BLOCKED}, because {self.blocked}"
        if self.wanting:
            return Verdict.MISSING, f"{Verdict.MISSING}; to be built: {self.wanting}"
        cause = self.cause.told() if self.cause else ""
        return decided(self.found, self.above, self.published, cause)


@cache
def every() -> dict[str, Claim]:
    """Return all claims by name, in the order of the file."""
    rows = tomllib.loads(FILE.read_text("utf-8"))["claim"]
    claims = (Claim(**row | ({"cause": Cause(**row["cause"])} if "cause" in row else {})) for row in rows)
    return {claim.name: claim for claim in claims}


@cache
def targets() -> dict[str, dict[str, str | int]]:
    """Return what make's targets take: minutes, and needs."""
    found: dict[str, dict[str, str | int]] = tomllib.loads(FILE.read_text("utf-8"))["target"]
    return found


def current() -> Iterator[Claim]:
    """Yield the claims, without those of which another one says more by now."""
    known = every()
    yield from (claim for claim in known.values() if not (claim.until and known[claim.until].values))


def figure(measure: str, unit: str) -> Interval | None:
    """Return what was measured, with its interval."""
    return Interval.of(MEASURES[measure](), unit == RATIO)


def shown(found: Interval, unit: str) -> str:
    """Return a figure and its interval.

    >>> shown(Interval(2.0, 1.5, 2.5), "×"), shown(Interval(-1.0, -3.0, 1.0), "points")
    ('2.00× (1.50 to 2.50)', '-1.00 points (-3.00 to 1.00)')
    """
    mean, low, high = (f"{x:,.2f}" if abs(x) < 100 else f"{x:,.0f}" for x in found)
    told = f"{mean}×" if unit == RATIO else f"{mean} {unit}".strip()
    return told if "inf" in high else f"{told} ({low} to {high})"
