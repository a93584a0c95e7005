"""Sharded trainers over gloo: each rank publishes its own shards, and followers hold what all make up."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fused_model import FusedModel, checkpoint
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from toy import in_processes, joined
from waiting import HOST, until

from thinwire.state.boxes import parse
from thinwire.types import InputError
from thinwire.uses.following.callback import publish_callback
from thinwire.uses.following.push.publisher import Publisher
from thinwire.uses.following.shards.local_shards import shards_of
from thinwire.uses.following.shards.shard_follower import ShardFollower
from thinwire.uses.following.shards.shard_publisher import ShardPublisher

WIDTH, WORDS = 3, 5


class Tied(nn.Module):
    """An uneven embedding that is the head too, a layer of one row, and buffers that are not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.mix, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.gate = nn.Linear(WIDTH, 1, bias=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.norm(self.mix(self.embed(x)))
        found: Tensor = self.head(h * self.gate(h))
        return found


def whole(source: dict[str, Any]) -> dict[str, Tensor]:
    """Return full tensors, as followers use them; all ranks call it."""
    found = {n: x.full_tensor() if isinstance(x, tensor.DTensor) else x for n, x in source.items()}
    return {n: x.detach().bfloat16() if x.is_floating_point() else x.clone() for n, x in found.items()}


def same(model: nn.Module, expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(x, expected[name]) for name, x in model.state_dict().items())


def addresses(publisher: ShardPublisher, world: int) -> list[str]:
    ports = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(ports, torch.tensor([publisher.port]))
    return [f"{HOST}:{int(port)}" for port in ports if port]


def module(rank: int, world: int, sides: tuple[int, ...]) -> int:
    """Train a module, and follow it by ``apply_to``; return how many versions were compared."""
    mesh = init_device_mesh("cpu", sides, mesh_dim_names=("replicas", "shards")[-len(sides) :])
    torch.manual_seed(0)
    model = Tied()
    fully_shard(model.mix, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    compared, copy = 0, Tied().bfloat16()
    with ShardPublisher(model, dtype={"embed.weight": "bf16", **dict.fromkeys(CAST, "bf16")}) as publisher:
        places = addresses(publisher, world)
        parts = 2 if len(sides) > 1 else 3  # of 5 and 3 rows, the last of four ranks has none
        assert len(places) == publisher.parts == parts and bool(publisher.port) == (rank < parts)
        follower = ShardFollower(places) if rank == 0 else None
        for step in range(1, 4):
            model(torch.tensor([0, 1, 4, step])).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            version, expected = publisher.publish(step, loss=0.5), whole(model.state_dict())
            assert version.number == (step if publisher.port else 0)
            if follower is not None:
                follower.wait(step)
                applied = follower.apply_to(copy)
                assert applied.version.number == step and applied.version.meta == {"step": step, "loss": 0.5}
                assert same(copy, expected) and copy.head.weight is copy.embed.weight
                compared += 1
        if follower is not None:
            with follower:
                assert all(torch.equal(x, expected[n]) for n, x in follower.tensors().items())
                assert (follower.status.version, follower.status.held, follower.status.error) == (3, 3, None)
    return compared


CAST = [f"{layer}.weight" for layer in ("mix", "gate", "norm")] + ["mix.bias", "norm.bias"]
CAST += ["norm.running_mean", "norm.running_var"]


def parallel(rank: int, world: int) -> int:
    """Follow a model that is sharded and split over tensor-parallel ranks; return how many were compared."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("shards", "tensor"))
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["shards"])
    with ShardPublisher(model, dtype="bf16") as publisher:
        places, expected = addresses(publisher, world), whole(model.state_dict())
        publisher.publish(1)
        if rank == 0:
            with ShardFollower(places) as follower:
                follower.wait(1)
                assert len(places) == world
                assert all(torch.equal(x, expected[n]) for n, x in follower.tensors().items())
        dist.barrier()  # lest one is gone before it was followed
    apart = []
    for last in (tensor.Shard(0), tensor.Replicate()):  # all of 8 rows in pairs, or one in two of these
        turns = [_StridedShard(0, split_factor=2), last]
        x = tensor.distribute_tensor(torch.arange(8), mesh, turns, src_data_rank=None)
        try:
            ((shard, own),) = shards_of({"w": x}).items()
            box = parse(shard)[1]
            assert box is not None and own.tolist() == list(range(8))[box.slices[0]]
        except InputError as e:
            assert "w: what a process has of it" in str(e)
            apart.append(last)
    assert apart == [tensor.Replicate()]
    return 1


def loaded(rank: int, world: int) -> int:
    """Publish a mapping, split along either dimension, for an engine's model; one rank is a step ahead."""
    mesh = init_device_mesh("cpu", (world,))
    compared, model, expected = 0, FusedModel(1), FusedModel(1)

    def spread(seed: int) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for i, (name, x) in enumerate(checkpoint(seed, torch.float32).items()):
            place = tensor.Shard(i % x.dim()) if len(x) > 1 else tensor.Replicate()
            found[name] = tensor.distribute_tensor(x, mesh, [place], src_data_rank=None)
        return found

    with ShardPublisher(spread(0), dtype="bf16") as publisher:
        places = addresses(publisher, world)
        follower = ShardFollower(places) if rank == 0 else None
        for seed in range(1, 4):
            state = spread(seed)
            if rank != 1:
                publisher.publish(seed, state)  # while that one waits to be told
            if follower is not None:
                until(lambda: follower.common.behind() == [1])
                assert follower.held.number == seed - 1
            dist.barrier()
            if rank == 1:
                publisher.publish(seed, state)
            if follower is not None:
                follower.wait(seed)
                follower.load_into(model, model.load_weights)
                expected.load_weights(checkpoint(seed).items())
                assert all(
                    torch.equal(x, y) for x, y in zip(model.parameters(), expected.parameters(), strict=True)
                )
                compared += 1
        if follower is not None:
            follower.close()
    return compared


def refused(rank: int, world: int) -> int:
    """Return how many refusals there were, each with a name."""
    mesh = init_device_mesh("cpu", (world,))
    part = tensor.DTensor.from_local(torch.ones(3), mesh, [tensor.Partial()])
    half = tensor.distribute_tensor(torch.ones(4), mesh, [tensor.Shard(0)])
    for source, told in (
        ({"w": part, "x": half}, "w is a sum of which each process has a term"),
        ({"w[0:1/3]": half}, r"w\[0:1/3\] is called as shards are here"),
        ({"w": half if rank else half.to_local(), "x": half}, "the shards of w on all processes have"),
    ):
        with pytest.raises(InputError, match=told):
            ShardPublisher(source)
    for options, told in (({"dtype": {"v": "bf16"}}, "dtype names v, which"), ({"bounds": {"v": 0.1}}, "v")):
        with pytest.raises(InputError, match=told):
            ShardPublisher({"w": half}, **options)
    with ShardPublisher({"w": half}) as publisher, pytest.raises(InputError, match="meta 'shards'"):
        publisher.publish(1, shards="mine")
    with pytest.raises(InputError, match="or use a ShardPublisher"):
        Publisher({"w": half})
    return 1


def ranks(rank: int, world: int, port: int) -> list[int]:
    try:
        with joined(rank, world, port):
            found = [module(rank, world, (4,)), module(rank, world, (2, 2)), parallel(rank, world)]
            return [*found, loaded(rank, world), refused(rank, world)]
    except BaseException:  # else the other rank waits for a minute
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def test_followers_of_a_sharded_trainer_hold_its_bits() -> None:
    assert in_processes(4, ranks) == [[3, 3, 1, 3, 1], *[[0, 0, 1, 0, 1]] * 3]


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Any]:
    """Return a model that is sharded over one process."""
    dist.init_process_group("gloo", f"file://{tmp_path}/meet", rank=0, world_size=1)
    model = nn.Linear(3, 2)
    yield fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    dist.destroy_process_group()


@pytest.mark.parametrize("main", [True, False])
def test_a_trainer_s_callback_takes_a_publisher_of_shards_on_each_process(main: bool, shard: Any) -> None:
    pytest.importorskip("transformers")
    state = SimpleNamespace(global_step=5, is_world_process_zero=main, log_history=[{"loss": 0.5}])
    given = (None, Publisher({"w": torch.ones(2)}), lambda: Publisher({"w": torch.ones(2)}))
    for publisher in given:
        with pytest.raises(InputError, match=r"publish_callback\(lambda: thinwire.ShardPublisher\(model"):
            publish_callback(publisher).on_train_begin(None, state, None, model=shard)  # type: ignore[arg-type]
    given[1].close()
    with pytest.raises(InputError, match="or use a ShardPublisher"):
        Publisher(shard)
    made: list[ShardPublisher] = []

    def make() -> ShardPublisher:
        made.append(ShardPublisher(shard))
        return made[-1]

    callback: Any = publish_callback(make)
    callback.on_train_begin(None, state, None, model=shard)
    with ShardFollower(f"{HOST}:{made[0].port}") as follower:
        callback.on_step_end(None, state, None)
        assert follower.wait(1).meta == {"step": 5, "loss": 0.5}
        assert torch.equal(follower.tensors()["weight"], shard.weight.full_tensor())
        callback.on_train_end(None, state, None)
    with pytest.raises(InputError, match="closed"):
        made[0].publish(6)
    with pytest.raises(InputError, match="Linear shares no parameter with the"):
        callback.on_train_begin(
            None, state, None, model=fully_shard(nn.Linear(3, 2), mesh=shard.weight.device_mesh)
        )
