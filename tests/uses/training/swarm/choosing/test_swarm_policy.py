"""A round in which nobody waits: machines and links as unequal as they come."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from thinwire.codecs import DeadZone, Entropy, Factors
from thinwire.codecs.deadzone import step_for
from thinwire.rounds.client import Client
from thinwire.rounds.client_profile import Assignment, ClientProfile, FederatedPolicy, Situation
from thinwire.rounds.local_training import LocalSGD, Samples
from thinwire.rounds.parameters import unpack_row
from thinwire.rounds.residuals import ClientResiduals
from thinwire.rounds.update_messages import VersionForm, VersionMessage
from thinwire.types import InputError
from thinwire.uses.training.swarm.choosing.swarm_policy import (
    EVEN,
    LEAST,
    MOST_STEPS,
    Together,
    deadline,
)

VALUES, MBIT = 4_470_272, 125e3
SIDES, LOOSE = 22_016, 13_824  # of gpt2-lab
POLICY = Together(steps=10, sides=SIDES, loose=LOOSE)
DENSE = Entropy(DeadZone(step_for(1.2)))
GPU, CPU = 0.05, 5.0


def member(number: int, step: float, mbit: float, delay: float = 0.02) -> ClientProfile:
    return ClientProfile(number, step, 100, mbit * MBIT, mbit * MBIT, delay)


def nbytes(policy: Together, codec: object, values: int = VALUES) -> float:
    return next(way.nbytes for way in policy._ways(values) if way.codec == codec)


def finish(device: ClientProfile, found: Assignment) -> float:
    return device.seconds(found.steps, nbytes(POLICY, found.codec), POLICY._down(VALUES))


def swarm(seed: int) -> list[ClientProfile]:
    draw = random.Random(seed)
    many = draw.choice((1, 2, 5, 12))
    return [
        member(i, GPU * 100 ** draw.random(), 20 * 50 ** draw.random(), draw.choice((0.001, 0.02, 0.1)))
        for i in range(many)
    ]


def test_members_that_are_not_bound_are_done_within_a_quarter_of_each_other() -> None:
    """Hundreds of swarms from GPUs on 1 Gbit/s to CPUs on 20 Mbit/s; none is left out, and none is late."""
    met = 0
    for seed in range(300):
        devices = swarm(seed)
        found = POLICY.assign(devices, Situation(VALUES))
        assert found == Together(10, SIDES, LOOSE).assign(devices, Situation(VALUES))
        turns = [finish(d, a) for d, a in zip(devices, found, strict=True)]
        free = [t for t, a in zip(turns, found, strict=True) if a.steps < MOST_STEPS]
        assert not free or max(free) <= EVEN * min(free)
        assert not any("too slow" in a.why for a in found)
        assert all(1 <= a.steps <= MOST_STEPS for a in found)
        met += len(free) > 1
        longest = deadline(devices, found, VALUES, POLICY)
        assert max(turns) < longest and longest >= LEAST
        assert longest <= max(LEAST, 1.5 * max(turns) + 8 * 0.1 + 1e-6)
    assert met > 100


@pytest.mark.parametrize("step", [GPU, 0.5, CPU])
@pytest.mark.parametrize("values", [VALUES, 40 * VALUES])
def test_a_slower_link_never_gets_more_bytes(step: float, values: int) -> None:
    """And the quick end of the range sends what costs training least, the slow one factors."""
    policy = replace(POLICY, sides=SIDES * 6, loose=LOOSE * 6) if values > VALUES else POLICY
    rates = (1, 3, 10, 20, 40, 100, 300, 1000)
    devices = [member(i, step, mbit) for i, mbit in enumerate(rates)]
    devices += [member(len(rates) + i, 0.5, 100) for i in range(9)]
    found = policy.assign(devices, Situation(values))[: len(rates)]
    sent = [nbytes(policy, a.codec, values) for a in found]
    assert sent == sorted(sent) and found[-1].codec == DENSE
    if values > VALUES:
        assert isinstance(found[0].codec, Entropy) and isinstance(found[0].codec.inner, Factors)


def test_a_member_that_would_hold_up_all_others_is_not_waited_for() -> None:
    """One CPU of 5 s among GPUs is waited for; a machine that takes 100 times that is not."""
    gpus = [member(i, GPU, 1000) for i in range(7)]
    devices = [*gpus, member(7, CPU, 20)]
    mixed = POLICY.assign(devices, Situation(VALUES))
    assert [a.steps for a in mixed] == [MOST_STEPS] * 7 + [1]
    with_slow = [*devices, member(8, 100 * CPU, 1)]
    found = POLICY.assign(with_slow, Situation(VALUES))
    assert list(found[:8]) == list(mixed) and found[8].steps == 1 and "too slow" in found[8].why
    limit = deadline(devices, mixed, VALUES, POLICY)
    assert deadline(with_slow, found, VALUES, POLICY) == limit < 15


def test_what_was_not_measured_gets_a_bounded_guess() -> None:
    new = [ClientProfile(i, 0.3, 100) for i in range(3)]
    found = POLICY.assign(new, Situation(VALUES))
    assert found == [found[0]] * 3 and 1 <= found[0].steps <= MOST_STEPS
    assert LEAST <= deadline(new, found, VALUES, POLICY) < 10
    assert POLICY.assign([], Situation(VALUES)) == [] and deadline([], [], VALUES, POLICY) == LEAST
    assert isinstance(POLICY, FederatedPolicy)
    plain = Together().assign([member(0, GPU, 1)], Situation(VALUES))
    assert "Factors" not in repr(plain[0].codec)
    for wrong in ({"steps": 0}, {"steps": 51}, {"sides": -1}):
        with pytest.raises(InputError):
            Together(**wrong)  # type: ignore[arg-type]


def test_a_client_sends_factors_of_its_own_matrices() -> None:
    """A row has no matrix of its own: what was moved along one direction crosses nearly whole at rank 1."""
    net = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 1))
    data = Samples(torch.ones(8, 64), torch.zeros(8, 1), batch=0)
    local = LocalSGD()
    client = Client(0, net, data, ClientResiduals(), loss=lambda m, b: (m(b[0]) ** 2).mean(), local=local)
    start = torch.cat([p.detach().reshape(1, -1) for p in net.parameters()], 1)
    version = VersionMessage(0, 1, 0, 0, VersionForm.FULL, (), 1, 1e-3, Entropy(Factors(1, step=0.1)))
    packet = client.train(version, start).packet
    moved = start - torch.cat([p.detach().reshape(1, -1) for p in net.parameters()], 1)
    found = unpack_row(packet, start.numel(), 0)
    assert len(packet) < 1500 and (found - moved).norm() < 0.1 * moved.norm()


def test_steps_that_are_done_together_are_divided_and_a_branch_is_as_fast_as_its_members() -> None:
    members = [member(i, step, mbit) for i, (step, mbit) in enumerate([(0.1, 1000), (0.5, 100), (2.0, 20)])]
    for together in (3, 20, 77, 150):
        found = replace(POLICY, together=together).assign(members, Situation(values=VALUES))
        assert sum(a.steps for a in found) == together and min(a.steps for a in found) >= 1
    assert (
        sum(a.steps for a in replace(POLICY, together=400).assign(members, Situation(values=VALUES))) == 150
    )
    pace = POLICY.pace(members, VALUES)
    branch = replace(member(9, 1.0, 100), **pace._asdict())
    found = replace(POLICY, together=2 * pace.least).assign(members, Situation(values=VALUES))
    longest = max(m.seconds(a.steps, nbytes(POLICY, a.codec)) for m, a in zip(members, found, strict=True))
    assert pace.members == 3 and longest == pytest.approx(branch.seconds(2 * pace.least, 0), rel=0.3)
    greedy = replace(branch, members=2, least=1 << 20)
    assert POLICY.assign([greedy, *members], Situation(values=VALUES))[0].steps <= 2 * MOST_STEPS
