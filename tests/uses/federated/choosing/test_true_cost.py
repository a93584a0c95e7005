"""Ours: it follows links and data, keeps its budget, and every part can be switched off."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from thinwire.codecs import HardThreshold, Raw, TopK, Uniform
from thinwire.rounds.client_profile import Assignment, ClientProfile, Situation
from thinwire.uses.federated.choosing.fedluck import FedLuck, phi
from thinwire.uses.federated.choosing.true_cost import (
    FRAMING,
    Thinwire,
    TurnCost,
    at_equal_budget,
    position_bits,
    turn_seconds,
    value_bits,
    with_waiting,
)

MODEL = Situation(values=46_730)
DEVICE = ClientProfile(0, step_seconds=0.1, samples=100, up=5e3, down=20e3, delay=0.05)
COST = TurnCost(MODEL.values, bits=0, kept=Uniform(4), down_ratio=0.02, trips=2, period=1.5)


def assigned(
    devices: list[ClientProfile], situation: Situation = MODEL, **fields: object
) -> list[Assignment]:
    given = {"period": COST.period, "most_ratio": 1.0, **fields}
    return list(Thinwire(**given).assign(devices, situation))  # type: ignore[arg-type]


def ratios(devices: list[ClientProfile], **fields: object) -> list[float]:
    return [a.codec.ratio for a in assigned(devices, **fields) if isinstance(a.codec, TopK)]  # type: ignore[arg-type]


def score(device: ClientProfile) -> float:
    """Return the phi of what is chosen by default."""
    (plan,), (ratio,) = assigned([device]), ratios([device])
    turn = COST.seconds(device, np.array([float(plan.steps)]), np.array([ratio]))
    return phi(plan.steps, ratio, with_waiting(turn, 1.5)[0, 0], 1.5, Thinwire().ratio_power)


# -- the cost ------------------------------------------------------------------------------------------------


def test_a_kept_value_costs_its_bits_and_the_entropy_of_its_position() -> None:
    assert value_bits(Raw()) == 32 and value_bits(Uniform(4)) == 4.5
    few = np.array([1e-4, 0.01, 0.3])
    entropy = -few * np.log2(few) - (1 - few) * np.log2(1 - few)
    assert position_bits(few) == pytest.approx(entropy / few) and position_bits(np.ones(1))[0] == 0
    assert COST.upload(few) == pytest.approx(FRAMING + MODEL.values * (4.5 * few + entropy) / 8)
    assert replace(COST, bits=8.0).upload(few) == pytest.approx(FRAMING + MODEL.values * few)


def test_a_turn_solves_its_own_equation_and_lasts_whole_periods() -> None:
    draw = np.random.default_rng(0)
    for _ in range(200):
        busy, version, whole, period = np.exp(draw.uniform(-3, 3, 4))
        found = turn_seconds(np.array([busy]), version, whole, period)
        assert found[0] == pytest.approx(busy + min(whole, version * max(1, found[0] / period)))
        periods = with_waiting(found, period)[0] / period
        assert periods == pytest.approx(round(periods)) and periods * period >= found[0]


def test_a_turn_is_what_the_device_says_it_takes() -> None:
    device = replace(DEVICE, down=1e9)
    (plan,), (ratio,) = assigned([device]), ratios([device])
    up = float(COST.upload(np.array([ratio]))[0])
    foretold = float(plan.why.split(": ")[1].split(" s")[0])
    assert foretold == pytest.approx(device.seconds(plan.steps, up, down=1.0), rel=1e-2)


# -- the choice ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0.02, 0.1, 0.4, 2.0])
def test_a_faster_uplink_never_lowers_the_ratio(step: float) -> None:
    """From 8 kbit/s on; below, an update is made of framing, and more in each pays.

    Where turns last whole periods, a step more may fit at the cost of the ratio: then phi never rises.
    """
    fields = {"waits": False, "ratio_power": 0.25}
    lines = [replace(DEVICE, step_seconds=step, up=up) for up in np.geomspace(1e3, 1e9, 60)]
    found = [ratios([line], **fields)[0] for line in lines]
    assert all(a <= b for a, b in pairwise(found)) and found[0] < found[-1] == 1.0
    together = ratios(lines, **fields)
    assert all(a <= b for a, b in pairwise(together))
    scores = [score(line) for line in lines]
    assert all(a >= b * (1 - 1e-3) for a, b in pairwise(scores)) and scores[0] > scores[-1]


def test_more_data_means_a_larger_ratio_at_the_same_sum() -> None:
    devices = [replace(DEVICE, id=i, samples=n) for i, n in enumerate((50, 100, 100, 200, 800))]
    found, even = ratios(devices), ratios(devices, data_power=0)
    assert found == sorted(found) and len(set(even)) == 1
    assert sum(found) == pytest.approx(sum(even), rel=1e-3)
    assert found[4] / found[0] == pytest.approx(16 ** (2 / 3), rel=1e-3)


def test_a_budget_holds_within_limits_too() -> None:
    draw = np.random.default_rng(1)
    for _ in range(100):
        given = draw.uniform(0.001, 1, 30)
        moved = at_equal_budget(given, np.exp(4 * draw.standard_normal(30)), 0.001, 1.0)
        assert moved.sum() == pytest.approx(given.sum()) and 0.001 <= moved.min() <= moved.max() <= 1


def test_few_samples_take_few_steps_at_any_speed() -> None:
    fast = [replace(DEVICE, id=i, step_seconds=0.001, samples=n) for i, n in enumerate((3, 60, 300, 10_000))]
    assert [a.steps for a in assigned(fast)] == [1, 12, 60, 100]
    assert [a.steps for a in assigned(fast, samples_a_step=0)] == [100] * 4


@pytest.mark.parametrize("periods", [1, 2])
def test_slower_devices_take_fewer_steps_and_keep_the_period(periods: int) -> None:
    slow = [replace(DEVICE, id=i, step_seconds=s) for i, s in enumerate((0.05, 0.1, 0.2, 0.4, 0.8))]
    plan = assigned(slow, most_periods=periods)
    assert [a.steps for a in plan] == sorted((a.steps for a in plan), reverse=True)
    for device, chosen, ratio in zip(slow, plan, ratios(slow, most_periods=periods), strict=True):
        turn = COST.seconds(device, np.array([float(chosen.steps)]), np.array([ratio]))[0, 0]
        assert turn <= periods * COST.period


# -- its parts -----------------------------------------------------------------------------------------------


def test_all_parts_off_is_fedluck_on_a_finer_grid() -> None:
    off = Thinwire(
        1.5, Raw(), kept_bits=32, down_ratio=0, trips=0, waits=False, ratio_power=0.5, data_power=0,
        least_steps=2, most_steps=60, least_ratio=0.01, most_ratio=1.0, most_periods=1e6,
        samples_a_step=0,
    )  # fmt: skip
    devices = [replace(DEVICE, step_seconds=0.05 * i, up=2e4 * i, samples=i) for i in range(1, 9)]
    for ours, theirs in zip(off.assign(devices, MODEL), FedLuck(1.5).assign(devices, MODEL), strict=True):
        assert isinstance(ours.codec, TopK) and isinstance(theirs.codec, TopK)
        assert ours.codec.ratio == pytest.approx(theirs.codec.ratio, rel=0.15, abs=0.01)
        assert abs(ours.steps - theirs.steps) <= 1


def test_each_part_of_the_cost_shows() -> None:
    """A dearer or less worthy value lowers the ratio; what ways do not take, steps have."""
    far, base = replace(DEVICE, delay=0.5), {"waits": False, "ratio_power": 0.5}
    (whole,) = ratios([far], **base)
    for part in ({"kept_bits": 32}, {"values": Raw()}, {"ratio_power": 0.1}):
        assert ratios([far], **{**base, **part})[0] < whole
    for part in ({"down_ratio": 0}, {"trips": 0}, {"waits": False}):
        one, other = (assigned([far], most_periods=1, **fields)[0].steps for fields in ({}, part))
        assert one < other


def test_a_threshold_follows_step_size_data_and_link() -> None:
    devices = [replace(DEVICE, id=0), replace(DEVICE, id=1, samples=900), replace(DEVICE, id=2, up=1e3)]
    first, later = (
        [a.codec.threshold for a in plan if isinstance(a.codec, HardThreshold)]
        for plan in (assigned(devices, replace(MODEL, rate=r), threshold=0.01) for r in (0.1, 0.05))
    )
    assert later == pytest.approx([t / 2 for t in first], rel=1e-3)
    assert first[1] < first[0] < first[2]  # more data: lower; a slower link: higher
