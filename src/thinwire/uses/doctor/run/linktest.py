"""Measure the link between two machines, each way: round trips, then a transfer over the real link stack.

One end listens and obeys, the other dials and asks; both are ``thinwire doctor``. Messages are JSON under
tags of their own; what the transfers carry is random and thrown away.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import reprlib
import socket
import statistics
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeVar

from thinwire.links.address import shown
from thinwire.links.inbox import within
from thinwire.links.mesh import Peer, stack
from thinwire.links.pair.reliable import MAX_SEGMENT
from thinwire.links.pair.zmq_link import ZmqLink
from thinwire.links.security import check_host
from thinwire.links.shape import MTU, SEGMENT, LinkShape
from thinwire.links.tcp.counts import KernelTotals
from thinwire.runs.machine.network import check_listener, restarts, tcp_settings
from thinwire.types import WRONG_VALUES, AuthError, LinkError, PayloadError, require
from thinwire.uses.doctor.run.check import PORT, SECONDS

NAME = b"thinwire doctor"
DEADLINE = 20.0  # seconds for an answer
ALIVE = 8.0  # seconds for the first sign of life
PATIENCE = 7 * 86400.0  # seconds that a listener waits for its next peer
TRIPS, LEAST_TRIPS, TRIP_TIME = 30, 3, 3.0  # round trips, at least so many, seconds for all
SETTLE = 1 / 3  # share of a transfer that is left out: TCP finds its rate meanwhile
PIECES = 1 << 11, 1 << 16  # bytes of a message, least and most
AHEAD = 0.3  # seconds of line time, and two round trips, that are kept under way
MAX_NAME = 64  # characters
MAX_TASKS = 8  # of a measurement, which has three
MAX_PIECES = 1 << 19  # of a transfer: 34 GB
MAX_NUMBER = 1e15  # bytes or seconds; more than that was not measured
MAX_MESSAGE = 1 << 22  # bytes; a piece of a transfer has 2^18 at most, a train of a probe fewer than these
HELLO, DO, ECHO, LOAD, SENT, GOT = b"hello", b"do", b"echo", b"load", b"sent", b"got"
T = TypeVar("T")
Fields = dict[str, Any]


@dataclass(frozen=True)
class TestedMachine:
    """One end: its name and its kernel's TCP settings."""

    name: str
    settings: dict[str, str]


@dataclass(frozen=True)
class MeasuredWay:
    """One direction, as measured. ``retransmitted`` and the rest are None without TCP_INFO at its sender."""

    rate: float  # bytes/s of the TCP stream, what IP and TCP headers leave
    nbytes: int  # received in ``seconds``
    seconds: float
    retransmitted: float | None = None  # share of the bytes sent
    congestion: str | None = None
    loaded_rtt: float | None = None  # seconds, at the end of the transfer


@dataclass(frozen=True)
class LinkTest:
    """What was found between two machines. Round trips in seconds."""

    here: TestedMachine
    there: TestedMachine
    rtt: float  # the least
    median_rtt: float
    jitter: float  # median change from one to the next
    out: MeasuredWay
    back: MeasuredWay

    def shape(self, way: MeasuredWay) -> LinkShape:
        """Return a direction as rate and one-way delay: half of the least round trip, rounded."""
        return self._shape(way.rate)

    def line(self, way: MeasuredWay) -> LinkShape:
        """Return a direction as ``shape`` does, but its rate with IP and TCP headers, as emulation has it."""
        return self._shape(way.rate * MTU / SEGMENT)

    def _shape(self, rate: float) -> LinkShape:
        digits = 2 - math.floor(math.log10(8 * rate))
        return LinkShape(round(8 * rate, digits) / 8, round(self.rtt / 2, 4))

    def fragment(self) -> str:
        """Return both directions as TOML for ``thinwire plan``."""
        here, there = self.here.name, self.there.name
        there = there if there != here else f"{there}-2"
        out = _table(here, there, self.shape(self.out), self.here, self.out)
        return f"{out}\n{_table(there, here, self.shape(self.back), self.there, self.back)}"


def _table(start: str, end: str, shape: LinkShape, sender: TestedMachine, way: MeasuredWay) -> str:
    lines = ["[[link]]", f"from = {json.dumps(start)}", f"to = {json.dumps(end)}"]
    lines.append(f"link = {json.dumps(str(shape))}")
    if restarts(way.congestion, sender.settings) is False:
        lines.append("restarts = false")
    return "\n".join(lines) + "\n"


