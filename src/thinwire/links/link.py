"""The link contract: ordered messages to one peer, and what is known of the way there."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

from thinwire.links.inbox import Inbox, failed
from thinwire.links.message import Message
from thinwire.types import LinkError


@dataclass(frozen=True)
class LinkEstimate:
    """What a link knows of itself; ``None`` where nothing was measured yet."""

    rate: float | None = None  # bytes/s
    rtt: float | None = None  # seconds
    age: float | None = None  # seconds since the measurement that the rate rests on, or the newest round trip
    lower_bound: bool = (
        False  # the messages were too small to tell more than that the rate is at least so much
    )


class Link(Protocol):
    """Ordered messages to and from one peer. A wrapper (reliable, shaped, metered) is a link too.

    Futures fail with ``LinkError`` that names the peer once it is known to be lost.
    """

    @property
    def peer(self) -> str:
        """Who is at the other end, for messages: ``rank 1 (127.0.0.1:40123)``."""
        ...

    def send(self, data: Message, label: str = "control") -> Future[None]:
        """Queue one message and return at once; ``label`` names its traffic class for the meters.

        What ``data`` lies in stays as it is until the send is done: it need not be copied.
        """
        ...

    def recv(self) -> Future[Message]:
        """Return a future for the next message, in the order of the calls."""
        ...

    def estimate(self) -> LinkEstimate:
        """Return what is known of rate and round trip."""
        ...

    def more(self) -> deque[Message]:
        """Return what has come already of what later calls of ``recv`` would bring; it is the caller's."""
        ...

    def close(self, timeout: float = 5.0) -> None:
        """Flush for at most ``timeout`` seconds, then stop. Safe to call twice."""
        ...


class Loopback:
    """One end of ``loopback_pair``. No thread: a send completes the other end's receive on the spot."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._inbox = Inbox()
        self._other: Loopback = self
        self._order = Lock()
        self._error: LinkError | None = None

    @property
    def peer(self) -> str:
        return self._peer

    def send(self, data: Message, label: str = "control") -> Future[None]:
        if self._error is not None:
            return failed(self._error)
        done: Future[None] = Future()
        with self._order:
            self._other._inbox.put(bytes(data))
        done.set_result(None)
        return done

    def recv(self) -> Future[Message]:
        return self._inbox.get()

    def more(self) -> deque[Message]:
        return self._inbox.more()

    def estimate(self) -> LinkEstimate:
        return LinkEstimate()

    def close(self, timeout: float = 5.0) -> None:
        self._stop(LinkError(f"this end closed the link to {self.peer}"))
        self._other._stop(LinkError(f"{self._other.peer} closed the link"))

    def _stop(self, error: LinkError) -> None:
        self._error = self._error or error
        self._inbox.fail(self._error)


def loopback_pair(first: str = "rank 0", second: str = "rank 1") -> tuple[Link, Link]:
    """Return the two ends of a link inside this process: the end of ``first``, then the end of ``second``.

    >>> a, b = loopback_pair()
    >>> done = a.send(b"hello")
    >>> b.recv().result()
    b'hello'
    >>> a.peer
    'rank 1'
    """
    a, b = Loopback(second), Loopback(first)
    a._other, b._other = b, a
    return a, b
