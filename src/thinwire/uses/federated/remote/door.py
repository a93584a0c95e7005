"""The door of a host: who asks what is to be done, how fast its way is, and as which client it comes in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from thinwire.links.hub.hub import Hub
from thinwire.types import InputError, PayloadError, require
from thinwire.uses.federated.remote.pieces import Piece, Receiving
from thinwire.uses.federated.remote.seat import Hello, Seat
from thinwire.uses.federated.remote.words import PROTOCOL, Word, pack, whole
from thinwire.uses.federated.signature import Signature

PROBES, PROBE_SIZE = 4, 3900  # messages that are timed at the start, and bytes of each
HERE_ALREADY = (
    "client {} is here already; give another number, or none; if this one was that before, try again in 10 s"
)


class Door:
    """Let peers of ``hub`` in as clients that have no seat yet, or come back to theirs.

    ``known``: the clients that were here before, whose numbers nobody gets by chance. ``signature``: of the
    model, which each client's must be like.
    """

    def __init__(
        self,
        hub: Hub,
        terms: Mapping[str, Any],
        seats: Mapping[int, Seat],
        known: Callable[[], Iterable[int]],
        noted: Callable[[str], object],
        signature: Signature | None = None,
    ) -> None:
        self._signature = signature
        terms = {**terms, "signature": signature and list(signature)}
        self._hub, self._terms, self._seats, self._known, self._noted = hub, dict(terms), seats, known, noted
        self._promised: dict[bytes, int] = {}  # who was told that it is which client
        self._probes: dict[bytes, Receiving] = {}

    @property
    def waiting(self) -> set[bytes]:
        """Those who were told what is to be done, and have not said hello."""
        return set(self._promised)

    def probe(self, peer: bytes, nbytes: int, at: float) -> None:
        """Time some messages, and send as many back."""
        probe = self._probes.setdefault(peer, Receiving(0, PROBES * PROBE_SIZE))
        data = memoryview(bytes(nbytes))
        if probe.take(Piece(0, probe.have, probe.total, data), at):
            for _ in range(PROBES):
                self._hub.send(peer, bytes([Word.PROBE]) + bytes(PROBE_SIZE - 1))

    def answer(self, peer: bytes, values: dict[str, Any]) -> None:
        """Say what is to be done here, and which client this is."""
        theirs = whole(values, "protocol")
        if theirs != PROTOCOL:
            older = "the client" if theirs < PROTOCOL else "the server"
            self.turn_away(peer, f"the server speaks protocol {PROTOCOL}, not {theirs}; update {older}")
            return
        taken = self._taken(peer)
        known = taken | self._seats.keys() | set(self._known())  # who is away may come back
        free = (c for c in range(len(known) + 1) if c not in known)
        client = whole(values, "client") if values.get("client") is not None else next(free)
        if client in taken:
            self.turn_away(peer, HERE_ALREADY.format(client))
            return
        self._promised[peer] = client
        self._hub.send(peer, pack(Word.TERMS, client=client, **self._terms))

    def admit(self, peer: bytes, values: dict[str, Any]) -> Hello:
        """Return what a client says of itself. Errors: ``PayloadError`` where it may not take part."""
        probe = self._probes.pop(peer, None)
        seat = self._seats.get(whole(values, "client"))
        up = seat.device.up if seat is not None else math.inf
        try:
            theirs = Signature.read(values.get("signature"))
            self._signature = self._signature or theirs  # a host of a row alone: all are like the first
            if self._signature is not None:
                self._signature.check(theirs, f"the model of client {whole(values, 'client')}")
        except InputError as e:
            raise PayloadError(str(e)) from e
        hello = Hello.of(values, probe.rate or math.inf if probe is not None else up)
        require(hello.client not in self._taken(peer), PayloadError, HERE_ALREADY.format(hello.client))
        other = any(s.peer == peer and s.client != hello.client for s in self._seats.values())
        require(not other, PayloadError, f"one connection is one client, not {hello.client} too")
        self._promised.pop(peer, None)
        return hello

    def turn_away(self, peer: bytes, why: str) -> None:
        """Tell a peer that it cannot take part, and why."""
        self._hub.send(peer, pack(Word.REFUSED, text=why))
        self._noted(f"{self._hub.describe(peer)} was refused: {why}")

    def left(self, peer: bytes) -> None:
        """Forget a peer that is gone."""
        self._promised.pop(peer, None)
        self._probes.pop(peer, None)

    def _taken(self, peer: bytes) -> set[int]:
        """Return the clients that other connections are, which are still there."""
        there = set(self._hub.peers)
        promised = {c for p, c in self._promised.items() if p != peer and p in there}
        return promised | {c for c, seat in self._seats.items() if seat.there and seat.peer != peer}
