"""The time model against a simulation of every event."""

from __future__ import annotations

import random

import pytest

from thinwire.types import InputError
from thinwire.uses.training.replicas.choosing.replica_policy import ReplicaChoice, ReplicaSite
from thinwire.uses.training.replicas.choosing.time_model import (
    delayed_step,
    local_step,
    predicted_step,
    ring_step,
    transit_seconds,
)

STEPS = 600


def simulated_delay(compute: float, wire: float, delay: float, staleness: int) -> float:
    """Return seconds a step: the update of step t waits for the message of step t - staleness."""
    now = link_free = 0.0
    arrivals: list[float] = []
    for step in range(STEPS):
        now += compute
        link_free = max(now, link_free) + wire
        arrivals.append(link_free + delay)
        if step >= staleness:
            now = max(now, arrivals[step - staleness])
    return now / STEPS


def simulated_rounds(
    compute: float, coding: float, wire: float, delay: float, steps: int, hidden: int
) -> float:
    """Return seconds a step: a round's message leaves at its end and is merged ``hidden`` steps later."""
    now, arrival = 0.0, None
    for step in range(STEPS):
        now += compute
        place = step % steps + 1  # in the round
        if arrival is not None and place == hidden:
            now, arrival = max(now, arrival), None
        if place == steps:
            now += coding
            arrival = now + wire + delay
            if hidden == 0:
                now, arrival = arrival, None
    return now / STEPS


@pytest.mark.parametrize("seed", range(8))
def test_the_delay_line_takes_as_long_as_simulated(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(10):
        line = draw.uniform(0.01, 1), draw.uniform(0, 1), draw.uniform(0, 1), draw.randrange(9)
        assert delayed_step(*line) == pytest.approx(simulated_delay(*line), rel=0.03)


@pytest.mark.parametrize("seed", range(8))
def test_a_round_takes_as_long_as_simulated(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(10):
        compute, coding, wire, delay = (draw.uniform(0.01, 1) for _ in range(4))
        wire, steps = wire * draw.choice([1, 10]), draw.choice([2, 5, 10, 20])
        hidden = draw.randrange(steps + 1)
        step = local_step(compute, coding, wire + delay, steps, hidden)
        assert step == pytest.approx(simulated_rounds(compute, coding, wire, delay, steps, hidden), rel=0.05)


def site(**changes: object) -> ReplicaSite:
    given = {"values": 10**6, "replicas": 2, "compute": 0.1, "rate": 1e6, "delay": 0.05} | changes
    return ReplicaSite(**given)  # type: ignore[arg-type]


def choice(
    ratio: float | None = None, bits: float | None = None, staleness: int = 0, steps: int = 1
) -> ReplicaChoice:
    return ReplicaChoice(ratio, bits, staleness, steps, "")


def test_each_peer_gets_a_copy_over_the_same_uplink() -> None:
    for replicas in (2, 4):
        wire = (replicas - 1) * 10**6 * 0.01 * 21 / 8 / 1e6
        step = predicted_step(site(replicas=replicas, coding=0.02), choice(ratio=0.01))
        assert step == pytest.approx(0.12 + wire + 0.05)


def test_an_exact_exchange_goes_round_a_ring() -> None:
    assert predicted_step(site(), choice()) == ring_step(site()) == pytest.approx(0.1 + 2 * (2 + 0.05))
    assert ring_step(site(replicas=4)) == pytest.approx(0.1 + 6 * (1 + 0.05))


def test_dense_bits_are_those_measured() -> None:
    assert [choice(bits=b).bits_per_value(1) for b in (0.6, 1.2, 2.4)] == pytest.approx([0.33, 1.08, 2.16])
    more = [choice(bits=b / 10).bits_per_value(1) for b in range(1, 60)]
    assert more == sorted(more) and choice().bits_per_value(1) == 32


@pytest.mark.parametrize(
    "wrong",
    [
        {"ratio": 0.0},
        {"ratio": 1.5},
        {"ratio": 0.1, "bits": 1.0},
        {"bits": 0.0},
        {"staleness": -1},
        {"steps": 0},
    ],
)
def test_what_is_no_choice_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match="; give "):
        choice(**wrong)  # type: ignore[arg-type]


def test_after_a_pause_tcp_opens_its_window_round_by_round() -> None:
    """600 kB at 2.5 MB/s and 60 ms of round trip took 0.42 s behind kernel TCP, of which the line is 0.27."""
    line = {"values": 4_470_272, "rate": 2.5e6, "delay": 0.03, "restarts": True}
    assert transit_seconds(site(**line), choice(bits=1.2, steps=10)) == pytest.approx(0.42, abs=0.02)
    often, rare = (
        [predicted_step(site(**line | {"restarts": r}), choice(bits=1.2, steps=s)) for r in (False, True)]
        for s in (1, 10)
    )
    assert often[0] == often[1] and rare[1] - rare[0] == pytest.approx(0.15 / 10, abs=0.003)
