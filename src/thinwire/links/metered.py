"""Count what a link puts on the wire, by traffic class and direction."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock

from thinwire.links.link import Link, LinkEstimate
from thinwire.links.message import Message, buffers_of

SHORT_FRAME = 255  # bytes; a longer ZMTP frame has a length of 8 bytes instead of 1
CURVE_OVERHEAD = 33  # bytes: command name 8, nonce 8, MAC 16, flags 1 (RFC 26)
UNLABELLED = "unlabelled"


def wire_bytes(nbytes: int, secure: bool = False) -> int:
    """Return the bytes of a frame in its TCP stream: ZMTP 3 frame and, if ``secure``, CURVE box included.

    >>> wire_bytes(100), wire_bytes(1000), wire_bytes(100, secure=True)
    (102, 1009, 135)
    """
    body = nbytes + CURVE_OVERHEAD if secure else nbytes
    return body + (2 if body <= SHORT_FRAME else 9)


def on_the_wire(message: Message, secure: bool = False) -> int:
    """Return the bytes of a message in its TCP stream: each buffer is a frame."""
    return sum(wire_bytes(len(buffer), secure) for buffer in buffers_of(message))


@dataclass(frozen=True)
class Traffic:
    """Messages and bytes of one traffic class in one direction."""

    messages: int = 0
    nbytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.messages + other.messages, self.nbytes + other.nbytes)

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.messages - other.messages, self.nbytes - other.nbytes)


Counts = dict[str, Traffic]


@dataclass(frozen=True)
class Snapshot:
    """Counters of a meter at one moment; the difference of two is the traffic between them."""

    sent: Counts = field(default_factory=dict)
    received: Counts = field(default_factory=dict)

    def __sub__(self, other: Snapshot) -> Snapshot:
        return Snapshot(minus(self.sent, other.sent), minus(self.received, other.received))

    @property
    def sent_bytes(self) -> int:
        """Bytes sent, all classes."""
        return sum(t.nbytes for t in self.sent.values())

    @property
    def received_bytes(self) -> int:
        """Bytes received, all classes."""
        return sum(t.nbytes for t in self.received.values())


def minus(a: Counts, b: Counts) -> Counts:
    """Return what of ``a`` came after ``b``, by label."""
    return {label: t - b.get(label, Traffic()) for label, t in a.items()}


class Metered:
    """Count messages and wire bytes of a link by label, as they are handed to it.

    Frame headers, and the encryption's overhead where ``link.secure``, are included. Not counted: the ZMTP
    greeting and handshake of each connection, and TCP and IP headers (``tcp_info`` has the kernel's view).
    ``label_of`` names the class of a received message from its bytes.
    """

    def __init__(self, link: Link, label_of: Callable[[Message], str] | None = None) -> None:
        self._link = link
        self._label_of = label_of or (lambda data: UNLABELLED)
        self._lock = Lock()
        self._sent: Counts = {}
        self._received: Counts = {}
        self.secure = bool(getattr(link, "secure", False))

    @property
    def peer(self) -> str:
        return self._link.peer

    @property
    def sent(self) -> Counts:
        """A copy of the counters of what was sent, by label."""
        return self.snapshot().sent

    @property
    def received(self) -> Counts:
        """A copy of the counters of what was received, by label."""
        return self.snapshot().received

    def snapshot(self) -> Snapshot:
        """Return a copy of all counters."""
        with self._lock:
            return Snapshot(dict(self._sent), dict(self._received))

    def send(self, data: Message, label: str = "control") -> Future[None]:
        future = self._link.send(data, label)
        if not (future.done() and future.exception()):
            self._count(self._sent, label, data)
        return future

    def recv(self) -> Future[Message]:
        future = self._link.recv()
        future.add_done_callback(self._arrived)
        return future

    def more(self) -> deque[Message]:
        messages = self._link.more()
        for data in messages:
            self._count(self._received, self._label_of(data), data)
        return messages

    def estimate(self) -> LinkEstimate:
        return self._link.estimate()

    def redial(self) -> None:
        """Ask the link below for a new connection, where it can make one."""
        redial(self._link)

    def close(self, timeout: float = 5.0) -> None:
        self._link.close(timeout)

    def _arrived(self, future: Future[Message]) -> None:
        if not future.cancelled() and future.exception() is None:
            data = future.result()
            self._count(self._received, self._label_of(data), data)

    def _count(self, counts: Counts, label: str, message: Message) -> None:
        with self._lock:
            counts[label] = counts.get(label, Traffic()) + Traffic(1, on_the_wire(message, self.secure))


def redial(link: Link) -> None:
    """Ask ``link`` for a new connection; links without one ignore it."""
    again = getattr(link, "redial", None)
    if again is not None:
        again()
