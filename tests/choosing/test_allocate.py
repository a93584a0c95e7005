"""Choices under a budget of bytes, against all that there are."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.choosing.allocate import ByteBudget, Site
from thinwire.types import InputError

CHOICES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=4)
SITES = st.lists(CHOICES, min_size=1, max_size=4)


def sites_of(found: list[list[tuple[int, int]]]) -> list[Site]:
    return [
        Site(f"t{n}", tuple(float(c) for c, _ in own), tuple(b for _, b in own))
        for n, own in enumerate(found)
    ]


def totals(sites: list[Site], chosen) -> tuple[float, float]:
    pairs = list(zip(sites, chosen, strict=True))
    return sum(s.costs[i] for s, i in pairs), sum(s.nbytes[i] for s, i in pairs)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(SITES, st.integers(0, 120))
def test_choices_fit_and_cost_little_more_than_the_least(found, budget: int) -> None:
    sites = sites_of(found)
    all_of_them = [totals(sites, c) for c in product(*(range(len(s.costs)) for s in sites))]
    fitting = [cost for cost, nbytes in all_of_them if nbytes <= budget]
    if not fitting:
        with pytest.raises(InputError, match=f"{min(b for _, b in all_of_them)} bytes at least"):
            ByteBudget(budget).choose(sites)
        return
    cost, nbytes = totals(sites, ByteBudget(budget).choose(sites))
    assert nbytes <= budget
    one_move = max(max(s.costs) - min(s.costs) for s in sites)
    assert min(fitting) <= cost <= min(fitting) + one_move


@settings(max_examples=100, deadline=None, derandomize=True)
@given(SITES, st.floats(0.05, 8))
def test_the_choices_of_a_slope_are_the_best_at_their_bytes(found, slope: float) -> None:
    """What minimises cost + slope * bytes costs least of all that take no more bytes: no choice beats it."""
    sites = sites_of(found)
    chosen = [min(range(len(s.costs)), key=lambda i, s=s: s.costs[i] + slope * s.nbytes[i]) for s in sites]
    least, budget = totals(sites, chosen)
    assert totals(sites, ByteBudget(budget).choose(sites))[0] == least


def test_sites_without_sense_are_refused() -> None:
    for costs, nbytes in (((), ()), ((1.0,), (1, 2)), ((float("nan"),), (1,)), ((1.0,), (-1,))):
        with pytest.raises(InputError, match="w has"):
            Site("w", costs, nbytes)
    assert ByteBudget(0).choose([]) == []
