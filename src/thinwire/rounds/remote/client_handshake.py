"""How a client comes in: it asks, its way is timed, and it says hello; what a server knows of it then."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from thinwire.links.hub.hub import Hub
from thinwire.rounds.client_profile import ClientPace, ClientProfile
from thinwire.rounds.parameters import Signature
from thinwire.rounds.remote.control_messages import (
    GREATEST,
    MOST_NAME,
    PROTOCOL,
    MessagePiece,
    Receiving,
    Sending,
    Word,
    pack,
    positive,
    text,
    whole,
)
from thinwire.rounds.update_messages import MAX_STEPS, Held, VersionMessage
from thinwire.types import InputError, PayloadError, require

KIT_PIECE = 1 << 15  # bytes
MOST_PROMISED = 1 << 12  # clients whose names are known before they come in
PROBES, PROBE_SIZE = 4, 3900  # messages that are timed at the start, and bytes of each
HERE_ALREADY = (
    "client {} is here already; give another number, or none; if this one was that before, try again in 10 s"
)
MOST_MEMBERS = 256  # behind a branch: what it says of itself bounds the samples that it is given
STEPS = 10  # by which paces are compared
CHANGED = 1.25  # a speed that differs by this factor is another one: assignments are made again


class Handshake:
    """Let peers of ``hub`` in as clients that have no session yet, or come back to theirs.

    ``known``: the clients that were here before, by number, with their names; nobody gets one's number by
    chance, and who bears its name is that client again. ``signature``: of the model, which each client's must
    be like. ``admits`` says of a name why it may not take part; nothing where it may. ``kit``: what the model
    is made of, for those who ask for it.
    """

    def __init__(
        self,
        hub: Hub,
        terms: Mapping[str, Any],
        sessions: Mapping[int, ClientSession],
        known: Callable[[], Mapping[int, str]],
        noted: Callable[[str], object],
        signature: Signature | None = None,
        admits: Callable[[str], str] = lambda name: "",
        kit: bytes = b"",
    ) -> None:
        self._signature, self._admits, self._kit = signature, admits, kit
        self._kits: dict[bytes, Sending] = {}
        self.kit_bytes = 0  # that were sent of it
        terms = {**terms, "signature": signature and list(signature)}
        self._hub, self._terms, self._sessions, self._known, self._noted = (
            hub,
            dict(terms),
            sessions,
            known,
            noted,
        )
        self._promised: dict[bytes, int] = {}  # who was told that it is which client
        self._names: dict[int, str] = {}  # of those
        self._probes: dict[bytes, Receiving] = {}

    @property
    def waiting(self) -> set[bytes]:
        """Those who were told what is to be done, and have not said hello."""
        return set(self._promised)

    def name_of(self, peer: bytes) -> str:
        """Return the name of one of those. Errors: ``PayloadError`` for another."""
        require(peer in self._promised, PayloadError, "whoever takes part asks first what is to be done")
        client = self._promised[peer]
        return self._names.get(client) or f"client {client}"

    def probe(self, peer: bytes, nbytes: int, at: float) -> None:
        """Time some messages, and send as many back."""
        probe = self._probes.setdefault(peer, Receiving(0, PROBES * PROBE_SIZE))
        data = memoryview(bytes(nbytes))
        if probe.take(MessagePiece(0, probe.have, probe.total, data), at):
            for _ in range(PROBES):
                self._hub.send(peer, bytes([Word.PROBE]) + bytes(PROBE_SIZE - 1))

    def answer(self, peer: bytes, values: dict[str, Any]) -> None:
        """Say what is to be done here, and which client this is."""
        theirs = whole(values, "protocol")
        if theirs != PROTOCOL:
            older = "the client" if theirs < PROTOCOL else "the server"
            self.turn_away(peer, f"the server speaks protocol {PROTOCOL}, not {theirs}; update {older}")
            return
        taken, name = self._taken(peer), name_in(values)
        known = taken | self._sessions.keys() | self._known().keys()  # who is away may come back
        free = (c for c in range(len(known) + 1) if c not in known)
        client = (
            whole(values, "client") if values.get("client") is not None else self._named(name, next(free))
        )
        why = self._admits(name) or (HERE_ALREADY.format(name or client) if client in taken else "")
        if why:
            self.turn_away(peer, why)
            return
        self._promised[peer] = client
        self._names.pop(client, None)
        self._names[client] = name
        if len(self._names) > MOST_PROMISED:  # who asks again and again goes out of mind
            del self._names[next(iter(self._names))]
        self._hub.send(peer, pack(Word.TERMS, client=client, **self._terms))

    def send_kit(self, peer: bytes, values: dict[str, Any]) -> None:
        """Begin to send a peer what the model is made of, from where it stands."""
        kit = self._kits[peer] = Sending(0, self._kit, KIT_PIECE)
        kit.restart(whole(values, "have"))
        self.pump(peer)

    def pump(self, peer: bytes, have: int | None = None) -> None:
        """Go on with what a peer is sent of the kit, of which it has so much."""
        kit = self._kits.get(peer)
        if kit is None:
            return
        if have is not None:
            kit.heard(have)

        def put(piece: bytes) -> bool:
            sent = self._hub.send(peer, piece)
            self.kit_bytes += len(piece) if sent else 0
            return sent

        kit.send(put)
        if kit.done:
            del self._kits[peer]

    def pump_all(self) -> None:
        """Go on with what found no room."""
        for peer in list(self._kits):
            self.pump(peer)

    def _named(self, name: str, free: int) -> int:
        """Return the number of the client that bears a name; the one that is ``free`` where none does."""
        known = {**self._names, **self._known()}
        return next((client for client, its in known.items() if name and its == name), free)

    def admit(self, peer: bytes, values: dict[str, Any]) -> ClientHello:
        """Return what a client says of itself. Errors: ``PayloadError`` where it may not take part."""
        probe = self._probes.pop(peer, None)
        session = self._sessions.get(whole(values, "client"))
        up = session.device.up if session is not None else math.inf
        try:
            theirs = Signature.read(values.get("signature"))
            self._signature = self._signature or theirs  # a server of a row alone: all are like the first
            if self._signature is not None:
                self._signature.check(theirs, f"the model of client {whole(values, 'client')}")
        except InputError as e:
            raise PayloadError(str(e)) from e
        hello = ClientHello.of(values, probe.rate or math.inf if probe is not None else up)
        require(not (why := self._admits(hello.device.name)), PayloadError, why)
        require(hello.client not in self._taken(peer), PayloadError, HERE_ALREADY.format(hello.client))
        other = any(s.peer == peer and s.client != hello.client for s in self._sessions.values())
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
        self._kits.pop(peer, None)

    def _taken(self, peer: bytes) -> set[int]:
        """Return the clients that other connections are, which are still there."""
        there = set(self._hub.peers)
        promised = {c for p, c in self._promised.items() if p != peer and p in there}
        return promised | {
            c for c, session in self._sessions.items() if session.there and session.peer != peer
        }


@dataclass
class ClientSession:
    """One client, as it said last, and its turn. ``peer``: the hub's name of its connection."""

    client: int
    peer: bytes
    device: ClientProfile
    held: Held | None = None
    after: int = 0  # sequence number of its last update
    there: bool = True  # connected, and willing
    moved: float = 0.0  # when its turn went on last, monotonic seconds
    version: VersionMessage | None = None  # under way: given, and not answered yet
    down: Sending | None = None
    up: Receiving | None = None
    coming: Held | None = None  # what it fetches before it takes part,
    ahead: Sending | None = None  # and how
    fetched: bool = False  # it has that, and was not asked since

    @property
    def sequence(self) -> int:
        """The number of the update that is to come; 0 for none."""
        return self.version.sequence if self.version is not None else 0

    def end_turn(self) -> None:
        """Nothing is under way any more; a version that left whole is there before what follows it."""
        if self.version is not None and self.down is not None and self.down.sent:
            self.held = self.version.held or self.held
        self.version = self.down = self.up = None


