"""DAGC: budgets hold, the closed forms are optimal where they say so, and published artefacts stay."""

from __future__ import annotations

import numpy as np
import pytest

from thinwire.codecs import HardThreshold, TopK, Uniform
from thinwire.rounds.client_profile import ClientProfile, Situation
from thinwire.uses.federated.choosing.dagc import (
    EXPONENT,
    DagcA,
    DagcR,
    absolute_thresholds,
    key_factor,
    relative_ratios,
)

SHARES = [0.5, 0.2, 0.15, 0.1, 0.05]
MODEL = Situation(values=50_000)


def drawn(seed: int) -> list[float]:
    draw = np.random.default_rng(seed)
    shares = draw.dirichlet(np.full(int(draw.integers(2, 40)), 0.4)) + 1e-4
    return list(shares / shares.sum())


def devices(*samples: int) -> list[ClientProfile]:
    return [ClientProfile(i, 0.1, n) for i, n in enumerate(samples)]


def least_holder_limit(shares: list[float], j: int, mean: float) -> float:
    """Return the most that j may hold as the least ratio, by the theorem: when it is tied."""
    others = sorted(p for i, p in enumerate(shares) if i != j)
    part = others[0] ** EXPONENT
    return len(shares) * mean / (1 + sum(p**EXPONENT for p in others) / part)


def test_the_measured_example() -> None:
    found = [round(d, 4) for d in relative_ratios(SHARES, 0.05)]
    assert found == [0.0935, 0.0507, 0.0419, 0.0320, 0.0320]


@pytest.mark.parametrize("seed", range(30))
def test_budgets_hold_and_ratios_follow_two_thirds_but_for_one(seed: int) -> None:
    shares = drawn(seed)
    ratios = relative_ratios(shares, 0.01)
    assert sum(ratios) == pytest.approx(0.01 * len(shares))
    order = np.argsort(shares, kind="stable")
    scaled = np.array(ratios)[order] / np.array(shares)[order] ** EXPONENT
    assert sum(~np.isclose(scaled, np.median(scaled))) <= 1 or len(shares) == 2
    assert sorted(ratios)[0] == pytest.approx(sorted(ratios)[1])  # the least is tied
    thresholds = absolute_thresholds(shares, 0.01)
    assert sum(1 / t for t in thresholds) == pytest.approx(len(shares) / 0.01)


def test_no_plan_of_the_candidates_shape_is_better() -> None:
    """20,000 plans of the same sum whose least ratio does not exceed the tie that the theorem sets."""
    draw, best = np.random.default_rng(0), key_factor(SHARES, ratios := relative_ratios(SHARES, 0.05))
    limits = [least_holder_limit(SHARES, j, 0.05) for j in range(len(SHARES))]
    tried = 0
    while tried < 20_000:
        wide = draw.choice([0.01, 0.1, 0.5])
        plan = np.array(ratios) * np.exp(wide * draw.standard_normal(len(SHARES)))
        plan *= sum(ratios) / plan.sum()
        if plan.min() <= limits[int(plan.argmin())]:
            tried += 1
            assert key_factor(SHARES, plan.tolist()) >= best * (1 - 1e-12)


@pytest.mark.parametrize("skew", [2, 10, 100, 1000])
def test_by_its_own_key_factor_equal_ratios_would_be_better_which_is_kept_as_published(skew: int) -> None:
    for shares in (np.linspace(skew, 1, 10), np.geomspace(skew, 1, 10)):
        shares = list(shares / shares.sum())
        assert key_factor(shares, [0.001] * 10) < key_factor(shares, relative_ratios(shares, 0.001))


def test_no_thresholds_of_the_same_budget_are_better() -> None:
    draw, chosen = np.random.default_rng(0), np.array(absolute_thresholds(SHARES, 0.01))
    rates = 1 / chosen * np.exp(0.3 * draw.standard_normal((20_000, len(SHARES))))
    rates *= (1 / chosen).sum() / rates.sum(axis=1, keepdims=True)
    cost = np.array(SHARES) ** 2
    assert (cost / rates**2).sum(axis=1).min() >= (cost * chosen**2).sum()


def test_the_odd_one_out_of_skew_100_is_in_the_middle() -> None:
    shares = np.logspace(2, 0, 9)
    shares = np.append(shares, shares[-1])  # as the released code makes them
    ratios = relative_ratios(list(shares / shares.sum()), 0.001)
    odd = [i for i in range(8) if ratios[i] < ratios[i + 1]]
    assert odd and ratios[odd[0]] == pytest.approx(min(ratios)) and 0 < odd[0] < 8


def test_order_of_devices_does_not_count_and_equal_shares_are_equal() -> None:
    turned = relative_ratios(SHARES[::-1], 0.05)
    assert turned[::-1] == pytest.approx(relative_ratios(SHARES, 0.05))
    assert relative_ratios([0.25] * 4, 0.1) == pytest.approx([0.1] * 4)
    assert relative_ratios([1.0], 0.1) == [0.1] and relative_ratios([], 0.1) == []


def test_assignments_follow_the_data_and_stay_valid() -> None:
    plan = DagcR(mean_ratio=0.6, steps=4, values=Uniform(4)).assign(devices(500, 200, 150, 100, 50), MODEL)
    ratios = [a.codec.ratio for a in plan if isinstance(a.codec, TopK)]
    assert ratios == sorted(ratios, reverse=True) and ratios[0] == 1.0  # above 1 all is sent
    assert {a.steps for a in plan} == {4} and "50 % of the data" in plan[0].why
    codecs = [a.codec for a in DagcA(0.01).assign(devices(1, 20, 300), MODEL)]
    lows = [c.threshold for c in codecs if isinstance(c, HardThreshold)]
    assert len(lows) == 3 and lows == sorted(lows, reverse=True)
