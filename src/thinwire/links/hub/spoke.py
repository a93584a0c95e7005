"""A spoke: one end's way to a hub, which it dials again whenever the connection breaks or falls silent."""

from __future__ import annotations

import math
import secrets
from collections import deque
from time import monotonic
from typing import NamedTuple

import zmq

from thinwire.links.address import check_port, shown
from thinwire.links.hub import station
from thinwire.links.hub.station import Event, EventKind
from thinwire.links.metered import Traffic, wire_bytes
from thinwire.links.names import tried
from thinwire.links.pair.buffers import joined
from thinwire.links.pair.reliable import LIVELY
from thinwire.links.security import REMEDY, asks_for_token, check_host, secure_connector
from thinwire.links.sockets import BURST, CONNECT, DIALS, REFUSALS, REFUSED, WATCHED, endpoint, is_certain
from thinwire.links.tcp import info as tcp_info
from thinwire.links.tcp.info import SocketPlace
from thinwire.types import AuthError, InputError

MAX_MESSAGE = (1 << 24) + (1 << 12)  # bytes: the largest layout and what goes along; chunks have 2^20 at most
MAX_QUEUE = 1024  # messages to the hub that wait; what is over it is refused

_Event = zmq.Event
DRIFT = 1e-4  # seconds a second that two cheap clocks may run apart
KEPT = 64  # samples
ROUNDING = 1e-6  # seconds: times since the epoch are floats, good to a quarter of that


class Spoke(station.Station):
    """Talk to one hub; made by ``connect``. ``JOINED`` comes with every new connection, the first included.

    What was sent over a connection that then broke may be lost: whoever is told ``JOINED`` says afresh what
    it needs.
    """

    def __init__(self, sock: zmq.Socket[bytes], host: str, port: int, secure: bool, silence: float) -> None:
        self.peer = shown(host, port)
        self.clock = PeerClock()  # the hub's, against this end's monotonic clock
        self.secure = secure
        self.refused = 0  # handshakes in a row that failed, though somebody there asks for a token
        self._proved = False  # the hub has taken this token once: whatever breaks off later, it is not that
        self._address = host, port
        self._outbox: deque[bytes] = deque()
        self._there = False
        self.heard = monotonic()  # when the hub gave its last sign of life
        self._patient_from, self._pinged = self.heard, 0.0
        self._place: SocketPlace | None = None  # the connection's, which is there or being made
        self._came: int | None = None  # bytes over it by the ping before, where the kernel tells
        self._sent, self._received = Traffic(), Traffic()
        super().__init__(sock, WATCHED, f"the way to {self.peer}", silence, endpoint=endpoint(host, port))
        self._thread.start()

    @classmethod
    def connect(
        cls,
        host: str,
        port: int,
        *,
        token: bytes | None = None,
        silence: float = station.SILENCE,
        max_message: int = MAX_MESSAGE,
    ) -> Spoke:
        """Dial a hub; returns at once, and goes on dialling until ``close``.

        ``silence``: seconds without a sign of life after which the connection is made anew.
        ``max_message``: bytes of the largest message that is read.
        Errors: ``InputError`` for an address off loopback without a token; ``recv`` raises ``AuthError`` when
        the hub does not hold this token, but not after it once did.
        """
        check_host(host, token)
        check_port(port)
        station.check_silence(silence)
        sock = station.station_socket(zmq.DEALER, max_message, takes=station.LARGE)
        rest = secrets.token_bytes(station.IDENTITY - 1)
        sock.routing_id = b"s" + rest  # a zero byte first is ZeroMQ's own
        sock.immediate = True  # nothing is queued for a connection that is not there
        sock.reconnect_ivl, sock.reconnect_ivl_max = 100, 1000  # ms
        sock.connect_timeout = int(CONNECT * 1000)
        if token is not None:
            secure_connector(sock, token)
        try:
            return cls(sock, host, port, token is not None, silence)
        except zmq.ZMQError as e:
            sock.context.destroy(linger=0)
            raise InputError(f"cannot connect to {shown(host, port)}: {e.strerror}; check the address") from e

    @property
    def joined(self) -> bool:
        """Whether the hub is there now."""
        return self._there

    @property
    def tried(self) -> str:
        """What to add to an error of a hub that never came, where its name has several addresses."""
        return "" if self._proved else tried(self._address[0])

    @property
    def traffic(self) -> tuple[Traffic, Traffic]:
        """Messages and wire bytes sent and received so far."""
        return self._sent, self._received

    def send(self, data: bytes) -> bool:
        """Queue one message; False where the hub is not there now, or too many wait."""
        with self._lock:
            if not self._there or len(self._outbox) >= MAX_QUEUE or self._linger is not None:
                return False
            self._outbox.append(station.DATA_BYTE + data)
        self._bell.ring()
        return True

    # the thread

    def _waiting(self) -> bool:
        return bool(self._outbox)

    def _noticed(self, kind: int, value: int) -> None:
        self._plan_redial(kind, monotonic())
        if kind in DIALS:
            # the value of that event is the connection's descriptor
            self._place = tcp_info.place_of(value) if kind == _Event.CONNECTED else None
            self._came = None
        elif kind == _Event.HANDSHAKE_SUCCEEDED:
            self.refused, self._proved, self.heard = 0, True, monotonic()
            self._ping(self.heard)
            self._there = True
            self._events.put(Event(EventKind.JOINED, b""))
        elif kind == _Event.DISCONNECTED:
            self._lost(b"the connection broke")
        elif kind in REFUSED and not self._proved:
            self._refuse(kind, value)

    def _refuse(self, kind: int, value: int) -> None:
        """Blame the token where the hub said so, or breaks off again and again though it greets."""
        certain = is_certain(kind, value)
        if self.secure and not certain:
            self.refused = self.refused + 1 if asks_for_token(*self._address) else 0
        if certain or self.refused >= REFUSALS:
            self._fail(AuthError(f"{self.peer} refused this token: {REMEDY} to the same text at both ends"))

    def _receive(self) -> None:
        for _ in range(BURST):
            if self._events.full:
                return
            try:
                frames = self._sock.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            self.heard = monotonic()
            if len(frames) == 1 and len(frames[0].buffer):
                self._received += Traffic(1, wire_bytes(len(frames[0].buffer), self.secure))
                self._take(frames[0].buffer)

    def _take(self, data: memoryview) -> None:
        kind = data[0]
        if kind == station.DATA:
            self._events.put(Event(EventKind.DATA, b"", joined((data[1:],)), monotonic()))
        elif kind == station.PONG and len(data) == station.ANSWER.size:
            _, sent, theirs = station.ANSWER.unpack(data)
            self.clock.add(sent, theirs, monotonic())
        elif kind == station.BYE:
            self._lost(b"it left")

    def _flush(self) -> None:
        for _ in range(BURST):
            with self._lock:
                if not self._outbox:
                    return
                data = self._outbox[0]
            if not self._put(data):
                return
            with self._lock:
                if self._outbox:
                    self._outbox.popleft()

    def _put(self, data: bytes) -> bool:
        try:
            self._sock.send(data, zmq.DONTWAIT)
        except zmq.Again:
            return False
        self._sent += Traffic(1, wire_bytes(len(data), self.secure))
        return True

    def _check_silence(self, now: float, excused: bool) -> None:
        if excused:
            self._patient_from = now
        if now - max(self.heard, self._patient_from) > self._silence:
            self._patient_from = now
            self._lost(f"it gave no sign of life for {self._silence:g} s".encode())
            self._redial(now)
        elif self._redial_at is not None and now > self._redial_at:
            self._redial(now)
        elif self._there and now - self._pinged >= self._heartbeat:
            self._watch_bytes(now)
            self._ping(now)

    def _watch_bytes(self, now: float) -> None:
        """Take what came of a large message since the ping before for life: pongs wait behind it."""
        info = tcp_info.read_at(self._place) if self._place is not None else None
        ours = info is not None and info.remote[1] == self._address[1]  # else the place is another's by now
        before, self._came = self._came, info.bytes_received if info is not None and ours else None
        if before is not None and self._came is not None and self._came - before >= LIVELY:
            self.heard = now

    def _ping(self, now: float) -> None:
        self._pinged = now
        self._put(station.STAMP.pack(station.PING, now))

    def _lost(self, why: bytes) -> None:
        with self._lock:
            self._outbox.clear()
            there, self._there = self._there, False
        if there:
            self._events.put(Event(EventKind.LOST, b"", why))

    def _farewell(self) -> None:
        if self._there:
            self._put(station.BYE_BYTE)


