"""Choices under a budget of bytes: one slope of cost a byte for all, then what still fits.

Source: Y. Shoham and A. Gersho, "Efficient bit allocation for an arbitrary set of quantizers", IEEE Trans.
ASSP 36 (1988) [from memory].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from thinwire.types import InputError, require


@dataclass(frozen=True)
class Site:
    """Something to be coded in one of several ways: what each costs in quality, and its bytes."""

    name: str
    costs: tuple[float, ...]
    nbytes: tuple[float, ...]

    def __post_init__(self) -> None:
        n = len(self.costs)
        same = n > 0 and n == len(self.nbytes)
        require(
            same, InputError, f"{self.name} has {n} costs and {len(self.nbytes)} sizes; give one a choice"
        )
        good = all(map(math.isfinite, (*self.costs, *self.nbytes))) and min(self.nbytes) >= 0
        require(good, InputError, f"{self.name} has a cost or a size that is no finite number; leave it out")


class Step(NamedTuple):
    """A move of one site to a better choice: bytes a unit of cost, so that the best come first."""

    price: float
    site: int
    choice: int


@dataclass(frozen=True)
class ByteBudget:
    """Choose so that all together cost least in at most ``nbytes``.

    >>> one = Site("one", costs=(9.0, 1.0, 0.0), nbytes=(10, 20, 40))
    >>> two = Site("two", costs=(4.0, 3.0, 2.5), nbytes=(10, 20, 40))
    >>> ByteBudget(35).choose([one, two])
    [1, 0]
    """

    nbytes: float

    def choose(self, sites: Sequence[Site]) -> list[int]:
        """Return the number of a choice for each site. Errors: ``InputError`` that names the least there is.

        On the convex hull of each site's choices, in the order of one slope, as far as the budget goes; then
        the choices that the rest pays for, the cheapest a unit of cost first. So the cost is above the least
        possible by less than one move on a hull.
        """
        hulls = [_hull(site) for site in sites]
        chosen = [hull[0] for hull in hulls]
        left = self.nbytes - sum(site.nbytes[i] for site, i in zip(sites, chosen, strict=True))
        told = (
            f"they take {math.ceil(self.nbytes - left)} bytes at least, and {self.nbytes:.0f} are asked for"
        )
        require(left >= 0, InputError, told)
        moves = (_moves(sites[n], n, hull) for n, hull in enumerate(hulls))
        for step in sorted(move for own in moves for move in own):
            site = sites[step.site]
            more = site.nbytes[step.choice] - site.nbytes[chosen[step.site]]
            if more > left:
                break
            chosen[step.site], left = step.choice, left - more
        return _filled(sites, chosen, left)


def _hull(site: Site) -> list[int]:
    """Return the choices on the lower convex hull, from the smallest to the one of least cost."""
    hull = list[int]()
    for i in sorted(range(len(site.costs)), key=lambda i: (site.nbytes[i], site.costs[i])):
        if hull and site.costs[i] >= site.costs[hull[-1]]:
            continue
        while len(hull) > 1 and _price(site, hull[-2], hull[-1]) >= _price(site, hull[-1], i):
            hull.pop()
        hull.append(i)
    return hull


def _price(site: Site, a: int, b: int) -> float:
    """Return the bytes that a unit of cost takes from choice ``a`` to the better one ``b``."""
    return (site.nbytes[b] - site.nbytes[a]) / (site.costs[a] - site.costs[b])


def _moves(site: Site, number: int, hull: list[int]) -> list[Step]:
    return [Step(_price(site, a, b), number, b) for a, b in pairwise(hull)]


def _filled(sites: Sequence[Site], chosen: list[int], left: float) -> list[int]:
    """Return choices after moves, on the hull or off it, while any fits into what is left."""
    while True:
        moves = [
            Step(_price(site, chosen[n], i), n, i)
            for n, site in enumerate(sites)
            for i in range(len(site.costs))
            if site.costs[i] < site.costs[chosen[n]] and site.nbytes[i] - site.nbytes[chosen[n]] <= left
        ]
        if not moves:
            return chosen
        best = min(moves)
        left -= sites[best.site].nbytes[best.choice] - sites[best.site].nbytes[chosen[best.site]]
        chosen[best.site] = best.choice
