"""A process of two sites of two: FSDP2, tensor parallel or DDP inside a site, local steps between them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.uses.training.replicas.loop.script import local_steps

RANK, STORE = int(sys.argv[1]), dist.FileStore(sys.argv[2], 4)
SITE, PLACE = divmod(RANK, 2)
STEPS = 12


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * rank + step))


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x = batch(rank, step)
    found: Tensor = (model(x) - x.flip(1)).square().mean()
    return found


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 34), nn.ReLU(), nn.Linear(34, 8))


def sharded(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def divided(model: nn.Sequential) -> nn.Module:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


def train(
    kind: str, wrap: Callable[[nn.Sequential], nn.Module], recipe: str, data: int, **options: Any
) -> dict[str, Tensor]:
    model = wrap(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    leads = PLACE == 0 or "site" not in options
    peers = thinwire.connect_mesh(SITE, 2, dist.PrefixStore(f"{kind}{PLACE}", STORE)) if leads else None
    with local_steps(model, optimizer, recipe, peers=peers, deadline=20.0, **options) as training:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, data, step).backward()
            optimizer.step()
        training.drain()
    for peer in (peers or {}).values():
        peer.close(1.0)
    values = {name: p.detach() for name, p in model.named_parameters()}
    return {n: x.full_tensor() if isinstance(x, DTensor) else x.clone() for n, x in values.items()}


def alone() -> dict[str, Tensor]:
    """Train as one site that has all of the data."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(loss_of(model, rank, step) for rank in range(4)) / 4).backward()  # type: ignore[union-attr]
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def check(kind: str, found: dict[str, Tensor], expected: dict[str, Tensor] | None) -> None:
    """Say whether all processes have the same bits, and those that were expected."""
    flat = torch.cat([x.reshape(-1) for x in found.values()])
    STORE.set(f"{kind}/{RANK}", flat.numpy().tobytes())
    same = {STORE.get(f"{kind}/{rank}") for rank in range(4)} == {flat.numpy().tobytes()}
    near = expected is None or all(
        torch.allclose(x, y, rtol=1e-4, atol=1e-6)
        for x, y in zip(found.values(), expected.values(), strict=True)
    )
    print(kind, "same" if same else "APART", "near" if near else "FAR", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.PrefixStore(f"site{SITE}", STORE), rank=PLACE, world_size=2)
    exact = "exchange=Differences(every=1)"
    check("fsdp", train("fsdp", sharded, exact, RANK), alone())
    check("fsdp thinwire", train("fsdp thinwire", sharded, "thinwire:every=3", RANK), None)
    check("tensor parallel", train("tensor parallel", divided, "auto", SITE), None)
    inside = {"site": dist.group.WORLD}
    check("ddp", train("ddp", DistributedDataParallel, exact, RANK, **inside), alone())
    check("ddp auto", train("ddp auto", DistributedDataParallel, "auto", RANK, **inside), None)
    dist.destroy_process_group()
