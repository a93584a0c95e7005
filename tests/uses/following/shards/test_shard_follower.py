"""Followers of several parts: what is used is one version of all, whoever is ahead, gone or another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
import torch
from fused_model import FusedModel, checkpoint
from torch import Tensor
from waiting import HOST, LONG, until

from thinwire.files.checkpoint import read_checkpoint
from thinwire.state.boxes import Box
from thinwire.types import DesyncError, InputError, LinkError
from thinwire.uses.following.hosts.rollout_weights import RolloutWeights, TrainerAddress, VersionWanted
from thinwire.uses.following.push.publisher import Publisher
from thinwire.uses.following.shards.common_version import CommonVersion
from thinwire.uses.following.shards.shard_follower import ShardFollower
from thinwire.uses.following.shards.shard_mark import KEY, Mark

State = dict[str, Tensor]


class Trainer:
    """A run of a trainer of two processes, whose parts are published from here: rows are shared out."""

    def __init__(self, state: State, run: str = "a", ports: tuple[int, int] = (0, 0), parts: int = 2) -> None:
        self.run, self.numbers, self.parts = run * 16, [0, 0], parts
        self.ends = [Publisher(cut(state, i), port=ports[i]) for i in range(2)]

    def publish(self, state: State, *ranks: int) -> int:
        """Publish as some of the ranks, or all; return the number of the last version."""
        for rank in ranks or (0, 1):
            self.numbers[rank] += 1
            mark = {KEY: str(Mark(self.run, self.numbers[rank], rank + 1, self.parts))}
            number = self.ends[rank].publish(self.numbers[rank], cut(state, rank), **mark).number
        return number

    @property
    def ports(self) -> tuple[int, int]:
        return self.ends[0].port, self.ends[1].port

    @property
    def address(self) -> str:
        return ", ".join(f"{HOST}:{port}" for port in self.ports)

    def close(self) -> None:
        for end in self.ends:
            end.close()


def cut(state: State, rank: int) -> State:
    """Return the shards of a rank: rows by turns of halves; what has one row is the first one's."""
    found: State = {}
    for name, x in state.items():
        half = -(-len(x) // 2)
        start, n = rank * half, min(half, len(x) - rank * half)
        if n > 0:
            box = Box((start, *[0] * (x.dim() - 1)), (n, *x.shape[1:]), tuple(x.shape))
            found[name if n == len(x) else box.called(name)] = x[start : start + n].clone()
    return found


def moved(state: State, step: int) -> State:
    draw = torch.Generator().manual_seed(step)
    return {
        name: torch.where(torch.rand(x.shape, generator=draw) < 0.2, x + 1, x) for name, x in state.items()
    }


@contextmanager
def following(trainer: Trainer, **options: object) -> Iterator[ShardFollower]:
    try:
        with ShardFollower(trainer.address, **options) as follower:  # type: ignore[arg-type]
            yield follower
    finally:
        trainer.close()


def same(model: FusedModel, state: State) -> bool:
    expected = FusedModel(model.rank)
    expected.load_weights(state.items())
    return all(torch.equal(x, y) for x, y in zip(model.parameters(), expected.parameters(), strict=True))


def test_a_version_is_used_once_all_parts_have_it_whoever_is_ahead() -> None:
    state, model = checkpoint(), FusedModel(1)
    trainer = Trainer(state)
    with following(trainer) as follower:
        trainer.publish(state, 0)
        until(lambda: follower.common.behind() == [1])
        with pytest.raises(InputError, match="no version has come of all parts yet"):
            follower.load_into(model, model.load_weights)
        trainer.publish(state, 1)
        follower.wait(1)
        assert follower.load_into(model, model.load_weights).new and same(model, state)
        for step in range(2, 6):
            before, state = state, moved(state, step)
            first = step % 2
            trainer.publish(state, first)
            until(lambda: follower.common.behind() == [1 - first])  # noqa: B023
            applied = follower.load_into(model, model.load_weights)
            assert applied.version.number == step - 1 and not applied.new and same(model, before)
            assert follower.held.number == follower.status.version == step - 1
            trainer.publish(state, 1 - first)
            follower.wait(step)
            applied = follower.load_into(model, model.load_weights)
            assert applied.version.number == step and applied.version.meta == {"step": step}
            assert applied.new and same(model, state)


def test_a_part_that_is_gone_is_named_and_another_run_goes_on_from_where_all_are(tmp_path: Path) -> None:
    state = checkpoint()
    trainer = Trainer(state)
    with following(trainer) as follower:
        trainer.publish(state)
        follower.wait(1)
        trainer.ends[1].close()
        newer = moved(state, 2)
        trainer.publish(newer, 0)
        until(lambda: follower.common.behind() == [1])
        with pytest.raises(LinkError, match=rf"version 2 of all parts: .*:{trainer.ports[1]} is behind"):
            follower.wait(2, 0.1)
        follower.write(tmp_path / "held")
        written = read_checkpoint(tmp_path / "held")
        assert all(torch.equal(x, state[name]) for name, x in written.items()) and len(written) == len(state)
        trainer.close()
        again = Trainer(state, "b", trainer.ports)  # from an older checkpoint
        last = moved(state, 3)
        again.publish(state)
        again.publish(last)
        try:
            until(lambda: torch.equal(follower.tensors()["lm_head.weight"], last["lm_head.weight"]))
            assert follower.status.restarts == 1 and follower.held.meta == {"step": 2}
            trainer = again
            with ShardFollower(trainer.address, base=last) as newcomer:
                newcomer.wait(1)
                assert newcomer.status.nbytes < 4096 and len(newcomer.parts[0].arrivals) == 0
        finally:
            again.close()


def test_other_parts_than_there_are_addresses_are_refused_by_name() -> None:
    state = checkpoint()
    trainer = Trainer(state, parts=3)
    with following(trainer) as follower:
        trainer.publish(state)
        with pytest.raises(InputError, match="is one of 3 parts, and 2 are followed; give the addresses of"):
            follower.wait(1)
    trainer = Trainer(state)
    trainer.numbers[1] = -1
    with following(trainer) as follower:
        trainer.ends[1].publish(1, None, **{KEY: str(Mark("a" * 16, 1, 1, 2))})
        trainer.publish(state, 0)
        with pytest.raises(InputError, match=r"part 1 is at .* and at"):
            follower.wait(1)
    trainer = Trainer(state)
    with following(trainer) as follower:
        trainer.publish(state)
        trainer.publish(state, 0)  # and the other one is asked a step later
        trainer.ends[1].publish(3, cut(state, 1), **{KEY: str(Mark("a" * 16, 2, 2, 2))})
        with pytest.raises(InputError, match=r"version 2 is step . at .* and . at .*; publish on all"):
            follower.wait(2)
    with Publisher(state) as whole, ShardFollower([f"{HOST}:{whole.port}"]) as follower:
        whole.publish(1)
        with pytest.raises(InputError, match="publishes a whole state, and no shards; follow it"):
            follower.wait(1)


def test_hosts_take_the_addresses_of_all_parts() -> None:
    state, model = checkpoint(), FusedModel()
    trainer = Trainer(state)
    try:
        weights = RolloutWeights(TrainerAddress(trainer.address))
        number = trainer.publish(state)
        assert weights.update(model, model.load_weights, VersionWanted(number)).new and same(model, state)
        weights.close()
        with pytest.raises(InputError, match="held is of one part"):
            RolloutWeights(TrainerAddress(trainer.address, state="held"))
    finally:
        trainer.close()


@pytest.mark.parametrize("seed", range(8))
def test_parts_that_skip_versions_meet_wherever_they_can_and_end_together(seed: int) -> None:
    draw, last = Random(seed), 30
    met: list[int] = []
    held = [0, 0, 0]

    def note() -> None:
        assert len(set(held)) == 1
        met.append(held[0])

    common = CommonVersion(["a", "b", "c"], note)

    def follow(index: int, numbers: list[int]) -> None:
        for number in numbers:
            with common.step(index, Mark("f" * 16, number, index + 1, 3)):
                held[index] = number

    chains = [sorted({*draw.sample(range(1, last), 20), last}) for _ in range(3)]
    threads = [threading.Thread(target=follow, args=(i, chain)) for i, chain in enumerate(chains)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    shared = set(chains[0]) & set(chains[1]) & set(chains[2])
    assert set(met) == shared and met == sorted(met) and common.whole
    common.close()
    with pytest.raises(DesyncError), common.step(0, Mark("f" * 16, last + 1, 1, 3)):
        pass
