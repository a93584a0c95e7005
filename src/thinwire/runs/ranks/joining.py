"""A rank joins the others of its run: process group, and links to every other rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist

from thinwire.links.mesh import Peer, connect_mesh
from thinwire.links.security import read_token
from thinwire.links.shape import LinkShape
from thinwire.links.tcp.congestion import SYSTEM
from thinwire.runs.machine.interrupts import stopped_by_signals
from thinwire.runs.options import flag
from thinwire.runs.ranks.rendezvous import explained, meet, rank_and_world, telling
from thinwire.runs.ranks.run_config import RunConfig
from thinwire.runs.ranks.telemetry import Telemetry
from thinwire.runs.ranks.world import World, hear_causes
from thinwire.types import InputError, ThinwireError, require


@contextmanager
def joined(config: RunConfig, layout: str, options: str, replicas: int = 1) -> Iterator[World]:
    """Be one of the ranks in the block: in the process group of the environment, connected to every other.

    ``layout``, ``options``: what needs so many ranks, and what changes that, should there be another number.
    An error in the block closes the links at once, a signal that asks to end is one.
    """
    world = _join(config, layout, options, replicas)
    # From here on, since there is nobody to tell before; and what torch does to meet hears no handler.
    with stopped_by_signals():
        try:
            yield world
        except BaseException as e:  # unless told, the others would wait until the links' deadline
            world.abandon(e if isinstance(e, ThinwireError) else None)
            raise
        world.close()


def _join(config: RunConfig, layout: str, options: str, replicas: int) -> World:
    rank, size = rank_and_world()
    wrong = (
        f"{layout} need {config.ranks} processes, WORLD_SIZE is {size}; change {options} or, under torchrun, "
    )
    require(size == config.ranks, InputError, f"{wrong}--nnodes and --nproc-per-node")
    with telling(config, rank, size), explained(config, rank):
        store = meet(config, rank, size, replicas)
        connect = partial(_connect, config, rank, size, store)
        return World(rank, size, connect(), replicas, connect)


def check_options(
    telemetry: Telemetry,
    config: RunConfig,
    resolved: Mapping[str, Any] | None = None,
    contents: Mapping[str, Any] | None = None,
) -> None:
    """Raise ``InputError`` unless all ranks were started with the same options and hold the same contents.

    ``resolved``: options whose value follows from others; ``contents``: what may be in different places.
    """
    known = dict(contents or {})
    mine = {name: getattr(config, name) for name in config.names(alike=True)} | dict(resolved or {})
    mine |= known  # last: another --prompt-field makes other contents
    ranks = telemetry.agree(b"K", mine, "its options")
    for rank, other in enumerate(ranks):
        for name, value in ranks[0].items():
            if other.get(name) != value:
                what = f"{value!r} on rank 0 but {other.get(name)!r} on rank {rank}"
                if name in known:
                    what = f"not the same {name} on rank 0 and rank {rank}"
                raise InputError(f"{flag(name)} is {what}; start all ranks with the same")


def in_process_shape(config: RunConfig) -> LinkShape:
    """Return what the links themselves shape: nothing where the network below them is emulated."""
    return LinkShape() if config.emulate else LinkShape.parse(config.link)


def _connect(config: RunConfig, rank: int, size: int, store: dist.Store) -> dict[int, Peer]:
    peers = connect_mesh(
        rank,
        size,
        store,
        host=config.host,
        token=read_token(config.token_file),
        shape=in_process_shape(config),
        deadline=silence(config.deadline),
        connect_timeout=config.deadline,
        advertise=config.advertise,
        port=config.port,
        seed=config.seed,
        relay=config.relay,
        control=SYSTEM if config.emulate else config.congestion,
    )
    hear_causes(peers)
    return peers


def silence(deadline: float) -> float:
    """Return the seconds of silence after which a link counts as lost.

    Less than the deadline of a wait, which a slow but living peer may need.

    >>> silence(60.0), silence(10.0), silence(180.0)
    (20.0, 10.0, 20.0)
    """
    return min(20.0, deadline)
