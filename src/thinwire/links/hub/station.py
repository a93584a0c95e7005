"""What hub and spoke share: a heartbeat, the bytes of their messages, and events in a bounded queue."""

from __future__ import annotations

import enum
import struct
from collections import deque
from collections.abc import Callable
from threading import Condition
from time import monotonic
from typing import Any, NamedTuple

import zmq

from thinwire.links.inbox import ASLEEP, renewed
from thinwire.links.pair.buffers import keep_freed
from thinwire.links.sockets import IDLE, PolledSocket, open_socket
from thinwire.types import InputError, LinkError, require

HEARTBEAT = 1.0  # seconds between two pings of a spoke, at most
BEATS = 4  # pings within the silence after which an end counts as lost, at least
SILENCE = 10.0  # seconds without a sign of life after which the other end counts as lost
QUEUED = 256  # small messages that libzmq queues for one peer
LARGE = 16  # and large ones: of these a few fill the line, and libzmq counts messages, not bytes
BLOCKED = 10  # milliseconds before a message that found no room is offered again
IDENTITY = 16  # bytes of a spoke's name
PING, PONG, DATA, BYE, ALIVE = range(5)  # a message's first byte
STAMP = struct.Struct("<Bd")  # a ping: the spoke's clock, which only the spoke reads
ANSWER = struct.Struct("<Bdd")  # a pong: that again, and the hub's clock
DATA_BYTE, BYE_BYTE, ALIVE_BYTE = bytes([DATA]), bytes([BYE]), bytes([ALIVE])
LIMIT = 1024  # events that wait; the sockets are not read while there are more
LIMIT_NBYTES = 1 << 25  # or while they hold so many bytes: more than a feed sends unacknowledged


class Station(PolledSocket):
    """A polled socket with a heartbeat, and what it reports; the base of ``Hub`` and ``Spoke``."""

    def __init__(
        self, sock: zmq.Socket[bytes], watched: int, where: str, silence: float, **more: Any
    ) -> None:
        super().__init__(sock, watched, where, **more)
        keep_freed()
        self._silence = silence
        self._heartbeat = min(HEARTBEAT, silence / BEATS)  # seconds
        self._idle = min(IDLE, max(1, int(1000 * self._heartbeat / 2)))  # milliseconds
        self._events = Events(relieved=self._bell.ring)
        self._turned = monotonic()  # when the thread checked the time last

    def recv(self, timeout: float) -> Event | None:
        """Return the next event; None after ``timeout`` seconds, or at once after ``wake``.

        Errors: ``LinkError`` once the socket is closed or has failed.
        """
        return self._events.get(timeout)

    def wake(self) -> None:
        """Let whoever waits in ``recv`` return, from any thread."""
        self._events.wake()

    # the thread

    def _reads(self) -> bool:
        return not self._events.full

    def _pause(self) -> int:
        return BLOCKED if self._waiting() else self._idle

    def _check(self) -> None:
        now = monotonic()
        # this end did not read, or its process was stopped: no silence of the other's
        excused, self._turned = self._events.full or now - self._turned > ASLEEP, now
        self._check_silence(now, excused)

    def _check_silence(self, now: float, excused: bool) -> None:
        """Find out who fell silent; where ``excused``, this end could not have heard them."""
        raise NotImplementedError

    def _fail(self, error: LinkError) -> None:
        self.error = self.error or error
        self._events.fail(self.error)


def station_socket(
    kind: int, max_message: int, sends: int = QUEUED, takes: int = QUEUED
) -> zmq.Socket[bytes]:
    """Return a socket that takes messages of at most ``max_message`` bytes, besides their kind.

    ``sends`` and ``takes``: how many of them libzmq queues for a peer, and from one.
    """
    sock = open_socket(kind, max_message + 1, sends)
    sock.rcvhwm = takes
    sock.handshake_ivl = int(SILENCE * 1000)
    return sock


def check_silence(silence: float) -> None:
    """Raise ``InputError`` unless so many seconds without a sign of life can be told from none."""
    require(silence > 0, InputError, f"silence={silence} s is not above 0; an end would be lost at once")


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
