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
# Seconds of bytes above that: how late threads may notice an acknowledgement and act on it, and what a kernel
# that paces keeps back. With half of it transfers over bbr took a sixth longer than the line needed.
SLACK = 0.100
GROWN, STEADY = 1.25, 3  # the rate is known once it has not changed by so much for so many rounds
ROUNDS = 10  # round trips that a rate counts
STALE = 5.0  # seconds that a round trip counts; then it is measured anew, with a window of two chunks
EARLY = 0.010  # seconds of line that may be queued where the next patch begins, lest the line waits for it
CHUNK_TIME = 0.010  # seconds of line that a chunk takes
MIN_CHUNK, MAX_CHUNK = 1 << 12, 1 << 18  # bytes
MAX_WINDOW = 1 << 24  # bytes


@dataclass(frozen=True)
class _SentChunk:
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
    (81920.0, 24576)
    """

    def __init__(self) -> None:
        self.total = 0  # bytes sent
        self.delivered = 0  # bytes acknowledged
        self._trips: deque[tuple[float, float]] = deque()  # when, and round trips, rising
        self._alone_at = math.inf  # when one was measured last that had no queue before it
        self._delivered_at = self._first_at = -math.inf
        self._sent: deque[_SentChunk] = deque()
        self._rates: deque[tuple[int, float]] = deque()  # round and rate, rates falling
        self._round, self._round_ends = 0, 0
        self._plateau, self._steady = 0.0, 0
        self._probing = False

    @property
    def rate(self) -> float | None:
        """Bytes per second that the line carries; None where nothing was measured yet."""
        return self._rates[0][1] if self._rates else None

    @property
    def trip(self) -> float | None:
        """The shortest of the recent round trips in seconds; None where nothing was measured yet."""
        return self._trips[0][1] if self._trips else None

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
        """Bytes that may be sent now; where there are any, a whole chunk may."""
        return max(0, self.window - self.flight)

    def sent(self, nbytes: int, now: float) -> None:
        """Note that ``nbytes`` leave."""
        if not self.flight:
            self._delivered_at = self._first_at = now
        self._probing = self._probing or now - self._alone_at > STALE
        alone = self.flight <= self.chunk or self.queued(0) <= EARLY
        self.total += nbytes
        full = self.flight + self.chunk >= self.window
        self._sent.append(
            _SentChunk(self.total, now, self.delivered, self._delivered_at, self._first_at, full, alone)
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

    def queued(self, nbytes: int) -> float:
        """Return how long the line is busy with ``nbytes`` more and what queues before it, in seconds.

        What is on its way already does not count. While the rate is not known, anything takes for ever.
        """
        if not nbytes + self.flight:
            return 0.0
        return (nbytes + self.flight) / self.rate - (self.trip or 0.0) if self.rate else math.inf

    def _tripped(self, chunk: _SentChunk, now: float) -> None:
        trip = now - chunk.at
        if chunk.alone:
            self._alone_at, self._probing = now, False
        elif self.trip is not None and trip > self.trip:
            return  # there was a queue before it
        while self._trips and self._trips[-1][1] >= trip:
            self._trips.pop()
        self._trips.append((now, trip))
        while now - self._trips[0][0] > STALE and len(self._trips) > 1:
            self._trips.popleft()

    def _rated(self, chunk: _SentChunk, now: float) -> None:
        # acknowledgements may come in bursts: no faster than the chunks had left
        took = max(now - chunk.delivered_at, chunk.at - chunk.first_at, 1e-6)
        rate = (self.delivered - chunk.delivered) / took
        if chunk.delivered >= self._round_ends:
            self._next_round()
        if chunk.full or rate > (self.rate or 0.0):
            while self._rates and self._rates[-1][1] <= rate:
                self._rates.pop()
            self._rates.append((self._round, rate))
        while self._rates and self._rates[0][0] < self._round - ROUNDS and len(self._rates) > 1:
            self._rates.popleft()

    def _next_round(self) -> None:
        self._round += 1
        self._round_ends = self.total
        rate = self.rate or 0.0
        if self._plateau / GROWN <= rate <= self._plateau * GROWN:
            self._steady += 1
        else:
            self._steady, self._plateau = 0, rate
