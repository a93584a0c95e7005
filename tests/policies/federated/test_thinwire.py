"""Ours: it follows links and data, keeps its budget, and every part can be switched off."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from thinwire.codecs import HardThreshold, Raw, TopK, Uniform
from thinwire.policies.federated.cost import FRAMING, position_bits, turn_seconds, upload_bytes, value_bits
from thinwire.policies.federated.device import Assignment, Device, Situation
from thinwire.policies.federated.fedluck import FedLuck
from thinwire.policies.federated.thinwire import Thinwire, at_equal_budget

MODEL = Situation(values=46_730)
DEVICE = Device(0, step_seconds=0.1, samples=100, up=5e3, down=20e3, delay=0.05)


def ratios(plan: list[Assignment]) -> list[float]:
    return [a.codec.ratio for a in plan if isinstance(a.codec, TopK)]


def assigned(devices: list[Device], situation: Situation = MODEL, **fields: object) -> list[Assignment]:
    return list(Thinwire(**fields).assign(devices, situation))  # type: ignore[arg-type]


def test_a_kept_value_costs_its_bits_and_the_entropy_of_its_position() -> None:
    assert value_bits(Raw()) == 32 and value_bits(Uniform(4)) == 4.5
    few = np.array([1e-4, 0.01, 0.3])
    entropy = -few * np.log2(few) - (1 - few) * np.log2(1 - few)
    assert position_bits(few) == pytest.approx(entropy / few) and position_bits(np.ones(1))[0] == 0
    assert upload_bytes(few, 1000, 8.0) == pytest.approx(FRAMING + 1000 * few)


def test_a_turn_solves_its_own_equation() -> None:
    draw = np.random.default_rng(0)
    for _ in range(200):
        busy, version, whole, period = np.exp(draw.uniform(-3, 3, 4))
        found = turn_seconds(np.array([busy]), version, whole, period)[0]
        assert found == pytest.approx(busy + min(whole, version * max(1, found / period)))


def test_a_turn_is_what_the_device_says_it_takes() -> None:
    device = replace(DEVICE, down=1e9)
    (plan,) = assigned([device])
    ratio = np.array(ratios([plan]))
    up = float(upload_bytes(ratio, MODEL.values, value_bits(Uniform(4)) + position_bits(ratio))[0])
    foretold = float(plan.why.split(": ")[1].split(" s")[0])
    assert foretold == pytest.approx(device.seconds(plan.steps, up, down=1.0), rel=1e-2)


@pytest.mark.parametrize("step", [0.02, 0.1, 0.4, 2.0])
def test_a_faster_uplink_never_lowers_the_ratio(step: float) -> None:
    """From 8 kbit/s on; below, an update is made of framing, and more in each pays."""
    lines = [replace(DEVICE, step_seconds=step, up=up) for up in np.geomspace(1e3, 1e9, 60)]
    found = [ratios(assigned([line]))[0] for line in lines]
    assert all(a <= b for a, b in pairwise(found)) and found[0] < found[-1] == 1.0
    together = ratios(assigned([replace(line, samples=7) for line in lines]))
    assert all(a <= b for a, b in pairwise(together))


def test_more_data_means_a_larger_ratio_at_the_same_sum() -> None:
    samples = (50, 100, 100, 200, 800)
    devices = [replace(DEVICE, id=i, samples=n) for i, n in enumerate(samples)]
    found, even = ratios(assigned(devices)), ratios(assigned(devices, data_power=0))
    assert found == sorted(found) and len(set(even)) == 1
    assert sum(found) == pytest.approx(sum(even), rel=1e-3)
    assert found[4] / found[0] == pytest.approx(16 ** (2 / 3), rel=1e-3)


def test_a_budget_holds_within_limits_too() -> None:
    draw = np.random.default_rng(1)
    for _ in range(100):
        given = draw.uniform(0.001, 1, 30)
        moved = at_equal_budget(given, np.exp(4 * draw.standard_normal(30)), 0.001, 1.0)
        assert moved.sum() == pytest.approx(given.sum()) and 0.001 <= moved.min() <= moved.max() <= 1


def test_slower_devices_take_fewer_steps_and_none_waits_for_long() -> None:
    slow = [replace(DEVICE, id=i, step_seconds=s) for i, s in enumerate((0.05, 0.1, 0.2, 0.4, 0.8))]
    steps = [a.steps for a in assigned(slow)]
    assert steps == sorted(steps, reverse=True)
    for device, plan in zip(slow, assigned(slow), strict=True):
        up = upload_bytes(np.array(ratios([plan])), MODEL.values, 12.5)[0]
        assert device.seconds(plan.steps, up) <= 2 * 1.5 + 0.1


def test_all_parts_off_is_fedluck_on_a_finer_grid() -> None:
    off = Thinwire(
        1.5, Raw(), kept_bits=32, down_ratio=0, trips=0, data_power=0, ratio_power=0.5,
        least_steps=2, least_ratio=0.01, most_periods=1e6,
    )  # fmt: skip
    devices = [replace(DEVICE, step_seconds=0.05 * i, up=2e4 * i, samples=i) for i in range(1, 9)]
    for ours, theirs in zip(off.assign(devices, MODEL), FedLuck(1.5).assign(devices, MODEL), strict=True):
        assert ratios([ours])[0] == pytest.approx(ratios([theirs])[0], rel=0.15, abs=0.01)
        assert abs(ours.steps - theirs.steps) <= 1


@pytest.mark.parametrize(
    ("part", "fewer"),
    [({"kept_bits": 32}, True), ({"down_ratio": 0}, False), ({"trips": 0}, False), ({"values": Raw()}, True)],
)
def test_a_part_of_the_cost_shows(part: dict[str, object], fewer: bool) -> None:
    """What makes a kept value dearer lowers the ratio; a turn without fixed costs has fewer steps."""
    far = replace(DEVICE, delay=0.5)
    (whole,), (without,) = assigned([far]), assigned([far], **part)
    if fewer:
        assert ratios([without])[0] < ratios([whole])[0]
    else:
        assert without.steps <= whole.steps and without != whole


def test_a_threshold_follows_step_size_data_and_link() -> None:
    devices = [replace(DEVICE, id=0), replace(DEVICE, id=1, samples=900), replace(DEVICE, id=2, up=1e3)]
    now = [replace(MODEL, rate=rate) for rate in (0.1, 0.05)]
    first, later = (
        [
            a.codec.threshold
            for a in assigned(devices, s, threshold=0.01)
            if isinstance(a.codec, HardThreshold)
        ]
        for s in now
    )
    assert later == pytest.approx([t / 2 for t in first], rel=1e-3)
    assert first[1] < first[0] < first[2]  # more data: lower; a slower link: higher
