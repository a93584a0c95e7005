"""The two windows of a reliable link, without threads or clocks of their own.

The link below keeps the order of what it does deliver. So a gap is proof of loss, and whether a repair
arrived is known as soon as anything sent after it does: nothing is sent again merely because it is slow.
"""

from __future__ import annotations

import math
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

from thinwire.links.message import Message, Parts
from thinwire.links.pair.buffers import Assembly, joined
from thinwire.links.pair.segment import FIRST, HEADER, LENGTH, NACK, RANGE, Kind
from thinwire.types import PayloadError, require

MAX_RANGES = 64  # in one NACK; the rest is asked for later
MAX_ASKED = 4096  # numbers in one NACK
MAX_AHEAD = 4096  # segments kept beyond a gap; later ones are dropped and asked for again


@dataclass
class SentSegment:
    """A segment that the peer has not acknowledged."""

    kind: Kind
    label: str
    body: Message
    done: tuple[Future[None], ...]  # of the messages that end with it
    at: float | None  # seconds, when it was sent first; None where that says nothing about the rate
    repair: int = 0  # the round in which it was sent again last


@dataclass(frozen=True)
class Acked:
    """Segments that were acknowledged together: what can be measured by them."""

    nbytes: int  # headers included
    first: float = -math.inf  # seconds, when the first and the last of them were sent
    last: float = -math.inf
    clean: bool = True  # none of them was sent twice, or before there was a peer


