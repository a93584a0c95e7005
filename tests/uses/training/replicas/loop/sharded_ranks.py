"""A process of two sites of two: FSDP2, tensor parallel or DDP inside a site, local steps between them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Task:
    """What is learnt.

    A mean of parameters rounds otherwise than the step along a mean of gradients, so a real task ends near
    one site's result. In the ``whole`` one all numbers are multiples of a power of two of at most 24 bits,
    over its two steps: nothing is rounded, and the bits are the same.
    """

    whole: bool = False

    @property
    def steps(self) -> int:
        return 2 if self.whole else 12

    def loss_of(self, model: nn.Module, rank: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * rank + step)
        if self.whole:
            x = torch.randint(-1, 2, (16, 8), generator=generator).float()
            return model(x).mul(x.flip(1)).sum() / 16  # type: ignore[no-any-return]
        x = torch.randn(16, 8, generator=generator)
        return (model(x) - x.flip(1)).square().mean()  # type: ignore[no-any-return]

    def network(self) -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 34), nn.ReLU(), nn.Linear(34, 8))
        if self.whole:
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_((p * 8).round() / 8)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), *((0.25, 0.5) if self.whole else (0.1, 0.9)))

    def alone(self) -> dict[str, Tensor]:
        """Train as one site that has all of the data."""
        model = self.network()
        optimizer = self.optimizer(model)
        for step in range(self.steps):
            optimizer.zero_grad()
            (sum(self.loss_of(model, rank, step) for rank in range(4)) / 4).backward()  # type: ignore[union-attr]
            optimizer.step()
        return {name: p.detach() for name, p in model.named_parameters()}


def sharded(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def divided(model: nn.Sequential) -> nn.Module:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


def train(
    task: Task,
    kind: str,
    wrap: Callable[[nn.Sequential], nn.Module],
    recipe: str,
    data: int,
    **options: Any,
) -> dict[str, Tensor]:
    model = wrap(task.network())
    optimizer = task.optimizer(model)
    leads = PLACE == 0 or "site" not in options
    peers = thinwire.connect_mesh(SITE, 2, dist.PrefixStore(f"{kind}{PLACE}", STORE)) if leads else None
    with local_steps(model, optimizer, recipe, peers=peers, deadline=20.0, **options) as training:
        for step in range(task.steps):
            optimizer.zero_grad()
            task.loss_of(model, data, step).backward()
            optimizer.step()
        training.drain()
    for peer in (peers or {}).values():
        peer.close(1.0)
    values = {name: p.detach() for name, p in model.named_parameters()}
    return {n: x.full_tensor() if isinstance(x, DTensor) else x.clone() for n, x in values.items()}


def check(kind: str, found: dict[str, Tensor], expected: dict[str, Tensor] | None, task: Task) -> None:
    """Say whether all processes have the same bits, and those that were expected."""
    flat = torch.cat([x.reshape(-1) for x in found.values()])
    STORE.set(f"{kind}/{RANK}", flat.numpy().tobytes())
    same = {STORE.get(f"{kind}/{rank}") for rank in range(4)} == {flat.numpy().tobytes()}
    off = {"rtol": 0.0, "atol": 0.0} if task.whole else {"rtol": 1e-4, "atol": 1e-6}
    near = expected is None or all(
        torch.allclose(x, y, **off) for x, y in zip(found.values(), expected.values(), strict=True)
    )
    print(kind, "same" if same else "APART", "near" if near else "FAR", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.PrefixStore(f"site{SITE}", STORE), rank=PLACE, world_size=2)
    exact, inside = "exchange=Differences(every=1)", {"site": dist.group.WORLD}
    for task, name in ((Task(), ""), (Task(whole=True), " whole")):
        fsdp, ddp = f"fsdp{name}", f"ddp{name}"
        check(fsdp, train(task, fsdp, sharded, exact, RANK), task.alone(), task)
        check(ddp, train(task, ddp, DistributedDataParallel, exact, RANK, **inside), task.alone(), task)
    real = Task()
    kind = "fsdp thinwire"
    check(kind, train(real, kind, sharded, "thinwire:every=3", RANK), None, real)
    kind = "tensor parallel"
    check(kind, train(real, kind, divided, "auto", SITE), None, real)
    kind = "ddp auto"
    check(kind, train(real, kind, DistributedDataParallel, "auto", RANK, **inside), None, real)
    dist.destroy_process_group()
