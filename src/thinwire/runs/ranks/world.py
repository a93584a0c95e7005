"""A rank's place among the others, and its links to them.

Ranks count through the pipeline of replica 0, then that of replica 1, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import torch.distributed as dist

from thinwire.links.mesh import Peer
from thinwire.types import LinkError

_LEFT = b"\0left"
_MOST_TEXT = 400  # characters of a sentence that somebody else wrote


@dataclass
class World:
    """This rank's place, and its connected peers by rank."""

    rank: int
    size: int
    peers: dict[int, Peer]
    replicas: int = 1
    connect: Callable[[], dict[int, Peer]] | None = None  # makes links to all others anew

    @property
    def stages(self) -> int:
        """Ranks of a replica."""
        return self.size // self.replicas

    @property
    def replica(self) -> int:
        """The replica that this rank is part of, from 0."""
        return self.rank // self.stages

    @cached_property
    def pipeline(self) -> World:
        """The ranks of this rank's replica, numbered from 0: those that activations pass through."""
        first = self.replica * self.stages
        peers = {r - first: peer for r, peer in self.peers.items() if 0 <= r - first < self.stages}
        return World(self.rank - first, self.stages, peers)

    @cached_property
    def partners(self) -> dict[int, Peer]:
        """The peers that hold the same part of the model, by replica."""
        return {
            r // self.stages: peer for r, peer in self.peers.items() if (r - self.rank) % self.stages == 0
        }

    def close(self) -> None:
        """Close all links, then leave the process group."""
        for peer in self.peers.values():
            peer.close()
        dist.destroy_process_group()

    def reconnect(self) -> None:
        """Close all links, and make them anew once all other ranks do so too. Errors: of ``connect_mesh``."""
        self.abandon()
        if self.connect is None:
            raise LinkError(f"rank {self.rank} cannot meet the others again")
        fresh = self.connect()
        self.peers.clear()
        self.peers.update(fresh)

    def abandon(self, cause: BaseException | None = None) -> None:
        """Close all links without a wait: the others hear at once that this rank is leaving, and why."""
        if cause is not None:
            for peer in self.peers.values():
                peer.mailbox.send(_LEFT, str(cause)[:_MOST_TEXT].encode())
        for peer in self.peers.values():
            peer.close(0.0)


def hear_causes(peers: Mapping[int, Peer]) -> None:
    """Let who waits for a peer hear why it abandoned its world: for the sake of a third rank, perhaps."""
    for peer in peers.values():
        peer.mailbox.on(_LEFT, partial(_left, peer))


def _left(peer: Peer, tag: bytes, body: bytes) -> None:
    why = " ".join(body.decode(errors="replace").split())[:_MOST_TEXT]
    peer.mailbox.fail(LinkError(f"{peer.name} has left: {why}"))
