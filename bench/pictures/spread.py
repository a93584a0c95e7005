"""Pictures whose experts are spread over ranks in the threads of one process: for bytes and quality alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire
from thinwire.links import Peer, connect_mesh
from thinwire.uses.pictures.run.sheets import sample_each

Mesh = dict[int, Peer]
LONGEST = 3600.0  # seconds that a rank of a crowded processor may take for all


class Spread(NamedTuple):
    """Pictures [N, 32, 32] in 0..1, and the bytes that the rank of most sent for them."""

    pictures: Tensor
    nbytes: int


@contextmanager
def meshes(world: int) -> Iterator[list[Mesh]]:
    """Connect so many ranks, and close all of them at the end."""
    store = dist.HashStore()
    with ThreadPoolExecutor(world) as pool:
        ranks = list(pool.map(lambda rank: connect_mesh(rank, world, store), range(world)))
        try:
            yield ranks
        finally:
            list(pool.map(lambda peer: peer.close(), [p for rank in ranks for p in rank.values()]))


def spread_pictures(
    model: nn.Module,
    ranks: Sequence[Mesh],
    recipe: str,
    classes: Sequence[int],
    first: int,
    steps: int,
    at_once: int,
) -> Spread:
    """Return pictures of these classes from the noise of seeds from ``first`` on, ``at_once`` in a batch.

    Each rank makes its share of every batch; the number of pictures is a multiple of ``at_once``.
    """
    batches = range(0, len(classes), at_once)

    def work(rank: int, peers: Mesh) -> tuple[list[Tensor], int]:
        own = copy.deepcopy(model)
        with torch.no_grad(), thinwire.spread_experts(own, peers, recipe, deadline=LONGEST) as found:
            shares = [range(b + rank, b + at_once, len(ranks)) for b in batches]
            made = [sample_each(own, [classes[k] for k in s], [first + k for k in s], steps) for s in shares]
            return made, found.tally.nbytes

    with ThreadPoolExecutor(len(ranks)) as pool:
        found = list(pool.map(work, range(len(ranks)), ranks))
    whole = [torch.stack([made[i] for made, _ in found], 1).flatten(0, 1) for i in range(len(batches))]
    return Spread(torch.cat(whole), max(nbytes for _, nbytes in found))
