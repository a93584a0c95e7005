"""A judge names members that lie within three rounds and never who is honest, in the time that it has."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from crowds import Crowd, Lie, block_losses
from each import each

from thinwire.rounds.judging import Candidate
from thinwire.types import InputError
from thinwire.uses.training.swarm.gauntlet import Gauntlet

EQUAL, UNEQUAL = [10] * 6, [1, 2, 10, 10, 10, 50]
LIES: dict[str, Lie] = {
    "turned": lambda crowd, c, row: -row,
    "1000 times": lambda crowd, c, row: row * 1000,
    "copied": lambda crowd, c, row: crowd.honest[0] * 1.5,
    "copied with noise": lambda crowd, c, row: crowd.honest[0] + crowd.noise(row, 0.3),
    "noise": lambda crowd, c, row: crowd.noise(row),
    "zeros": lambda crowd, c, row: row * 0,
    "sent again": lambda crowd, c, row: crowd.before[c][-1] if c in crowd.before else row,
}


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def judged(
    crowd: Crowd, block: float = 0.0, clock: Clock | None = None, **options: Any
) -> tuple[Gauntlet, Clock, list[int]]:
    """Return a judge of ``crowd``, its clock, and how many blocks each of its measurements had."""
    clock, asked = clock or Clock(), list[int]()

    def losses(row: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        clock.now += block * len(blocks)
        asked.append(len(blocks))
        return block_losses(row, blocks)

    return Gauntlet(losses, crowd.assigned, crowd.heldout, 5, clock=clock, **options), clock, asked


def play(crowd: Crowd, judge: Gauntlet, clock: Clock, rounds: int) -> None:
    for _ in range(rounds):
        clock.now += 60
        crowd.round(judge)


@each("steps, first", [(EQUAL, 0), (UNEQUAL, 2), ([10, 10], 0)])
def test_who_lies_is_named_within_three_rounds(steps: list[int], first: int) -> None:
    """From the start and later, among members of equal steps and of 1 to 50, and of two; with the reason."""
    for seed, (kind, lie) in enumerate(LIES.items()):
        crowd = Crowd(seed, steps)
        judge, clock, _ = judged(crowd, name="peer {}".format)
        play(crowd, judge, clock, first)
        assert not judge.named, kind
        liar = min(len(steps) - 1, 4)
        crowd.lies[liar] = lie
        play(crowd, judge, clock, 3)
        assert list(judge.named) == [liar], kind
        assert judge.named[liar].count(f"peer {liar}") >= 1
        last = crowd.round(judge)
        assert last[liar].trust == 0 and last[0].trust == 1


@each(
    "steps, own",
    [
        (EQUAL, 0),
        (UNEQUAL, 0),
        (UNEQUAL, 40),
        ([10, 10, 1], 40),
        ([1, 50], 0),
        ([10, 3], 0),
        ([5], 0),
        ([5], 8),
    ],
)
def test_who_is_honest_is_never_named(steps: list[int], own: int) -> None:
    """In many rounds, until gains are small, and with few blocks of one's own, which it knows by heart."""
    crowd = Crowd(11, steps, own=own)
    judge, clock, _ = judged(crowd)
    before = crowd.loss()
    play(crowd, judge, clock, 12)
    assert judge.named == {}
    assert crowd.loss() < before or own


def test_copies_of_unknown_work_count_half_and_name_nobody() -> None:
    crowd = Crowd(2, EQUAL, {3: LIES["copied"]}, own=100)
    judge, clock, _ = judged(crowd)
    play(crowd, judge, clock, 2)
    found = crowd.round(judge)
    assert judge.named == {} and found[0].trust == found[3].trust == 0.5 and found[1].trust == 1
    assert "member 0 and member 3 are alike" in found[3].reason


def test_what_is_too_long_counts_less() -> None:
    crowd = Crowd(3, EQUAL, {2: lambda crowd, c, row: row * 3})
    judge, *_ = judged(crowd)
    found = crowd.round(judge)
    assert 0.6 < found[2].trust < 0.72 and "times as long" in found[2].reason and not judge.named


def test_who_helps_again_is_trusted_again() -> None:
    crowd = Crowd(4, EQUAL, {1: LIES["turned"]})
    judge, clock, _ = judged(crowd)
    play(crowd, judge, clock, 3)
    assert list(judge.named) == [1]
    del crowd.lies[1]
    trust = []
    for _ in range(7):
        clock.now += 60
        trust.append(crowd.round(judge)[1].trust)
    assert trust[:4] == [0.0] * 4 and trust[-1] == 1.0 and not judge.named


def test_a_judge_goes_on_from_its_state() -> None:
    """Word for word, through JSON, at any round."""
    ends = []
    for restarts in (False, True):
        crowd = Crowd(6, EQUAL, {5: LIES["noise"], 2: LIES["copied"]})
        judge, clock, _ = judged(crowd, block=0.001)
        for _ in range(4):
            if restarts:
                state = json.loads(json.dumps(judge.state(), allow_nan=False))
                judge = judged(crowd, block=0.001, clock=clock)[0]
                judge.load(state)
            clock.now += 60
            ends.append((restarts, crowd.round(judge)))
    assert [v for r, v in ends if r] == [v for r, v in ends if not r]


def test_losses_take_their_share_of_the_time() -> None:
    """Whatever a block costs; where that is much, all are scored in turn, and checks without losses go on."""
    for block in (0.001, 0.02, 0.2):
        crowd = Crowd(7, EQUAL, {4: LIES["turned"]})
        judge, clock, asked = judged(crowd, block=block)
        for _ in range(8):
            play(crowd, judge, clock, 1)
            assert block * sum(asked) <= 0.1 * clock.now + 4 * block, block
        assert list(judge.named) == [4], block


def test_hostile_numbers_are_refused() -> None:
    crowd = Crowd(8, EQUAL)
    judge, clock, _ = judged(crowd)
    play(crowd, judge, clock, 1)
    honest, wild = crowd.honest[0], torch.zeros_like(crowd.row)
    for value in (math.nan, math.inf, 1e24, 1e-30, -3e38):
        wild = wild.clone()
        wild[0, 5] = value
        found = judge.weigh(crowd.version, crowd.row, [Candidate(0, honest, 8), Candidate(1, wild, 8)])
        assert found[1].trust == 0 and found[1].reason, value
        crowd.version += 1
    assert judge.weigh(crowd.version, crowd.row, []) == {}
    for wrong in ({"heldout": crowd.heldout[:0]}, {"share": 0.0}, {"share": math.nan}):
        with pytest.raises(InputError):
            Gauntlet(
                **{"losses": block_losses, "assigned": crowd.assigned, "heldout": crowd.heldout, "seed": 1}
                | wrong
            )