class _Sample(NamedTuple):
    at: float  # by this clock, seconds
    trip: float
    ahead: float

    def doubt(self, now: float) -> float:
        """Return by how much the sample may be wrong at ``now``, in seconds."""
        return self.trip / 2 + DRIFT * abs(now - self.at)

    def agrees(self, new: _Sample) -> bool:
        """Return whether this and a newer sample may be of the same two clocks, which only drift."""
        return abs(new.ahead - self.ahead) <= self.doubt(new.at) + new.doubt(new.at) + ROUNDING


class PeerClock:
    """Estimate the peer's clock: of the recent samples, the one whose error is bounded best.

    A stamp read by the peer between ``sent`` and ``received`` is wrong by half the round trip at most, and
    gets worse by the drift of the clocks (the clock filter of NTP, RFC 5905, chooses likewise). Two samples
    that are further apart than both may be wrong cannot be of the same clocks: one of these was set, or stood
    still while its machine slept. What is older is forgotten then, however short its trip was.

    >>> clock = PeerClock()
    >>> clock.add(sent=10.0, theirs=15.5, received=11.0)
    >>> clock.add(sent=12.0, theirs=17.1, received=12.2)
    >>> round(clock.ahead, 3), round(clock.trip, 3)
    (5.0, 0.2)
    """

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=KEPT)

    def add(self, sent: float, theirs: float, received: float) -> None:
        """Note a stamp ``theirs`` in answer to a message that left at ``sent`` and came back at ``received``.

        All in seconds; a trip that ends before it began, or a number that is none, does not count.
        """
        if received >= sent and all(map(math.isfinite, (sent, theirs, received))):
            new = _Sample(received, received - sent, theirs - (sent + received) / 2)
            kept = [s for s in self._samples if s.agrees(new)]
            self._samples = deque([*kept, new], maxlen=KEPT)  # replaced as one: others read it meanwhile

    @property
    def ahead(self) -> float:
        """Seconds to add to this clock to get the peer's; 0 while nothing is known."""
        return self._best.ahead if self._samples else 0.0

    @property
    def doubt(self) -> float:
        """Bound on the error of ``ahead`` in seconds; infinite while nothing is known."""
        return self._best.doubt(self._samples[-1].at) if self._samples else math.inf

    @property
    def trip(self) -> float | None:
        """The least of the recent round trips in seconds."""
        return min((s.trip for s in list(self._samples)), default=None)

    @property
    def _best(self) -> _Sample:
        samples = list(self._samples)
        return min(samples, key=lambda s: s.doubt(samples[-1].at))
