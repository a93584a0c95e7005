"""Meshes of ranks in the threads of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from thinwire.links import Peer, connect_mesh

T = TypeVar("T")
Mesh = dict[int, Peer]


@contextmanager
def meshes(world: int, **options: Any) -> Iterator[list[Mesh]]:
    """Connect ``world`` ranks, and close all of them at the end."""
    store = dist.HashStore()
    ranks = together([lambda r=r: connect_mesh(r, world, store, **options) for r in range(world)])
    try:
        yield ranks
    finally:
        together([peer.close for rank in ranks for peer in rank.values()])


def together(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Call all at once, each on a thread of its own; return what they return."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [made.result(60) for made in [pool.submit(call) for call in calls]]
