"""gamma-FedHT: Algorithm 1's threshold over a run, the linear rule, and what must be known ahead."""

from __future__ import annotations

import math

import pytest

from thinwire.codecs import HardThreshold, Uniform
from thinwire.rounds.client_profile import ClientProfile, Situation
from thinwire.types import InputError
from thinwire.uses.federated.choosing.gamma import GammaFedHT, paper_scale

DEVICES = [ClientProfile(0, 0.1, samples=1), ClientProfile(1, 2.0, samples=900, up=100)]
RATES = [0.03 / (1 + 0.1 * t) for t in range(50)]


def thresholds(policy: GammaFedHT, last: float = RATES[-1]) -> list[float]:
    found = []
    for version, rate in enumerate(RATES):
        situation = Situation(1000, version, rate, RATES[0], last)
        first, second = (a.codec for a in policy.assign(DEVICES, situation))
        assert isinstance(first, HardThreshold) and first == second  # the same for all devices
        found.append(first.threshold)
    return found


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0, 6.0])
def test_the_published_formula_term_by_term(alpha: float) -> None:
    first, last = RATES[0], RATES[-1]
    for rate in RATES:
        top = rate**alpha * (first * last) ** (alpha / 2)
        under = rate ** (2 * alpha) + (first * last) ** alpha
        assert paper_scale(alpha, rate, first, last) == pytest.approx(math.sqrt(top / under))


def test_the_paper_s_threshold_rises_to_its_top_then_falls_to_where_it_began() -> None:
    found = thresholds(GammaFedHT(0.01))
    top = found.index(max(found))
    assert found[:top] == sorted(found[:top]) and found[top:] == sorted(found[top:], reverse=True)
    assert RATES[top] == pytest.approx(math.sqrt(RATES[0] * RATES[-1]), rel=0.1)
    assert max(found) == pytest.approx(0.01 / math.sqrt(2), rel=0.01) and found[0] == found[-1]


def test_the_linear_threshold_keeps_its_share_of_the_step_size() -> None:
    found = thresholds(GammaFedHT(0.01, rule="linear"), last=0.0)  # which needs no end
    assert all(f / r == pytest.approx(0.01 / RATES[0], rel=1e-3) for f, r in zip(found, RATES, strict=True))


def test_a_run_without_an_end_must_name_the_last_step_size() -> None:
    with pytest.raises(InputError, match=r"planned end.*give last_rate"):
        thresholds(GammaFedHT(0.01), last=0.0)
    named = GammaFedHT(0.01, last_rate=RATES[-1], values=Uniform(4))
    assert thresholds(named, last=0.0) == thresholds(GammaFedHT(0.01))


def test_extremes_stay_numbers() -> None:
    for alpha in (1e-3, 1e3):
        for rate in (1e-300, 1.0, 1e300):
            assert 0 <= paper_scale(alpha, rate, 1e-200, 1e200) <= math.sqrt(0.5)
    with pytest.raises(InputError, match=r"rate=0.*give one"):
        GammaFedHT(0.01, rule="linear").assign(DEVICES, Situation(1000, rate=0.0))
