"""What all policies of federated learning keep: valid at any device, pure, quick, strict with parameters."""

from __future__ import annotations

import math
import time
from itertools import product

import pytest

from thinwire.codecs import Raw, TopK, Uniform
from thinwire.rounds.client_profile import ClientProfile, FederatedPolicy, Fixed, Situation
from thinwire.types import InputError
from thinwire.uses.federated.choosing.accordion import Accordion
from thinwire.uses.federated.choosing.dagc import DagcA, DagcR
from thinwire.uses.federated.choosing.fedluck import FedLuck
from thinwire.uses.federated.choosing.gamma import GammaFedHT
from thinwire.uses.federated.choosing.true_cost import Thinwire

POLICIES: list[FederatedPolicy] = [
    Fixed(),
    Fixed(steps=20, codec=TopK(0.05, Uniform(4))),
    GammaFedHT(0.01),
    GammaFedHT(0.01, rule="linear"),
    DagcR(),
    DagcA(),
    Accordion(),
    FedLuck(),
    Thinwire(),
    Thinwire(threshold=0.01),
    Thinwire(values=Raw(), kept_bits=32, down_ratio=0, trips=0, data_power=0, waits=False),
]
RATES = (1e-3, 1.0, 1e4, 1e12, math.inf)
EXTREMES = [
    ClientProfile(i, step, samples, up, down, delay)
    for i, (step, samples, up, down, delay) in enumerate(
        product((1e-6, 1e5), (1, 10**9), RATES, RATES, (0.0, 100.0))
    )
]
MANY = [
    ClientProfile(i, 0.05 + i % 7 / 10, 1 + i % 300, 2e3 + 10 * i, 1e4 + 40 * i, 0.05) for i in range(1000)
]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_every_assignment_is_valid_pure_and_says_why(policy: FederatedPolicy) -> None:
    assert isinstance(policy, FederatedPolicy)
    for values in (1, 46_730, 10**9):
        situation = Situation(values, version=3, norms=(1.0, 0.9))
        plan = policy.assign(EXTREMES, situation)  # codecs and Assignment refuse what is none
        assert len(plan) == len(EXTREMES) and list(plan) == list(policy.assign(EXTREMES, situation))
        assert all(a.why and "\n" not in a.why and len(repr(a.codec)) < 80 for a in plan)
    assert len(policy.assign(EXTREMES[:1], situation)) == 1 and list(policy.assign([], situation)) == []


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_thousand_devices_take_no_time(policy: FederatedPolicy) -> None:
    began = time.thread_time()
    assert len(policy.assign(MANY, Situation(46_730))) == 1000
    assert time.thread_time() - began < 0.9


WRONG: list[tuple[type, dict[str, object]]] = [
    (Fixed, {"steps": 0}),
    (Fixed, {"codec": 3}),
    (GammaFedHT, {"threshold": 0.0}),
    (GammaFedHT, {"threshold": 0.1, "alpha": 0.0}),
    (GammaFedHT, {"threshold": 0.1, "rule": "square"}),
    (GammaFedHT, {"threshold": 0.1, "last_rate": -1.0}),
    (DagcR, {"mean_ratio": 0.0}),
    (DagcR, {"mean_ratio": 1.5}),
    (DagcR, {"steps": 0}),
    (DagcA, {"mean_threshold": 0.0}),
    (DagcA, {"values": None}),
    (Accordion, {"low": 0.2, "high": 0.1}),
    (Accordion, {"eta": 0.0}),
    (Accordion, {"every": 0}),
    (FedLuck, {"period": 0.0}),
    (FedLuck, {"least_steps": 9, "most_steps": 8}),
    (FedLuck, {"least_ratio": 0.011, "most_ratio": 0.019}),
    (Thinwire, {"period": -1.0}),
    (Thinwire, {"down_ratio": -0.1}),
    (Thinwire, {"least_ratio": 0.0}),
    (Thinwire, {"ratio_power": 0.0}),
    (Thinwire, {"most_periods": 0.5}),
]


@pytest.mark.parametrize(("policy", "fields"), WRONG, ids=lambda x: getattr(x, "__name__", str(x)))
def test_a_wrong_parameter_is_one_sentence(policy: type, fields: dict[str, object]) -> None:
    with pytest.raises(InputError, match="; give ") as refused:
        policy(**fields)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 110
