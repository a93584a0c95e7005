"""What ranks tell each other beside tensors, over connections that were made anew."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from meshes import meshes

from thinwire.links import Peer, connect_mesh
from thinwire.runs.ranks.telemetry import Telemetry
from thinwire.runs.ranks.world import World, hear_causes
from thinwire.types import LinkError

LONG = 30.0
RANKS = 3


def connections(peer: Peer) -> int:
    """Return how many TCP connections the kernel has counted for a peer, once there are two."""
    end = monotonic() + LONG
    while (now := peer.kernel.read()) is not None:
        if now.connections > 1 or monotonic() > end:
            return now.connections
        sleep(0.05)
    raise AssertionError("no TCP_INFO here")


def test_who_is_at_work_is_waited_for() -> None:
    """Beyond the deadline of a wait, which counts from the last sign, also of one that rank 0 waits for."""
    store, deadline, ranks = dist.HashStore(), 1.0, 3

    def rank(own: int) -> list[Any]:
        peers = connect_mesh(own, ranks, store)
        telemetry = Telemetry(SimpleNamespace(rank=own, size=ranks, peers=peers), deadline)  # type: ignore[arg-type]
        try:
            if own == ranks - 1:
                for _ in range(12):
                    sleep(deadline / 4)
                    telemetry.working()
            return telemetry.agree(b"x", own, "its number")
        finally:
            for peer in peers.values():
                peer.close()

    with ThreadPoolExecutor(ranks) as pool:
        assert list(pool.map(rank, range(ranks))) == [list(range(ranks))] * ranks


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's counts are Linux's")
def test_every_pair_of_ranks_goes_on_over_a_new_connection() -> None:
    store = dist.HashStore()

    def rank(own: int) -> list[Any]:
        peers = connect_mesh(own, RANKS, store)
        for peer in peers.values():
            peer.kernel.read()  # counts from here
        telemetry = Telemetry(SimpleNamespace(rank=own, size=RANKS, peers=peers), LONG)  # type: ignore[arg-type]
        before = telemetry.agree(b"x", own, "its number")
        started = monotonic()
        telemetry.redial()
        took = monotonic() - started
        for other in peers:
            telemetry.send(other, b"y", own)
        heard = [telemetry.get(other, b"y", "its number") for other in sorted(peers)]
        counted = [connections(peer) for peer in peers.values()]
        telemetry.agree(b"z", 0, "the end")
        for peer in peers.values():
            peer.close()
        return [before, took, heard, counted]

    with ThreadPoolExecutor(RANKS) as pool:
        found = list(pool.map(rank, range(RANKS)))
    for own, (before, took, heard, counted) in enumerate(found):
        assert before == [0, 1, 2]
        assert heard == [r for r in range(RANKS) if r != own]
        assert counted == [2, 2]
        assert took < LONG / 3


def test_a_rank_that_leaves_for_the_sake_of_another_says_so() -> None:
    with meshes(RANKS) as ranks:
        for peers in ranks:
            hear_causes(peers)
        World(0, RANKS, ranks[0]).abandon(LinkError("rank 2 has not answered for 6 s"))
        with pytest.raises(LinkError, match=r"rank 0 .* has left: rank 2 has not answered for 6 s"):
            ranks[1][0].get(b"x", LONG, "a word")
