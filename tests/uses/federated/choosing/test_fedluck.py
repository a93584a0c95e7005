"""FedLuck: the grid's least phi, the closed form where ratios are small, and limits as ablations."""

from __future__ import annotations

import math
import random
from itertools import pairwise, product

import pytest

from thinwire.codecs import TopK
from thinwire.rounds.client_profile import Assignment, ClientProfile, Situation
from thinwire.uses.federated.choosing.fedluck import FedLuck

VALUES = 250_000  # so that a whole model is a million bytes


def device(step: float, whole: float) -> ClientProfile:
    return ClientProfile(0, step, samples=1, up=4 * VALUES / whole)


def chosen(policy: FedLuck, step: float, whole: float) -> tuple[int, float]:
    found = policy.assign([device(step, whole)], Situation(VALUES))[0]
    assert isinstance(found, Assignment) and isinstance(found.codec, TopK)
    return found.steps, found.codec.ratio


def searched(period: float, step: float, whole: float) -> tuple[int, float]:
    """Return the least phi as the released code searches it: two loops."""

    def phi(k: int, d: float) -> float:
        return float(((k * step + d * whole) ** 2 * (2 - d) + period**2) / (k * math.sqrt(d) * period**2))

    return min(product(range(2, 61), (i / 100 for i in range(1, 101))), key=lambda pair: phi(*pair))


def test_the_example_of_the_closed_form() -> None:
    assert chosen(FedLuck(period=1.5), 0.4, 17) == (3, 0.04)


def test_it_searches_as_the_released_code_does() -> None:
    draw = random.Random(0)
    for _ in range(10):
        step, whole, period = (10 ** draw.uniform(*span) for span in ((-2, 0.5), (-1, 2.5), (-0.5, 1)))
        assert chosen(FedLuck(period=period), step, whole) == searched(period, step, whole)


@pytest.mark.parametrize("period", [1.0, 3.0, 10.0])
def test_where_small_ratios_are_best_it_is_the_closed_form(period: float) -> None:
    steps, ratio = chosen(FedLuck(period=period), period / 25, 12 * period)
    assert steps == pytest.approx(0.8165 * 25, rel=0.1) and ratio == pytest.approx(0.408 / 12, abs=0.01)


def test_a_faster_uplink_never_lowers_the_ratio() -> None:
    ratios = [chosen(FedLuck(period=1.5), 0.1, whole)[1] for whole in (1000, 100, 50, 20, 10, 5, 1, 0.1)]
    assert all(a <= b for a, b in pairwise(ratios)) and ratios[0] == 0.01 and ratios[-1] == 1.0


def test_limits_fix_a_part() -> None:
    fixed = FedLuck(period=1.5, least_steps=7, most_steps=7)
    assert chosen(fixed, 0.1, 30)[0] == 7
    fixed = FedLuck(period=1.5, least_ratio=0.3, most_ratio=0.3)
    assert chosen(fixed, 0.1, 30)[1] == 0.3