class SendWindow:
    """What was sent and not acknowledged. Memory: those messages, at most ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.top = 0  # highest number sent
        self.repair = 0  # newest repair round answered
        self.flight = 0  # bytes not acknowledged
        self._acked = 0
        self._sent: dict[int, SentSegment] = {}

    def __len__(self) -> int:
        return len(self._sent)

    @property
    def acknowledged(self) -> int:
        """Every number up to here has been acknowledged."""
        return self._acked

    def add(self, kind: Kind, label: str, body: Message, now: float | None, *done: Future[None]) -> int:
        """Keep a segment and return its number. ``done``: of the messages that end with it."""
        self.top += 1
        self.flight += len(body)
        self._sent[self.top] = SentSegment(kind, label, body, done, now)
        return self.top

    def acknowledge(self, ack: int) -> tuple[list[Future[None]], Acked | None]:
        """Forget all up to ``ack``; return the sends that are done, and the run if this was news."""
        require(
            ack <= self.top, PayloadError, f"an acknowledgement of {ack}, but {self.top} segments were sent"
        )
        run = [self._sent.pop(number) for number in range(self._acked + 1, ack + 1)]
        self._acked = max(self._acked, ack)
        self.flight -= sum(len(sent.body) for sent in run)
        return [done for sent in run for done in sent.done], _run(run)

    def oldest(self) -> tuple[int, float] | None:
        """Return size and departure of the segment that waits longest; None where that says nothing."""
        sent = self._sent.get(self._acked + 1)
        return None if sent is None or sent.at is None else (HEADER + len(sent.body), sent.at)

    def again(self, body: memoryview) -> tuple[int, list[tuple[int, SentSegment]]]:
        """Return a NACK's repair round and the segments it asks for, less those on their way again already.

        The caller sends them, and only then sets ``repair`` to the round.
        """
        require(
            len(body) >= NACK.size and (len(body) - NACK.size) % RANGE.size == 0, PayloadError, "bad NACK"
        )
        repair, seen = NACK.unpack_from(body)
        found = []
        for first, count in RANGE.iter_unpack(body[NACK.size :]):
            for number in range(first, min(first + count, first + MAX_ASKED, self.top + 1)):
                sent = self._sent.get(number)
                if sent is not None and sent.repair <= seen:
                    sent.repair = repair
                    found.append((number, sent))
        return max(self.repair, repair), found

    def drain(self) -> list[Future[None]]:
        """Forget everything; return the sends that will never be done."""
        pending = [done for sent in self._sent.values() for done in sent.done]
        self._sent.clear()
        return pending


class ReceiveWindow:
    """Puts segments in order and messages together, drops repetitions, knows what is missing."""

    def __init__(self, max_message: int) -> None:
        self.got = 0  # every number up to here has arrived
        self.repeated = 0  # segments that came more than once
        self.seen = 0  # newest repair round answered by the peer
        self._max_message = max_message
        self._top = 0  # highest number known to be sent
        self._ahead: dict[int, tuple[Kind, tuple[memoryview, ...]]] = {}
        self._parts: list[memoryview] = []  # of a message of which nobody has said how large it is
        self._size = 0  # bytes in the parts
        self._whole: tuple[bytes, Assembly] | None = None  # the head of a message, and where the rest goes
        self._asked: dict[int, int] = {}  # number -> repair round in which it was asked for
        self._round = 0
        self._ask_again = 0.0  # when to stop waiting for the answer to the newest NACK
        self._backoff = 0.0

    @property
    def complete(self) -> bool:
        """Whether nothing that is known to be sent is missing."""
        return self.got >= self._top

    def accept(self, number: int, kind: Kind, *body: memoryview) -> list[Message]:
        """Take a data segment, whose body may be in parts; return the messages that it completes, in order.

        Errors: ``PayloadError`` for what no sender makes.
        """
        self._top = max(self._top, number)
        if number <= self.got or number in self._ahead:
            self.repeated += 1
            return []
        if number > self.got + MAX_AHEAD:
            return []
        self._ahead[number] = (kind, body)
        whole: list[Message] = []
        while (got := self._ahead.pop(self.got + 1, None)) is not None:
            self.got += 1
            self._asked.pop(self.got, None)
            whole += self._join(*got)
        return whole

    def note(self, top: int, repair: int) -> None:
        """Learn that the peer had sent ``top`` segments and answered ``repair`` before what just came."""
        self._top = max(self._top, top)
        self.seen = max(self.seen, repair)

    def nack(self, now: float, patience: float) -> bytes | None:
        """Return the body of a NACK for what is lost, or None where nothing is or the answer is still due.

        ``patience``: seconds to wait for an answer before asking again, doubled each time.
        """
        if self.complete:
            self._backoff = 0.0
            return None
        overdue = bool(self._asked) and now > self._ask_again
        lost = [n for n in self._missing() if overdue or self._asked.get(n, 0) <= self.seen]
        if not lost:
            return None
        self._round += 1
        self._backoff = min(10.0, 2 * self._backoff) if overdue else patience
        self._ask_again = now + max(patience, self._backoff)
        ranges = _ranges(lost)[:MAX_RANGES]
        for first, count in ranges:
            self._asked.update(dict.fromkeys(range(first, first + count), self._round))
        return NACK.pack(self._round, self.seen) + b"".join(RANGE.pack(*r) for r in ranges)

    def _missing(self) -> list[int]:
        end = min(self._top, self.got + MAX_ASKED)
        return [n for n in range(self.got + 1, end + 1) if n not in self._ahead]

    def _join(self, kind: Kind, body: tuple[memoryview, ...]) -> list[Message]:
        if kind in (Kind.FIRST, Kind.MANY):
            require(not self._parts and self._whole is None, PayloadError, "a message begins within another")
            return self._begin(*body) if kind == Kind.FIRST else _several(body)
        if self._whole is not None:
            head, rest = self._whole
            for part in body:
                rest.add(part)
            if kind != Kind.DATA:
                return []
            self._whole = None
            return [Parts(head, rest.result())]
        self._parts += body
        self._size += sum(map(len, body))
        self._check(self._size)
        if kind != Kind.DATA:
            return []
        parts, self._parts, self._size = self._parts, [], 0
        return [parts[0] if len(parts) == 1 else Parts(*parts)]

    def _begin(self, first: memoryview, *rest: memoryview) -> list[Message]:
        """Make room for a message of which the first piece has come."""
        require(len(first) >= FIRST.size, PayloadError, "a first piece without the size of its message")
        size, head = FIRST.unpack_from(first)
        self._check(size)
        require(head <= min(size, len(first) - FIRST.size), PayloadError, "a first piece without its head")
        end = FIRST.size + head
        whole = Assembly(size - head)
        for part in (first[end:], *rest):
            whole.add(part)
        self._whole = bytes(first[FIRST.size : end]), whole
        return []

    def _check(self, size: int) -> None:
        too_large = f"a message is larger than the limit of {self._max_message} bytes"
        require(size <= self._max_message, PayloadError, too_large)


def _several(parts: tuple[memoryview, ...]) -> list[Message]:
    """Return the messages of a segment of several."""
    filled = [part for part in parts if part]
    body = filled[0] if len(filled) == 1 else memoryview(joined(filled))
    found: list[Message] = []
    end, size = 0, len(body)
    while end < size:
        begin = end + LENGTH.size
        require(begin <= size, PayloadError, "a segment of several messages ends in a length")
        end = begin + LENGTH.unpack_from(body, end)[0]
        require(end <= size, PayloadError, "a segment of several messages ends within one")
        found.append(body[begin:end])
    return found


def _run(segments: list[SentSegment]) -> Acked | None:
    if not segments:
        return None
    nbytes = sum(HEADER + len(sent.body) for sent in segments)
    first, last = segments[0].at, segments[-1].at
    if first is None or last is None or any(sent.repair for sent in segments):
        return Acked(nbytes, clean=False)
    return Acked(nbytes, first, last)


def _ranges(numbers: list[int]) -> list[tuple[int, int]]:
    ranges: deque[tuple[int, int]] = deque()
    for n in numbers:
        if ranges and sum(ranges[-1]) == n:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + 1)
        else:
            ranges.append((n, 1))
    return list(ranges)
