"""Sharded trainers over gloo: each rank publishes its own shards, and followers hold what all make up."""

from __future__ import annotations

from typing import Any

import torch
from fused_model import FusedModel, checkpoint
from toy import in_processes, joined
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from waiting import HOST, until

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


def module(rank: int, world: int) -> int:
    """Train a module, and follow it by ``apply_to``; return how many versions were compared."""
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = Tied()
    fully_shard(model.mix, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    compared, copy = 0, Tied().bfloat16()
    with ShardPublisher(model, dtype={"embed.weight": "bf16", **dict.fromkeys(CAST, "bf16")}) as publisher:
        places = addresses(publisher, world)
        follower = ShardFollower(places) if rank == 0 else None
        for step in range(1, 5):
            model(torch.tensor([0, 1, 4, step])).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            version, expected = publisher.publish(step, loss=0.5), whole(model.state_dict())
            assert version.number == step
            if follower is not None:
                follower.wait(step)
                applied = follower.apply_to(copy)
                assert applied.version.number == step and applied.version.meta == {"step": step, "loss": 0.5}
                assert same(copy, expected) and copy.head.weight is copy.embed.weight
                compared += 1
        if follower is not None:
            with follower:
                assert all(torch.equal(x, expected[n]) for n, x in follower.tensors().items())
                assert (follower.status.version, follower.status.held, follower.status.error) == (4, 4, None)
    return compared


CAST = [f"{layer}.weight" for layer in ("mix", "gate", "norm")] + ["mix.bias", "norm.bias"]
CAST += ["norm.running_mean", "norm.running_var"]


def ranks(rank: int, world: int, port: int) -> int:
    with joined(rank, world, port):
        return module(rank, world)


def test_followers_of_a_sharded_trainer_hold_its_bits() -> None:
    assert in_processes(2, ranks) == [4, 0]