class _TransferSink:
    """What a transfer brings here: counted, and thrown away."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self.start()
        peer.mailbox.on(LOAD, self._take)

    def start(self) -> None:
        self._arrivals: list[tuple[float, int]] = []

    def _take(self, tag: bytes, body: bytes) -> None:
        if len(self._arrivals) < MAX_PIECES:
            self._arrivals.append((monotonic(), self._peer.wire_bytes(tag, len(body))))

    def counted(self) -> Fields:
        """Return bytes and seconds of the settled part."""
        pieces, name = len(self._arrivals), self._peer.name
        require(pieces > 2, LinkError, f"nothing came from {name} in a transfer")
        require(pieces < MAX_PIECES, PayloadError, f"{name} sent {pieces} pieces or more in one transfer")
        first, last = self._arrivals[0][0], self._arrivals[-1][0]
        begin = first + SETTLE * (last - first)
        start = next(t for t, _ in self._arrivals if t >= begin)
        nbytes = sum(n for t, n in self._arrivals if t > start)
        return {"bytes": nbytes, "seconds": last - start}


def dial(
    host: str,
    port: int = PORT,
    token: bytes | None = None,
    seconds: float = SECONDS,
    shape: LinkShape | None = None,
) -> LinkTest:
    """Measure the link to a listener, with transfers of ``seconds`` each way.

    ``shape`` slows what this end sends. Errors: ``InputError`` for an address off loopback without a token;
    ``LinkError`` that names what blocks, or the deadline that passed; ``AuthError`` for a wrong token.
    """
    check_host(host, token)
    check_listener(host, port, token is not None)
    options: dict[str, Any] = {"connect_timeout": DEADLINE, "max_message": MAX_SEGMENT, "token": token}
    link = ZmqLink.connect(NAME, host, port, peer="the listener", **options)
    peer = stack(0, link, shape or LinkShape(), 0, DEADLINE, DEADLINE, MAX_MESSAGE)
    try:
        return _measure(peer, seconds)
    finally:
        peer.close(1.0)


def _measure(peer: Peer, seconds: float) -> LinkTest:
    box, here = peer.mailbox, TestedMachine(socket.gethostname(), tcp_settings())
    sink = _TransferSink(peer)
    _wait_alive(peer)
    box.send(HELLO, _pack(vars(here)))
    there = _answer(peer, HELLO, "the greeting", _machine)
    trips = _round_trips(peer)
    _await(peer.probe(), peer)
    box.send(DO, _pack({"receive": seconds}))
    sent = _load(peer, seconds)
    out = _answer(peer, GOT, "the count of a transfer", lambda got: _way(got, sent))
    sink.start()
    box.send(DO, _pack({"send": seconds}))
    back = _answer(
        peer, SENT, "the transfer", lambda theirs: _way(sink.counted(), theirs), DEADLINE + seconds
    )
    _await(box.send(DO, _pack({"end": 0})), peer)
    jitter = statistics.median(abs(a - b) for a, b in itertools.pairwise(trips))
    return LinkTest(here, there, min(trips), statistics.median(trips), jitter, out, back)


def _wait_alive(peer: Peer) -> None:
    try:
        peer.reliable.wait_alive(ALIVE)
    except AuthError:
        raise
    except LinkError as e:
        raise LinkError(
            f"{peer.name} takes connections but does not answer as thinwire doctor --listen does; it is a "
            "rank of a run, or busy with another peer: give another --port, or try again"
        ) from e


def listen(
    host: str,
    port: int = PORT,
    token: bytes | None = None,
    once: bool = False,
    shape: LinkShape | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> None:
    """Serve one measuring peer after another, the first only if ``once``; ``tell`` hears what goes on.

    Errors: ``InputError`` for an address off loopback without a token, or one that cannot be listened at. A
    peer that fails is told of and forgotten, except if ``once``.
    """
    while True:
        options: dict[str, Any] = {"connect_timeout": math.inf, "max_message": MAX_SEGMENT, "token": token}
        link = ZmqLink.bind(NAME, host, port, peer="the measuring peer", handover=False, **options)
        port = link.port
        peer = stack(0, link, shape or LinkShape(), 0, DEADLINE, math.inf, MAX_MESSAGE)
        tell(f"listening at {shown(host, port)}")
        try:
            tell(f"measured with {_serve(peer, tell)}")
        except (LinkError, PayloadError) as e:
            if once:
                raise
            tell(f"a measurement failed: {e}")
        finally:
            peer.close(1.0)
        if once:
            return


def _serve(peer: Peer, tell: Callable[[str], None]) -> str:
    """Do what one dialling peer asks until it ends; return its name."""
    box, sink = peer.mailbox, _TransferSink(peer)
    box.on(ECHO, lambda tag, body: _reply(peer, body))
    peer.reliable.wait_alive(PATIENCE)
    there = _answer(peer, HELLO, "the greeting", _machine, DEADLINE)
    tell(f"measuring with {there.name}")
    box.send(HELLO, _pack(vars(TestedMachine(socket.gethostname(), tcp_settings()))))
    for _ in range(MAX_TASKS):
        sink.start()  # before the task is read: what it announces may already be here
        task, seconds = _answer(peer, DO, "the next task", _task)
        if task == "end":
            return there.name
        if task == "send":
            _await(peer.probe(), peer)
            _load(peer, seconds)
        else:
            _answer(peer, SENT, "the transfer", dict, DEADLINE + seconds)
            box.send(GOT, _pack(sink.counted()))
    raise PayloadError(f"{peer.name} asks for more than a measurement")


def _task(asked: Fields) -> tuple[str, float]:
    """Return what is asked for, and for how many seconds: no peer may hold the listener for long."""
    name = next((n for n in ("end", "send") if n in asked), "receive")
    return name, min(_number(asked, name), DEADLINE)


def _reply(peer: Peer, body: bytes) -> None:
    peer.mailbox.send(ECHO, body)


def _round_trips(peer: Peer) -> list[float]:
    trips: list[float] = []
    end = monotonic() + TRIP_TIME
    while len(trips) < LEAST_TRIPS or (len(trips) < TRIPS and monotonic() < end):
        start = monotonic()
        peer.mailbox.send(ECHO, b"")
        peer.mailbox.get(ECHO, DEADLINE, "an echo")
        trips.append(monotonic() - start)
    return trips


def _load(peer: Peer, seconds: float) -> Fields:
    """Keep the line busy for ``seconds``; send the peer, and return, what the kernel says of it."""
    before = peer.kernel.read()
    noise = os.urandom(PIECES[1])
    under_way: deque[tuple[Future[None], int]] = deque()
    flight, end = 0, monotonic() + min(seconds, DEADLINE)
    while monotonic() < end:
        seen = peer.reliable.estimate()
        rate = seen.rate or PIECES[0] / AHEAD
        size = int(min(max(PIECES[0], rate * AHEAD / 8), PIECES[1]))
        under_way.append((peer.mailbox.send(LOAD, noise[:size], "other"), size))
        flight += size
        while flight > max(4 * size, rate * (AHEAD + 2 * (seen.rtt or 0.0))):
            sent, size = under_way.popleft()
            _await(sent, peer)
            flight -= size
    counts = _sent(before, peer.kernel.read())
    peer.mailbox.send(SENT, _pack(counts))
    return counts


def _await(sent: Future[Any], peer: Peer) -> None:
    within(sent, DEADLINE, "the acknowledgement of a transfer", peer.name)


def _sent(before: KernelTotals | None, after: KernelTotals | None) -> Fields:
    if before is None or after is None:
        return {}
    moved = after - before
    again = moved.retransmitted / moved.sent if moved.sent else None
    return {"retransmitted": again, "congestion": after.congestion, "loaded_rtt": after.rtt}


def _way(got: Fields, sent: Fields) -> MeasuredWay:
    nbytes, seconds = int(_number(got, "bytes")), _number(got, "seconds")
    require(seconds > 0 and nbytes > 0, PayloadError, "the count of a transfer is empty")
    require(nbytes / seconds < MAX_NUMBER, PayloadError, "the count of a transfer cannot be")
    numbers = {
        n: _number(sent, n) if sent.get(n) is not None else None for n in ("retransmitted", "loaded_rtt")
    }
    control = _text(sent["congestion"]) if sent.get("congestion") else None
    return MeasuredWay(nbytes / seconds, nbytes, seconds, congestion=control, **numbers)


def _pack(value: Fields) -> bytes:
    return json.dumps(value).encode()


def _answer(peer: Peer, tag: bytes, what: str, read: Callable[[Fields], T], timeout: float = DEADLINE) -> T:
    """Return what ``read`` makes of the peer's next message; ``PayloadError`` where that cannot be read."""
    data = peer.mailbox.get(tag, timeout, what)
    try:
        value = json.loads(data)
        require(isinstance(value, dict), ValueError, "no object")
        return read(value)
    except WRONG_VALUES as e:  # a RecursionError too
        raise PayloadError(f"{peer.name} sent something else than {what}") from e


def _machine(value: Fields) -> TestedMachine:
    settings = value.get("settings")
    require(isinstance(settings, dict), PayloadError, "the peer's greeting cannot be read")
    return TestedMachine(_text(value.get("name")), {str(k): str(v) for k, v in dict(settings or {}).items()})


def _text(value: Any) -> str:
    return "".join(c for c in str(value)[:MAX_NAME] if c.isprintable())


def _number(value: Fields, name: str) -> float:
    found = value.get(name)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found <= MAX_NUMBER:
        raise PayloadError(f"the peer gave {reprlib.repr(found)} for {name!r}")
    return float(found)
