"""A server on a port: clients come, are given versions, leave in the middle of it, and come back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from thinwire.engines.federated.conductor import Conductor, Made
from thinwire.engines.federated.intake import Receipt, Refusal
from thinwire.engines.federated.remote.pieces import Piece, Receiving, Sending
from thinwire.engines.federated.remote.seat import Hello, Seat, differs
from thinwire.engines.federated.remote.words import (
    PROTOCOL,
    Word,
    pack,
    positive,
    text,
    values_of,
    whole,
    word_of,
)
from thinwire.engines.federated.row import most_nbytes
from thinwire.engines.federated.server import Server
from thinwire.links.hub.events import Event, EventKind
from thinwire.links.hub.hub import Hub
from thinwire.policies.federated.device import Device
from thinwire.types import LinkError, PayloadError, require

SIZE = 1 << 15  # bytes of a piece to a client
PROBES, PROBE_SIZE = 4, 3900  # messages that are timed at the start, and bytes of each
TICK, LOOK = 0.1, 1.0  # seconds
ROOM = 1 << 10  # bytes of an update beside its packet


class Host:
    """Run ``server`` at ``hub``, for clients that are told ``terms``; ``made`` hears of each version.

    It begins when ``expected`` clients are there, or ``gather`` seconds have passed and one is. A round, or
    without rounds the wait for any update, lasts ``deadline`` seconds at most. A client that is cut off has
    that long to come back; its update goes on from where it was. ``noted`` hears of clients that come and go.
    Devices are as clients and probes measure them, and assignments are made again where these change.

    Errors: ``LinkError`` where nobody comes, or nobody answers; it names the clients.
    """

    def __init__(
        self,
        server: Server,
        hub: Hub,
        terms: Mapping[str, Any],
        made: Callable[[Made], bool],
        *,
        expected: int = 1,
        participate: int = 0,
        seed: int = 0,
        gather: float = 300.0,
        deadline: float = 600.0,
        noted: Callable[[str], object] = lambda text: None,
    ) -> None:
        self.server, self._hub, self._terms, self._made = server, hub, dict(terms), made
        self._expected, self._gather, self._deadline = expected, gather, deadline
        self._noted = noted
        self._seats: dict[int, Seat] = {}
        self._promised: dict[bytes, int] = {}  # who was told that it is which client
        self._probes: dict[bytes, Receiving] = {}
        self._conductor = Conductor(
            server, self._here, self._issue, self._tell, lambda: self.now, seed, participate
        )
        self._began: float | None = None
        self._due = self._look = (
            math.inf
        )  # when the round or the period ends, and to look after all, monotonic
        self.refused: list[tuple[float, Refusal]] = []
        self.local_steps = 0

    @property
    def now(self) -> float:
        """Seconds since the first client was given a version; 0 before."""
        return time.monotonic() - self._began if self._began is not None else 0.0

    def run(self) -> None:
        """Gather clients, go on until ``made`` says so, and tell all that it is over."""
        self._await_clients()
        self._began = self._heard = self._look = time.monotonic()
        self._due = self._began + (self._conductor.period or self._deadline)
        self._conductor.start(self._present())
        while self._conductor.going:
            self._turn()
        for seat in self._seats.values():
            self._hub.send(seat.peer, pack(Word.DONE, version=self.server.version))

    def _await_clients(self) -> None:
        end = time.monotonic() + self._gather
        while len(self._present()) < self._expected:
            if time.monotonic() > end:
                here = self._present()
                missing = sorted(set(range(self._expected)) - set(here))
                who = ", ".join(map(str, missing[:8]))
                many = f"of {self._expected} clients {len(here)} came within {self._gather:g} s"
                require(bool(here), LinkError, f"{many}; start them, or give fewer as --clients")
                self._noted(f"{many}, not {who}; it begins with those")
                return
            self._turn()

    # -- turns ---------------------------------------------------------------------------------------------

    def _present(self) -> list[int]:
        return sorted(c for c, seat in self._seats.items() if seat.there)

    def _here(self) -> list[int]:
        """Return who is there for a round; where nobody is, wait for somebody to come back."""
        end = time.monotonic() + self._deadline
        while not self._present() and time.monotonic() < end:
            event = self._hub.recv(TICK)
            if event is not None:
                self._handle(event)
        return self._present()

    def _issue(self, client: int) -> None:
        """Give a client the newest version."""
        seat = self._seats[client]
        seat.version = self.server.issue(client, seat.held, seat.after)
        seat.down, seat.up = Sending(seat.sequence, seat.version.pack(), SIZE), None
        self._pump(seat)

    def _tell(self, made: Made) -> bool:
        going = self._made(made)
        if not self._conductor.period:
            self._due = time.monotonic() + self._deadline
        return going

    def _pump(self, seat: Seat) -> None:
        if seat.down is not None:
            seat.down.send(lambda piece: self._hub.send(seat.peer, piece))

    def _turn(self) -> None:
        """Let one thing happen: what a client says, or the end of a time."""
        event = self._hub.recv(max(0.0, min(TICK, self._due - time.monotonic())))
        if event is not None:
            self._handle(event)
        if self._conductor.going and time.monotonic() >= self._look:
            self._look = time.monotonic() + LOOK
            self._look_after()
        if self._conductor.going and time.monotonic() >= self._due:
            self._time_is_up()

    def _look_after(self) -> None:
        """Go on with what found no room, and without those that have been gone for too long."""
        for client, seat in list(self._seats.items()):
            self._pump(seat)
            gone = time.monotonic() - seat.gone if seat.gone is not None else 0.0
            if seat.version is not None and gone > self._deadline:
                self._give_up(client)

    def _time_is_up(self) -> None:
        if self._conductor.period:
            require(time.monotonic() - self._heard <= self._deadline, LinkError, self._silent("update"))
            self._due = max(self._due + self._conductor.period, time.monotonic())
            self._conductor.end_period()
            return
        self._due = time.monotonic() + self._deadline
        require(self.server.rule.in_rounds, LinkError, self._silent("version"))
        for client in self.server.missing:
            if client in self.server.missing:  # giving one up may have ended the round
                self._give_up(client)

    def _silent(self, what: str) -> str:
        who = ", ".join(map(str, sorted(self._seats)[:8]))
        return f"no {what} came for {self._deadline:g} s, of clients {who}; see what they say"

    def _give_up(self, client: int) -> None:
        seat = self._seats[client]
        self._refuse(client, f"no update came within {self._deadline:g} s")
        seat.end_turn()
        self._conductor.lost(client, leaves=not seat.there)

    def _refuse(self, client: int, why: str) -> None:
        self.refused.append((self.now, Refusal(client, why)))
        self._noted(f"client {client}: {why}")

    # -- what clients say ----------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        if event.kind is EventKind.LOST:
            self._lost(event.peer, event.data.decode(errors="replace"))
        elif event.kind is EventKind.DATA:
            try:
                self._hear(event.peer, event.data)
            except PayloadError as e:
                seat = self._seat_of(event.peer)
                if seat is not None:
                    self._refuse(seat.client, str(e))
                else:
                    self._noted(f"{self._hub.describe(event.peer)} said {e}")

    def _hear(self, peer: bytes, data: bytes) -> None:
        word = word_of(data)
        if word is Word.PROBE:
            self._probe(peer, len(data))
        elif word is Word.ASK:
            self._answer(peer, values_of(data))
        elif word is Word.HELLO:
            self._welcome(peer, values_of(data))
        else:
            seat = self._seat_of(peer)
            if seat is not None:  # what another connection said is void
                self._hear_client(seat, word, data)

    def _hear_client(self, seat: Seat, word: Word, data: bytes) -> None:
        if word is Word.PIECE:
            self._take(seat, Piece.unpack(data))
        elif word is Word.HAVE:
            values = values_of(data)
            if seat.down is not None and whole(values, "number") == seat.down.number:
                seat.down.heard(whole(values, "have"))
                self._pump(seat)
        elif word is Word.SPEED:
            seconds = positive(values_of(data), "step_seconds")
            self._note_speed(seat, replace(seat.device, step_seconds=seconds))
        elif word is Word.FAILED:
            self._failed(seat, text(values_of(data), "text"))

    def _probe(self, peer: bytes, nbytes: int) -> None:
        """Time some messages, and send as many back."""
        probe = self._probes.setdefault(peer, Receiving(0, PROBES * PROBE_SIZE))
        data = memoryview(bytes(nbytes))
        if probe.take(Piece(0, probe.have, probe.total, data), time.monotonic()):
            for _ in range(PROBES):
                self._hub.send(peer, bytes([Word.PROBE]) + bytes(PROBE_SIZE - 1))

    def _answer(self, peer: bytes, values: dict[str, Any]) -> None:
        """Say what is to be done here, and which client this is."""
        theirs = whole(values, "protocol")
        if theirs != PROTOCOL:
            older = "the client" if theirs < PROTOCOL else "the server"
            self._turn_away(peer, f"the server speaks protocol {PROTOCOL}, not {theirs}; update {older}")
            return
        taken = self._taken(peer)
        free = (c for c in range(len(taken) + 1) if c not in taken)
        client = whole(values, "client") if values.get("client") is not None else next(free)
        if client in taken:
            self._turn_away(peer, f"client {client} is here already; give another number, or none")
            return
        self._promised[peer] = client
        self._hub.send(peer, pack(Word.TERMS, client=client, **self._terms))

    def _taken(self, peer: bytes) -> set[int]:
        """Return the clients that other connections are, which are still there."""
        there = set(self._hub.peers)
        promised = {c for p, c in self._promised.items() if p != peer and p in there}
        return promised | {c for c, seat in self._seats.items() if seat.there and seat.peer != peer}

    def _turn_away(self, peer: bytes, why: str) -> None:
        self._hub.send(peer, pack(Word.REFUSED, text=why))
        self._noted(f"{self._hub.describe(peer)} was refused: {why}")

    def _welcome(self, peer: bytes, values: dict[str, Any]) -> None:
        """Seat a client, and go on with what was under way."""
        probe = self._probes.pop(peer, None)
        known = self._seats.get(whole(values, "client"))
        up = known.device.up if known is not None else math.inf
        hello = Hello.of(values, probe.rate or math.inf if probe is not None else up)
        if hello.client in self._taken(peer):
            self._turn_away(peer, f"client {hello.client} is here already; give another number, or none")
            return
        self._promised.pop(peer, None)
        came = known is None or not known.there
        seat = self._seats[hello.client] = known or Seat(hello.client, peer, hello.device)
        seat.peer, seat.gone, seat.held, seat.after = peer, None, hello.held, hello.after
        if came:
            self._noted(f"client {hello.client} is here, {hello.device.samples} samples")
            self._join(seat, hello.device)
        self._resume(seat, hello)
        if came and seat.version is None and self._began is not None:
            self._conductor.joined(seat.client)

    def _join(self, seat: Seat, device: Device) -> None:
        seat.device = device
        self.server.join(device)

    def _resume(self, seat: Seat, hello: Hello) -> None:
        """Go on with a turn where the client stands, or give it anew; else let it wait, or begin."""
        due, have = seat.sequence, seat.up.have if seat.up is not None else 0
        if seat.up is not None:
            seat.up.broke()
        wanted = due > 0 and hello.trained == due
        self._hub.send(seat.peer, pack(Word.WELCOME, number=due if wanted else 0, have=have))
        if due and not wanted:
            if hello.partial == due and seat.down is not None:
                seat.down.restart(hello.have)
                self._pump(seat)
            else:
                self._issue(seat.client)

    def _take(self, seat: Seat, piece: Piece) -> None:
        """Take a piece of an update; say how much is here, or what became of it."""
        if piece.number != seat.sequence:
            return  # of a turn that was given up; the client is told by its next version
        most = most_nbytes(self.server.weights.numel()) + ROOM
        if piece.total > most:
            self._ended(seat, Refusal(seat.client, f"an update of {piece.total} bytes, and {most} may be"), 0)
            return
        if seat.up is None:
            seat.up = Receiving(piece.number, piece.total)
        now = time.monotonic()
        done = seat.up.take(piece, now)
        if seat.up.is_due(now):
            self._hub.send(seat.peer, pack(Word.HAVE, number=piece.number, have=seat.up.have))
        if done:
            self._update(seat, seat.up)

    def _update(self, seat: Seat, up: Receiving) -> None:
        if up.rate is not None and up.total > PROBES * PROBE_SIZE:
            self._note_speed(seat, replace(seat.device, up=up.rate))
        version = seat.version
        found = self.server.receive(seat.client, up.data)
        if isinstance(found, Receipt) and version is not None:
            self._heard = time.monotonic()
            self.local_steps += version.steps
            seat.after, seat.held = version.sequence, version.held or seat.held
        self._ended(seat, found, up.total)

    def _ended(self, seat: Seat, found: Receipt | Refusal, nbytes: int) -> None:
        """End a client's turn, and tell it."""
        number, reason = seat.sequence, found.reason if isinstance(found, Refusal) else ""
        seat.end_turn()
        if reason:
            self._refuse(seat.client, reason)
        self._hub.send(seat.peer, pack(Word.RECEIPT, number=number, reason=reason))
        self._conductor.came(seat.client, found, nbytes)

    def _note_speed(self, seat: Seat, device: Device) -> None:
        """Choose again for a device whose speed has changed."""
        known = seat.device
        if differs(known.step_seconds, device.step_seconds) or differs(known.up, device.up):
            self._join(seat, device)

    def _failed(self, seat: Seat, why: str) -> None:
        self._refuse(seat.client, why)
        self._went(seat)
        if seat.version is not None:
            seat.end_turn()
            self._conductor.lost(seat.client, leaves=True)

    def _lost(self, peer: bytes, why: str) -> None:
        self._promised.pop(peer, None)
        self._probes.pop(peer, None)
        seat = self._seat_of(peer)
        if seat is not None and seat.there:
            self._noted(f"client {seat.client} is gone: {why}")
            self._went(seat)

    def _went(self, seat: Seat) -> None:
        seat.gone = time.monotonic()
        if seat.version is None:
            self._conductor.left(seat.client)
            self.server.leave(seat.client)

    def _seat_of(self, peer: bytes) -> Seat | None:
        return next((seat for seat in self._seats.values() if seat.peer == peer), None)
