"""Messages that wait to be sent, and how they are cut into segments or put together in one."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from thinwire.links.inbox import pending
from thinwire.links.message import Message, Parts, buffers_of
from thinwire.links.pair.buffers import Spare, joined
from thinwire.links.pair.segment import FIRST, LENGTH, Kind

LARGE = 1 << 20  # bytes of a segment's body, at most
SHARED = LARGE // 4  # bytes of a message, at most, that others may share a segment with
SPARE = 24  # buffers for segments of several messages that a queue keeps
SMALL = 1 << 14  # bytes below which it costs less to copy a message than to send it in two frames


class Cut(NamedTuple):
    """What a segment is made of."""

    kind: Kind
    label: str
    body: Message
    at: float | None  # seconds, when the message came; None where that says nothing about the rate
    done: tuple[Future[None], ...] = ()  # of the messages that end with it


@dataclass(slots=True)
class _Waiting:
    head: memoryview
    body: memoryview
    label: str
    at: float | None
    left: int  # bytes of both that are not in segments yet
    sent: int = 0  # and those that are
    done: Future[None] = field(default_factory=pending)

    def take(self, nbytes: int) -> tuple[memoryview, memoryview]:
        """Return the next bytes: what is of the head, and what is of the body."""
        start, head = self.sent, len(self.head)
        self.sent, self.left = start + nbytes, self.left - nbytes
        return self.head[start : self.sent], self.body[max(0, start - head) : max(0, self.sent - head)]


class PieceQueue:
    """Messages in the order in which they came; no threads and no clock.

    On a line that is not fast each message is cut into pieces that are copied into one frame. On a fast one
    a large message is left where it is and several small ones share a segment.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._waiting: deque[_Waiting] = deque()
        self._spare = Spare(LARGE, SPARE)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, message: Message, label: str, at: float | None) -> Future[None]:
        """Put a message at the end; return the future that is done when the peer has it."""
        first, *rest = buffers_of(message) if isinstance(message, Parts) else (b"", message)
        head, body = memoryview(first), memoryview(rest[0] if len(rest) == 1 else joined(rest)).cast("B")
        waiting = _Waiting(head, body, label, at, len(head) + len(body))
        self._waiting.append(waiting)
        self.nbytes += waiting.left
        return waiting.done

    def next(self, piece: int, fast: bool) -> Cut:
        """Take the next segment; ``piece``: bytes of one, at most, where the line is not ``fast``."""
        shared = self._shared() if fast else []
        return self._together(shared) if len(shared) > 1 else self._piece(piece, fast)

    def drain(self) -> list[Future[None]]:
        """Forget everything; return the sends that will never be done."""
        pending, self.nbytes = [waiting.done for waiting in self._waiting], 0
        self._waiting.clear()
        return pending

    def _shared(self) -> list[_Waiting]:
        """Return the messages from the first on that may share a segment."""
        found: list[_Waiting] = []
        label, room = self._waiting[0].label, LARGE
        for waiting in self._waiting:
            left = waiting.left
            room -= LENGTH.size + left
            if waiting.sent or left > SHARED or room < 0 or waiting.label != label:
                break
            found.append(waiting)
        return found

    def _together(self, shared: list[_Waiting]) -> Cut:
        parts: list[bytes | memoryview] = []
        for waiting in shared:
            parts += LENGTH.pack(waiting.left), waiting.head, waiting.body
            self.nbytes -= waiting.left
            self._waiting.popleft()
        done = tuple([waiting.done for waiting in shared])
        return Cut(Kind.MANY, shared[0].label, Parts(b"", self._spare.filled(parts)), shared[0].at, done)

    def _piece(self, piece: int, fast: bool) -> Cut:
        waiting = self._waiting[0]
        begins = not waiting.sent
        most = piece if not fast else LARGE + len(waiting.head) if begins else LARGE
        head, body = waiting.take(min(waiting.left, most))
        self.nbytes -= len(head) + len(body)
        ends = not waiting.left
        if ends:
            self._waiting.popleft()
        kind, done = (Kind.DATA, (waiting.done,)) if ends else (Kind.MORE, ())
        if not fast or len(body) < SMALL:
            return Cut(kind, waiting.label, joined([head, body]) if head else body, waiting.at, done)
        if begins and not ends:
            kind, total = Kind.FIRST, len(head) + len(body) + waiting.left
            return Cut(kind, waiting.label, Parts(FIRST.pack(total, len(head)) + head, body), waiting.at)
        return Cut(kind, waiting.label, Parts(head, body), waiting.at, done)
