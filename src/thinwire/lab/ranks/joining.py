"""A rank joins the others of its run: process group, and links to every other rank."""

from __future__ import annotations

import torch.distributed as dist

from thinwire.lab.ranks.config import RunConfig
from thinwire.lab.ranks.rendezvous import explained, meet, place, telling
from thinwire.lab.ranks.world import World
from thinwire.links.mesh import Peer, connect_mesh
from thinwire.links.security import read_token
from thinwire.links.shape import LinkShape
from thinwire.links.tcp.congestion import SYSTEM
from thinwire.types import InputError, require


def join(config: RunConfig, layout: str, replicas: int = 1) -> World:
    """Join the process group that the environment describes, and connect to every other rank.

    ``layout``: which options say how many ranks there are, for the sentence where they are another number.
    """
    rank, size = place()
    wrong = f"{layout}, WORLD_SIZE is {size}; change that or, under torchrun, --nnodes and --nproc-per-node"
    require(size == config.ranks, InputError, wrong)
    with telling(config, rank, size), explained(config, rank):
        store = meet(config, rank, size, replicas)
        return World(rank, size, _connect(config, rank, size, store), replicas)


def _connect(config: RunConfig, rank: int, size: int, store: dist.Store) -> dict[int, Peer]:
    return connect_mesh(
        rank,
        size,
        store,
        host=config.host,
        token=read_token(config.token_file),
        shape=LinkShape() if config.emulate else LinkShape.parse(config.link),
        deadline=silence(config.deadline),
        connect_timeout=config.deadline,
        advertise=config.advertise,
        port=config.port,
        seed=config.seed,
        relay=config.relay,
        control=SYSTEM if config.emulate else config.congestion,
    )


def silence(deadline: float) -> float:
    """Return the seconds of silence after which a link counts as lost.

    Less than the deadline of a wait, which a slow but living peer may need.

    >>> silence(60.0), silence(10.0), silence(180.0)
    (20.0, 10.0, 20.0)
    """
    return min(20.0, deadline)
