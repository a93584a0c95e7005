"""A rank's place among the others, and its links to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from thinwire.links.mesh import Peer


@dataclass
class World:
    """This rank's place, and its connected peers by rank."""

    rank: int
    size: int
    peers: dict[int, Peer]

    def close(self) -> None:
        """Close all links, then leave the process group."""
        for peer in self.peers.values():
            peer.close()
        dist.destroy_process_group()

    def abandon(self) -> None:
        """Close all links without a wait: the others hear at once that this rank is leaving."""
        for peer in self.peers.values():
            peer.close(0.0)
