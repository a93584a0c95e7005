"""The link contract: ordered messages to one peer, and what is known of the way there."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

Data = bytes | bytearray | memoryview


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

    def send(self, data: Data, label: str = "control") -> Future[None]:
        """Queue one message and return at once; ``label`` names its traffic class for the meters."""
        ...

    def recv(self) -> Future[bytes]:
        """Return a future for the next message, in the order of the calls."""
        ...

    def estimate(self) -> LinkEstimate:
        """Return what is known of rate and round trip."""
        ...

    def close(self, timeout: float = 5.0) -> None:
        """Flush for at most ``timeout`` seconds, then stop. Safe to call twice."""
        ...
