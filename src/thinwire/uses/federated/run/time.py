"""Virtual time: what happens next, and the server's line that all transfers share."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from thinwire.links.trace import ConstantRate, Rate

T = TypeVar("T")
STEP = 0.1  # seconds
FASTEST = 1e15  # bytes/s: a line without a limit


class Moment(NamedTuple):
    """When something happens, and in which order if at one time: by client, then by its sequence number."""

    at: float  # virtual seconds
    client: int
    sequence: int


class Agenda(Generic[T]):
    """What is to happen, by moment; of equal moments, what was added first.

    >>> agenda = Agenda[str]()
    >>> agenda.add(Moment(2.0, 0, 0), "late")
    >>> agenda.add(Moment(1.0, 1, 0), "soon")
    >>> agenda.next()
    (Moment(at=1.0, client=1, sequence=0), 'soon')
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Moment, int, T]] = []
        self._added = 0

    def __bool__(self) -> bool:
        return bool(self._heap)

    def add(self, moment: Moment, what: T) -> None:
        """Let something happen at a moment."""
        heapq.heappush(self._heap, (moment, self._added, what))
        self._added += 1

    def next(self) -> tuple[Moment, T]:
        """Take out what happens next."""
        moment, _, what = heapq.heappop(self._heap)
        return moment, what


@dataclass
class Transfer:
    """A message that is on its way through a line; ``then`` is told when it is through."""

    left: float  # bytes
    own: Rate  # of the client's own line
    then: Callable[[float], None]
    rate: float = 0.0  # bytes/s, until the line looks again
    end: float = math.inf  # when it is through at that rate


class SharedLine:
    """One direction of the server's link, of which all transfers get an equal share, as TCP's connections do.

    One whose own line is slower than that leaves the rest to the others (max-min fairness). Rates that vary
    are looked at anew every ``STEP`` seconds.

    >>> line, ends = SharedLine(ConstantRate(1000.0)), []
    >>> for own in (400.0, 5000.0):
    ...     line.add(0.0, 600, ConstantRate(own), ends.append)
    >>> line.due
    1.0
    >>> line.advance(1.0)
    >>> line.due, ends
    (1.5, [1.0])
    """

    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._transfers: list[Transfer] = []
        self._now = 0.0
        self.due = math.inf  # when to call ``advance`` next

    def add(self, now: float, nbytes: float, own: Rate, then: Callable[[float], None]) -> None:
        """Begin a transfer; ``due`` changes."""
        self._move(now)
        self._transfers.append(Transfer(nbytes, own, then))
        self._share()

    def advance(self, now: float) -> None:
        """End the transfers that are through, in the order in which they began; ``due`` changes."""
        self._move(now)
        through = [t for t in self._transfers if t.end <= now]
        self._transfers = [t for t in self._transfers if t.end > now]
        self._share()
        for transfer in through:
            transfer.then(now)

    def _move(self, now: float) -> None:
        for t in self._transfers:
            t.left = max(0.0, t.left - t.rate * (now - self._now))
        self._now = now

    def _share(self) -> None:
        """Give each transfer its rate, and find out when that changes next."""
        left, many = self._capacity(self._rate), len(self._transfers)
        for t in sorted(self._transfers, key=lambda t: self._capacity(t.own)):
            t.rate = min(self._capacity(t.own), left / many)
            t.end = self._now + t.left / t.rate if t.rate > 0 else math.inf
            left, many = left - t.rate, many - 1
        ends = [t.end for t in self._transfers]
        rates = [self._rate, *(t.own for t in self._transfers)]
        varies = bool(self._transfers) and not all(isinstance(rate, ConstantRate) for rate in rates)
        self.due = min([*ends, self._now + STEP] if varies else ends, default=math.inf)

    def _capacity(self, rate: Rate) -> float:
        if isinstance(rate, ConstantRate):
            return min(rate.mean, FASTEST)
        return min(rate.between(self._now, self._now + STEP) / STEP, FASTEST)