@dataclass(frozen=True)
class ClientHello:
    """How a client says that it is there, and where it stands."""

    client: int
    device: ClientProfile
    held: Held | None
    after: int
    trained: int  # the sequence number of the version that is here whole
    partial: int  # of the one of which ``have`` bytes are here
    have: int

    @classmethod
    def of(cls, values: dict[str, Any], up: float) -> ClientHello:
        """Read one; ``up``: bytes/s at which its probe came. Errors: ``PayloadError``."""
        client, samples = whole(values, "client"), whole(values, "samples")
        require(samples > 0, PayloadError, f"client {client} has no samples; give it some data")
        down, delay = (positive(values, name) for name in ("down", "delay"))
        require(delay < math.inf, PayloadError, f"client {client} does not say how long the way takes")
        device = ClientProfile(client, 1.0, samples, up, down, delay, name_in(values))
        device = replace(device, **pace_in(values)._asdict())
        stands = (whole(values, name) for name in ("after", "trained", "partial", "have"))
        return cls(client, device, held_in(values), *stands)

    def goes_on(self, session: ClientSession) -> bool:
        """Say whether the client has the version that is under way to it, or a part of it."""
        begun = session.down is not None and self.partial == session.sequence
        return session.sequence > 0 and (begun or self.trained == session.sequence)


def held_in(values: dict[str, Any]) -> Held | None:
    """Return the version that a client says it holds; None for none. Errors: ``PayloadError``."""
    held = values.get("held")
    pair = isinstance(held, list) and len(held) == 2 and all(isinstance(x, int) and x >= 0 for x in held)
    require(held is None or pair, PayloadError, f"a client holds {ascii(held)[:40]}, no version")
    return Held(*held) if held else None


def pace_in(values: dict[str, Any]) -> ClientPace:
    """Return how fast a client says that it is. Errors: ``PayloadError``."""
    step, fixed = positive(values, "step_seconds"), values.get("fixed")
    members, least = whole(values, "members"), whole(values, "least")
    known = isinstance(fixed, (int, float)) and 0 <= fixed < GREATEST
    timed = step < math.inf and known and 1 <= members <= MOST_MEMBERS and 1 <= least <= MAX_STEPS
    require(timed, PayloadError, "a client does not say how long its steps take, and of how many members")
    return ClientPace(step, float(fixed or 0), members, least)


def name_in(values: dict[str, Any]) -> str:
    """Return the name that a client gives itself; empty where it gives none."""
    return text(values, "name")[:MOST_NAME].strip() if values.get("name") else ""


def paces_differ(a: ClientPace, b: ClientPace) -> bool:
    """Return whether a client's pace has changed enough for assignments to be made again."""
    turns = (a.fixed + a.step_seconds * STEPS, b.fixed + b.step_seconds * STEPS)
    changed = differs(*turns) or differs(a.step_seconds, b.step_seconds or math.inf)
    return changed or a.members != b.members or differs(a.least, b.least)


def differs(a: float, b: float) -> bool:
    """Return whether two speeds are so far apart that assignments are to be made again.

    >>> differs(1.0, 1.1), differs(1.0, 2.0), differs(math.inf, 1.0)
    (False, True, True)
    """
    low, high = min(a, b), max(a, b)
    return low < math.inf and high > CHANGED * low
