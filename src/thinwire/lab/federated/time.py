"""Virtual time: what happens next, and the server's line that all transfers share."""

from __future__ import annotations

import heapq
from typing import Generic, NamedTuple, TypeVar

from thinwire.links.trace import ConstantRate, Rate

T = TypeVar("T")


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


class SharedLine:
    """One direction of the server's link, which messages take in the order in which they begin.

    A message is on the server's line and on the client's at once, so that it has come when both have let all
    of it through.

    >>> line = SharedLine(ConstantRate(1000.0))
    >>> [line.take(begin=0.0, nbytes=500, own=ConstantRate(400.0)) for _ in range(3)]
    [1.25, 1.75, 2.25]
    """

    def __init__(self, rate: Rate | None = None) -> None:
        self._rate = rate or ConstantRate()
        self._free = 0.0

    def take(self, begin: float, nbytes: float, own: Rate) -> float:
        """Return when a message that begins at ``begin`` is through both lines."""
        start = max(begin, self._free)
        self._free = self._rate.finish(start, nbytes)
        return max(self._free, own.finish(start, nbytes))
