"""What the ranks of a run tell each other beside tensors: reports, gradient norms, losses."""

from __future__ import annotations

import json
from typing import Any

from thinwire.links.mailbox import FILLER
from thinwire.runs.ranks.world import World
from thinwire.types import PayloadError


class Telemetry:
    """Exchange small messages with every other rank, each with a deadline."""

    def __init__(self, world: World, deadline: float) -> None:
        self.world, self._deadline = world, deadline

    def send(self, rank: int, tag: bytes, value: Any) -> None:
        self.world.peers[rank].mailbox.send(tag, json.dumps(value).encode(), "control")

    def working(self) -> None:
        """Let those who wait for this rank know that it is at work: their deadlines begin anew."""
        for peer in self.world.peers.values():
            peer.mailbox.send(FILLER, b"")

    def get(self, rank: int, tag: bytes, what: str) -> Any:
        peers = self.world.peers
        data = peers[rank].get(tag, self._deadline, what, peers.values())
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as e:
            raise PayloadError(f"rank {rank} sent something else than {what}") from e

    def gather(self, tag: bytes, value: Any, what: str) -> list[Any] | None:
        """Send ``value`` to rank 0; there return everybody's, by rank."""
        if self.world.rank:
            self.send(0, tag, value)
            return None
        return [value] + [self.get(r, tag, what) for r in range(1, self.world.size)]

    def spread(self, tag: bytes, value: Any, what: str) -> Any:
        """Send rank 0's ``value`` to everybody and return it."""
        if self.world.rank:
            return self.get(0, tag, what)
        for r in range(1, self.world.size):
            self.send(r, tag, value)
        return value

    def agree(self, tag: bytes, value: Any, what: str) -> list[Any]:
        """Return every rank's ``value``, by rank, on every rank."""
        found: list[Any] = self.spread(tag + b">", self.gather(tag + b"<", value, what), what)
        return found

    def redial(self) -> None:
        """Let TCP begin anew between all ranks: call it when the emulated link of every rank is shaped again.

        TCP remembers the shortest round trip, then of a link without delay: later ones look like queues, so
        that cubic would end its slow start at 16 segments, and bbr send next to nothing for ten seconds.
        """
        own, peers = self.world.rank, self.world.peers
        listening, dialling = [r for r in peers if r < own], [r for r in peers if r > own]
        for peer in peers.values():
            peer.redial()
        for rank in listening:
            self.send(rank, b"D<", 0)
        for rank in dialling:
            self.get(rank, b"D<", "a new connection")
            self.send(rank, b"D>", 0)
        for rank in listening:
            self.get(rank, b"D>", "an answer over a new connection")

    def squared_norm(self, own: float) -> float:
        """Return the sum of every rank's squared gradient norm.

        Rank 0, the last to finish its backward pass, has the others' by then and passes the sum on ahead of
        its next activations: nobody's compute waits for a round trip.
        """
        parts = self.gather(b"N<", own, "the gradient norm")
        return float(self.spread(b"N>", sum(parts or ()), "the gradient norm"))
