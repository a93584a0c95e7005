"""What DeCo chooses: the note's table, no bubbles, one delay for all, steady where links waver."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.uses.training.replicas.choosing.lines import cnn, drawn, predicted, wavering
from thinwire.choosing.policy import Policy
from thinwire.types import InputError
from thinwire.uses.training.replicas.choosing.deco import (
    LEAST_RATIO,
    MOST_STALENESS,
    NOISE,
    START,
    Deco,
    derived_noise,
    paper_noise,
)
from thinwire.uses.training.replicas.choosing.replica_policy import KEPT_BITS, ReplicaChoice, ReplicaSite

FP32 = int(496e6 * 8 / KEPT_BITS)  # as many values as take, all kept, the bytes of 124 M in fp32


def chosen(sites: Sequence[ReplicaSite], **fields: object) -> list[ReplicaChoice]:
    return list(Deco(**fields).choose(sites))  # type: ignore[arg-type]


def rows() -> list[tuple[float, float, float, int, float]]:
    table = {
        (100, 0.1): [(2, 0.0025), (2, 0.0126), (2, 0.0252)],
        (100, 0.2): [(3, 0.0025), (2, 0.0126), (2, 0.0252)],
        (100, 1.0): [(11, 0.0025), (3, 0.0126), (2, 0.0252)],
        (1000, 0.2): [(3, 0.0252), (2, 0.126), (2, 0.252)],
    }
    computes = (0.1, 0.5, 1.0)
    return [
        (*link, c, *pair) for link, pairs in table.items() for c, pair in zip(computes, pairs, strict=True)
    ]


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize(("mbit", "delay", "compute", "staleness", "ratio"), rows())
def test_the_pairs_of_a_model_of_124_million(
    mbit: float, delay: float, compute: float, staleness: int, ratio: float, noise: str
) -> None:
    line = cnn(mbit, delay, values=FP32, compute=compute)
    choice = chosen([line], noise=noise, margin=0.0)[0]
    if noise == "paper" and ratio > 0.2:  # the one cell in which the two factors differ
        staleness = 1
    assert (choice.staleness, choice.ratio) == (staleness, pytest.approx(ratio, rel=0.01))


def test_the_two_noise_factors() -> None:
    assert paper_noise(0.1, 0) == derived_noise(0.1, 0) == pytest.approx(9)
    assert paper_noise(0.1, 3) == pytest.approx(0.9 / (0.1 * 0.9**3))
    assert derived_noise(0.1, 3) == pytest.approx(0.9 / (0.1 * 0.95**3))
    assert paper_noise(0.9, 4) == paper_noise(0.25, 4)  # clipped at 1 / staleness


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("seed", range(6))
def test_limits_and_no_bubble_that_can_be_avoided(seed: int, noise: str) -> None:
    draw = random.Random(seed)
    for _ in range(20):
        line = drawn(draw)
        choice = chosen([line], noise=noise)[0]
        assert 0 <= choice.staleness <= MOST_STALENESS and LEAST_RATIO <= (choice.ratio or 0) <= 1
        least = LEAST_RATIO * (line.replicas - 1) * line.values * KEPT_BITS / 8 / (line.rate or 1)
        if least < line.compute and (line.delay or 0) + least < MOST_STALENESS * line.compute:
            assert predicted(choice) <= 1.5 * line.compute


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("seed", range(6))
def test_the_delay_stays_where_a_link_wavers_by_a_tenth(seed: int, noise: str) -> None:
    draw = random.Random(seed)
    for _ in range(5):
        base, last, delays = drawn(draw), None, set()
        for step in range(0, 240, 20):
            last = chosen([replace(wavering(base, draw), last=last, step=step)], noise=noise)[0]
            delays.add(last.staleness)
        assert len(delays) == 1, (base, delays)


def test_the_delay_follows_a_link_that_changes() -> None:
    near, far = cnn(delay=0.03), cnn(delay=0.4)
    low, high = chosen([near])[0], chosen([far])[0]
    assert low.staleness < high.staleness
    assert chosen([replace(far, last=low)])[0].staleness == high.staleness
    assert chosen([replace(near, last=high)])[0].staleness == low.staleness


def test_one_delay_for_all_and_each_ratio_by_its_own_uplink() -> None:
    sites = [cnn(*line) for line in ((20, 0.03), (5, 0.03), (20, 0.1))]
    choices = chosen(sites)
    assert len({c.staleness for c in choices}) == len({c.local_steps for c in choices}) == 1
    fast, slow, far = (c.ratio or 0 for c in choices)
    assert slow == pytest.approx(fast / 4) and far == fast
    assert choices[0].staleness == chosen([cnn(5, 0.1)])[0].staleness


def test_more_is_sent_where_the_link_is_faster() -> None:
    sent = [chosen([cnn(r)])[0].ratio or 0 for r in (0.1, 1, 5, 10, 20, 40)]
    assert all(a < b for a, b in pairwise(sent))


def test_before_anything_is_measured_it_starts_safely_and_then_decides_at_once() -> None:
    assert chosen([cnn(rate=None), cnn()]) == [START, START] == chosen([cnn(compute=0.0), cnn()])
    first = chosen([cnn(last=START, step=3)])[0]
    assert first.predicted is not None and first.reason.startswith("link 2.5 MB/s, 30 ms; ")
    assert chosen([cnn(last=first, rate=1e4, step=33)]) == [first]  # not yet time
    assert chosen([cnn(last=first, rate=None, step=40)]) == [first]  # nothing known any more
    assert chosen([cnn(last=first, rate=1e4, step=40)]) != [first]


@pytest.mark.parametrize("wrong", [{"every": 0}, {"noise": "none"}, {"margin": -1.0}])
def test_what_is_no_policy_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError, match="; give "):
        Deco(**wrong)  # type: ignore[arg-type]


def test_it_is_a_policy_that_prints_its_fields() -> None:
    assert isinstance(Deco(), Policy) and Deco() == Deco(noise="paper")
    assert repr(Deco(every=10, noise="derived")) == "Deco(every=10, noise='derived')"
