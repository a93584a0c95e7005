"""What a hub or a spoke tells its owner: peers that join and are lost, messages; a bounded queue of these."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from threading import Condition
from time import monotonic
from typing import NamedTuple

from thinwire.links.inbox import renewed
from thinwire.types import LinkError

LIMIT = 1024  # events that wait; the sockets are not read while there are more
LIMIT_NBYTES = 1 << 25  # or while they hold so many bytes: more than a feed sends unacknowledged


class EventKind(enum.Enum):
    """What happened."""

    JOINED = "joined"
    DATA = "data"
    LOST = "lost"


class Event(NamedTuple):
    """Something that happened at a hub or spoke: ``data`` is the message, or why the peer is lost."""

    kind: EventKind
    peer: bytes
    data: bytes = b""
    at: float = 0.0  # when a message was read, monotonic seconds


class Events:
    """Events of one socket, in order; the thread that fills it asks ``full`` before it reads more.

    ``relieved`` is called when ``get`` has taken one while it was full: the thread may read again.

    >>> events = Events()
    >>> events.put(Event(EventKind.DATA, b"peer", b"hello"))
    >>> events.get(1.0).data, events.get(0.0)
    (b'hello', None)
    """

    def __init__(
        self,
        limit: int = LIMIT,
        limit_nbytes: int = LIMIT_NBYTES,
        relieved: Callable[[], object] = lambda: None,
    ) -> None:
        self._changed = Condition()
        self._events: deque[Event] = deque()
        self._nbytes = 0  # of the events that wait
        self._limit, self._limit_nbytes, self._relieved = limit, limit_nbytes, relieved
        self._woken = False
        self._error: Exception | None = None

    @property
    def full(self) -> bool:
        """Whether no more should be read now: one message may have gone beyond the limit."""
        return len(self._events) >= self._limit or self._nbytes >= self._limit_nbytes

    def put(self, event: Event) -> None:
        """Add an event and wake whoever waits."""
        with self._changed:
            self._events.append(event)
            self._nbytes += len(event.data)
            self._changed.notify_all()

    def wake(self) -> None:
        """Let a waiting ``get``, or the next one, return None at once."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def fail(self, error: LinkError) -> None:
        """Raise ``error`` from ``get`` once the kept events are out; the first error stays."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def get(self, timeout: float) -> Event | None:
        """Return the next event, or None after ``timeout`` seconds or a ``wake``."""
        end = monotonic() + timeout
        with self._changed:
            while not self._events:
                if self._error is not None:
                    raise renewed(self._error)
                if self._woken or not self._changed.wait(max(0.0, end - monotonic())):
                    if self._events:
                        break
                    self._woken = False
                    return None
            full = self.full  # asked with the lock held: it may have come to be so since ``get`` was called
            event = self._events.popleft()
            self._nbytes -= len(event.data)
        if full:
            self._relieved()
        return event
