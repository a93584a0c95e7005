"""A site whose steps take a while: ``paced_site.py ADDRESS RANK DEADLINE [PORT ADVERTISED] [GROUP PLACE]``.

It says each step, and at the end a digest of its weights, or what ended it. GROUP: a file by which the two
processes of a site meet, which step alike.
"""

from __future__ import annotations

import hashlib
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import thinwire
from thinwire.types import ThinwireError

STEPS, PACE = 60, 0.03  # seconds


def train(address: str, rank: int, deadline: float, route: list[str], place: int | None) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    own = {"port": int(route[0]), "advertise": route[1]} if route else {}
    site = None if place is None else dist.group.WORLD
    peers = None if place else thinwire.meet(address, rank, 2, patience=60.0, deadline=deadline, **own)
    options = {"peers": peers, "site": site, "deadline": deadline}
    with thinwire.local_steps(model, optimizer, "thinwire:every=4", **options) as training:
        for step in range(STEPS):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * rank + step))
            optimizer.zero_grad()
            (model(x) - x.flip(1)).square().mean().backward()
            optimizer.step()
            print("step", step, flush=True)
            time.sleep(PACE)
        training.drain()
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


if __name__ == "__main__":
    address, rank, deadline, *more = sys.argv[1:]
    torch.set_num_threads(1)
    place = None
    if len(more) == 2 and not more[0].isdigit():
        place = int(more[1])
        dist.init_process_group("gloo", store=dist.FileStore(more[0], 2), rank=place, world_size=2)
    route = more if place is None else []
    try:
        print("weights", train(address, int(rank), float(deadline), route, place), flush=True)
    except ThinwireError as e:
        print(f"ended: {e}", flush=True)
