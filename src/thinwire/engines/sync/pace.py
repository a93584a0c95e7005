"""How many bytes may be on their way to one follower, from its acknowledgements; no threads, no clock.

A window of delivery rate x shortest round trip keeps the line busy and leaves next to nothing in queues, so a
newer version need not wait behind an older one, whatever the sockets on the way could buffer.

Source: BBR (Cardwell et al. 2016): maximum of the delivery rate, minimum of the round trip, a fast start.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from thinwire.types import PayloadError, require

GAIN, START = 1.25, 2.0  # of the round trip's bytes: when the rate is known, and while it still grows
SLACK = 0.010  # seconds of bytes above that: how late this process may notice an acknowledgement
GROWN, STEADY = 1.25, 3  # the rate is known once it has not grown by so much for so many rounds
ROUNDS = 10  # round trips that a rate counts
STALE = 10.0  # seconds after which the round trip is measured anew, with a window of two chunks
CHUNK_TIME = 0.010  # seconds of line that a chunk takes
MIN_CHUNK, MAX_CHUNK = 1 << 12, 1 << 18  # bytes
MAX_WINDOW = 1 << 24  # bytes


@dataclass(frozen=True)
class _Sent:
    total: int  # bytes sent, this chunk included
    at: float
    delivered: int  # bytes acknowledged when it left
    delivered_at: float  # when the last of those was
    first_at: float  # when the chunk acknowledged last had left
    full: bool  # the window was used up: its rate tells what the line can do
    alone: bool  # next to nothing was before it: its trip tells how long the way is


class Pace:
    """The window of one follower: ``room`` says what may be sent, ``sent`` and ``acked`` move it.

    >>> pace = Pace()
    >>> pace.sent(pace.room, now=0.0)
    >>> pace.room
    0
    >>> pace.acked(8192, now=0.1)
    >>> pace.rate, pace.room
    (81920.0, 17203)
    """

    def __init__(self) -> None:
        self.total = 0  # bytes sent
        self.delivered = 0  # bytes acknowledged
        self.trip: float | None = None  # the shortest round trip in seconds
        self._trip_at = -math.inf
        self._delivered_at = self._first_at = -math.inf
        self._sent: deque[_Sent] = deque()
        self._rates: deque[tuple[int, float]] = deque()  # round, rate
        self._round, self._round_ends = 0, 0
        self._plateau, self._steady = 0.0, 0
        self._probing = False

    @property
    def rate(self) -> float | None:
        """Bytes per second that the line carries; None where nothing was measured yet."""
        return max((rate for _, rate in self._rates), default=None)

    @property
    def flight(self) -> int:
        """Bytes sent and not acknowledged."""
        return self.total - self.delivered

    @property
    def chunk(self) -> int:
        """Bytes that the next chunk should have."""
        return int(min(max((self.rate or 0.0) * CHUNK_TIME, MIN_CHUNK), MAX_CHUNK))

    @property
    def window(self) -> int:
        """Bytes that may be on their way; never below two chunks."""
        least = 2 * self.chunk
        if self.rate is None or self.trip is None or self._probing:
            return least
        gain = GAIN if self._steady >= STEADY else START
        return int(min(max(least, self.rate * (gain * self.trip + SLACK)), MAX_WINDOW))

    @property
    def room(self) -> int:
        """Bytes that may be sent now."""
        return max(0, self.window - self.flight)

    def sent(self, nbytes: int, now: float) -> None:
        """Note that ``nbytes`` leave."""
        if not self.flight:
            self._delivered_at = self._first_at = now
        self._probing = self._probing or (now - self._trip_at > STALE and self.trip is not None)
        alone = self.flight <= self.chunk
        self.total += nbytes
        full = self.flight + self.chunk >= self.window
        self._sent.append(
            _Sent(self.total, now, self.delivered, self._delivered_at, self._first_at, full, alone)
        )

    def acked(self, total: int, now: float) -> None:
        """Note that the follower has ``total`` bytes; ``PayloadError`` where that cannot be."""
        require(
            self.delivered <= total <= self.total,
            PayloadError,
            f"an acknowledgement of {total} bytes, between {self.delivered} and {self.total} expected",
        )
        newest = None
        self.delivered = total
        while self._sent and self._sent[0].total <= total:
            newest = self._sent.popleft()
        self._delivered_at = now
        if newest is not None:
            self._first_at = newest.at
            self._tripped(newest, now)
            self._rated(newest, now)

    def left(self, nbytes: int) -> float:
        """Return how many seconds ``nbytes`` take from now; infinite while the rate is not known."""
        return (nbytes + self.flight) / self.rate if self.rate else math.inf

    def _tripped(self, chunk: _Sent, now: float) -> None:
        trip = now - chunk.at
        if self.trip is None or trip <= self.trip or (self._probing and chunk.alone):
            self.trip, self._trip_at, self._probing = trip, now, False

    def _rated(self, chunk: _Sent, now: float) -> None:
        # acknowledgements may come in bursts: no faster than the chunks had left
        took = max(now - chunk.delivered_at, chunk.at - chunk.first_at, 1e-6)
        rate = (self.delivered - chunk.delivered) / took
        if chunk.delivered >= self._round_ends:
            self._next_round()
        if chunk.full or rate > (self.rate or 0.0):
            self._rates.append((self._round, rate))
        while self._rates and self._rates[0][0] < self._round - ROUNDS and len(self._rates) > 1:
            self._rates.popleft()

    def _next_round(self) -> None:
        self._round += 1
        self._round_ends = self.total
        grown = (self.rate or 0.0) > self._plateau * GROWN
        self._steady = 0 if grown else self._steady + 1
        if grown:
            self._plateau = self.rate or 0.0
