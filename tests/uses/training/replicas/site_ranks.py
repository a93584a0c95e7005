"""One of three ranks at two sites, of two ranks and of one; ``hook_ranks.py`` starts them."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire

RANK = int(sys.argv[1])
SITES = ([0, 1], [2])
WORLD = 3
# Torch 2.11 has one name for it before and after a pass.
SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    else "broadcast_buffers"
)
SITE = next(k for k, ranks in enumerate(SITES) if RANK in ranks)
LEADS = SITES[SITE][0] == RANK


def model() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 3))
    net.register_buffer("running_mean", torch.zeros(64))
    return net


def trained(ddp: DistributedDataParallel, replicated: Any, steps: int) -> Tensor:
    optimiser = torch.optim.SGD(ddp.parameters(), 0.05, momentum=0.9)
    for step in range(steps):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * RANK + step))
        optimiser.zero_grad()
        if replicated is not None and step % 3 == 2:
            ddp(x).sum().backward()  # thrown away
            optimiser.zero_grad()
        nn.functional.cross_entropy(ddp(x), x[:, :3].argmax(1)).backward()
        if replicated is None or replicated.ready:
            optimiser.step()
    if replicated is not None:
        replicated.drain(optimiser.step)
        replicated.close()
    return torch.cat([p.detach().flatten() for p in ddp.parameters()])


def everywhere(weights: Tensor) -> list[Tensor]:
    found = [torch.empty_like(weights) for _ in range(WORLD)]
    dist.all_gather(found, weights)
    return found


def main(store: dist.Store) -> None:
    """Go through all checks in a default group of three ranks."""
    groups = [dist.new_group(ranks) for ranks in SITES]
    plain = trained(DistributedDataParallel(model()), None, 12)
    peers = None
    if LEADS:
        peers = thinwire.connect_mesh(SITE, 2, store)
    for recipe in ("exchange=Gradients()", "allreduce", "dd-ef-sgd:ratio=0.05,staleness=2"):
        ddp = DistributedDataParallel(model(), process_group=groups[SITE], **{SYNC_BUFFERS: False})
        mean = ddp.module.running_mean
        mean += RANK
        weights = trained(ddp, thinwire.replicate(ddp, recipe, peers=peers, site=True, deadline=60), 12)
        assert all(torch.equal(weights, other) for other in everywhere(weights)), recipe
        assert torch.equal(mean, torch.full((64,), 1.0)), recipe  # of three ranks, each counts alike
        if "dd" not in recipe:
            torch.testing.assert_close(weights, plain)
    ddp = DistributedDataParallel(model(), process_group=groups[SITE])
    with pytest.raises(thinwire.InputError, match="rank 0 of a site's group takes peers"):
        thinwire.replicate(ddp, "topk", peers={} if not LEADS else None, site=True)
    replicated = thinwire.replicate(ddp, "topk", peers=peers, site=True, deadline=60)
    with torch.no_grad():
        next(ddp.parameters()).fill_(float("nan"))
    with pytest.raises(thinwire.ThinwireError, match="not finite" if LEADS else "leader of this site ended"):
        trained(ddp, replicated, 1)
