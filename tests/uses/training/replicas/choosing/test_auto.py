"""What auto chooses: what comes to a loss soonest, one plan for all, steady where links waver."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product

import pytest

from tests.uses.training.replicas.choosing.lines import cnn, drawn, gpt2, predicted, wavering
from thinwire.choosing.policy import Policy
from thinwire.types import InputError
from thinwire.uses.training.replicas.choosing.auto import (
    DIFFERENCES,
    GRADIENTS,
    HIDDEN,
    LOCAL_STEPS,
    STALENESS,
    Auto,
    ReplicaPlan,
)
from thinwire.uses.training.replicas.choosing.replica_policy import ReplicaChoice, ReplicaSite
from thinwire.uses.training.replicas.choosing.time_model import predicted_step, ring_step

KINDS = pytest.mark.parametrize("gradients", [False, True])
RATES = [0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 1000]  # Mbit/s


def chosen(sites: Sequence[ReplicaSite], gradients: bool = False) -> list[ReplicaChoice]:
    return list(Auto(gradients=gradients).choose(sites))


def cost(choices: Sequence[ReplicaChoice]) -> float:
    """Return how many times the steps of an exact mean these choices are said to need."""
    codes = [next(code for code in (*DIFFERENCES, *GRADIENTS) if code.made(c)) for c in choices]
    return ReplicaPlan(choices[0].staleness, choices[0].local_steps, tuple(codes)).cost


def time_to_loss(choices: Sequence[ReplicaChoice]) -> float:
    """Return the time to a loss, in steps of an exact mean."""
    return predicted(choices[0]) * cost(choices)


def drawn_for(draw: random.Random, gradients: bool, coding: float) -> ReplicaSite:
    site = drawn(draw)
    return replace(site, coding=draw.uniform(0, coding) * site.compute, steps=0 if gradients else 600)


def test_what_it_chooses_where_the_probes_were_made() -> None:
    """Quick links take dense differences, slower ones factors of matrices, or where none are, rarer ones."""
    links = (1000, 40, 1.5, 0.16, 0.03)
    plans = [(c.bits or c.rank, c.local_steps) for m in links for c in chosen([gpt2(m, 0.1)])]
    assert plans == [(1.2, 10), (1.2, 10), (8, 10), (8, 50), (4, 50)]
    plans = [(c.bits, c.local_steps) for m in links for c in chosen([gpt2(m, 0.1, sides=None)])]
    assert plans == [(1.2, 10), (1.2, 10), (1.2, 50), (0.6, 50), (0.6, 50)]
    pairs = [(c.ratio, c.staleness) for m in (1000, 20, 1.5) for c in chosen([cnn(m)], gradients=True)]
    assert pairs == [(0.1, 1), (0.01, 1), (0.001, 1)]
    assert chosen([gpt2(1.5, 0.1, steps=30)])[0].local_steps == 5  # a few rounds at least
    assert chosen([gpt2(1.5, 0.1, steps=3)])[0].local_steps == 3


@KINDS
@pytest.mark.parametrize("seed", range(6))
def test_never_slower_than_all_reduce_by_more_than_a_twentieth(seed: int, gradients: bool) -> None:
    """For as long as coding leaves room: a gradient is coded each step, a difference every 10 to 50."""
    draw = random.Random(seed)
    for _ in range(30):
        site = drawn_for(draw, gradients, coding=0.04 if gradients else 0.4)
        choice = chosen([site], gradients)[0]
        assert time_to_loss([choice]) <= 1.05 * ring_step(site)


@KINDS
@pytest.mark.parametrize("seed", range(6))
def test_no_other_choice_comes_to_a_loss_sooner(seed: int, gradients: bool) -> None:
    draw, codes = random.Random(seed), GRADIENTS if gradients else DIFFERENCES
    for _ in range(20):
        site = drawn_for(draw, gradients, coding=0.1)
        score = time_to_loss(chosen([site], gradients))
        for code, steps in product(codes, [1] if gradients else LOCAL_STEPS):
            for late in STALENESS if gradients else [h for h in HIDDEN if h <= steps]:
                other = ReplicaPlan(late, steps, (code,))
                assert score <= predicted_step(site, other.choices[0]) * other.cost


@KINDS
def test_a_faster_link_comes_to_a_loss_no_later(gradients: bool) -> None:
    make = cnn if gradients else gpt2
    choices = [chosen([make(rate, 0.05)], gradients)[0] for rate in RATES]
    for slow, fast in pairwise(choices):
        assert time_to_loss([fast]) <= time_to_loss([slow])


@KINDS
@pytest.mark.parametrize("seed", range(6))
def test_the_plan_stays_where_links_waver_by_a_tenth(seed: int, gradients: bool) -> None:
    draw = random.Random(seed)
    for _ in range(10):
        base, plans = drawn_for(draw, gradients, coding=0.1), set()
        last: list[ReplicaChoice | None] = [None, None]
        for step in range(0, 240, 20):
            sites = [replace(wavering(base, draw), last=x, step=step) for x in last]
            last = list(chosen(sites, gradients))
            plans |= {(c.staleness, c.local_steps) for c in last if c}
        assert len(plans) == 1, base


@KINDS
def test_the_plan_follows_a_link_that_changes(gradients: bool) -> None:
    make, fast, slow = (cnn, 100, 0.1) if gradients else (gpt2, 100, 0.5)
    first = chosen([make(fast)], gradients)
    later = chosen([make(slow, last=first[0])], gradients)
    assert cost(later) > cost(first)
    again = chosen([make(fast, last=later[0])], gradients)
    assert time_to_loss(again) <= 1.05 * time_to_loss(first)


def test_one_plan_for_all_and_each_code_by_its_own_uplink() -> None:
    choices = chosen([cnn(20), cnn(20), cnn(1)], gradients=True)
    assert len({(c.staleness, c.local_steps, c.predicted) for c in choices}) == 1
    assert [c.ratio for c in choices] == [0.01, 0.01, 0.001]
    assert choices[2].reason.startswith("link 0.12 MB/s, 30 ms; 1.1 kB a step take 0.039 s of 0.04 s")


@KINDS
def test_before_anything_is_measured_it_starts_safely_and_then_decides_at_once(gradients: bool) -> None:
    make = cnn if gradients else gpt2
    start = chosen([make(rate=None), make()], gradients)
    assert start[0] == start[1] and start[0].reason.startswith("not measured yet: a safe start")
    assert (start[0].ratio, start[0].local_steps) == ((0.01, 1) if gradients else (None, 5))
    first = chosen([make(last=start[0], step=13)], gradients)[0]
    assert first.predicted is not None
    slow = make(0.01, last=first, step=37)
    assert chosen([slow], gradients) == [first] == chosen([replace(slow, rate=None, step=40)], gradients)
    assert chosen([replace(slow, step=40)], gradients) != [first]


def test_a_choice_of_another_policy_is_not_kept() -> None:
    other = ReplicaChoice(0.05, None, 7, 1, "deco", predicted=0.04)
    assert chosen([cnn(last=other)], gradients=True) == chosen([cnn()], gradients=True)


@pytest.mark.parametrize("wrong", [{"every": 0}, {"slack": 1.0}, {"margin": -0.1}])
def test_what_is_no_policy_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match="; give "):
        Auto(**wrong)  # type: ignore[arg-type]


def test_it_is_a_policy_that_prints_its_fields() -> None:
    assert isinstance(Auto(), Policy)
    assert repr(Auto(every=10, gradients=True)) == "Auto(every=10, gradients=True)"
