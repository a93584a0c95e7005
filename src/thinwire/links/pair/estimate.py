"""What a reliable link measures as it goes: round trips of heartbeats, the rate from acknowledgements."""

from __future__ import annotations

import math
from collections import deque

from thinwire.links.base import LinkEstimate
from thinwire.links.pair.rate import RateMeter
from thinwire.links.pair.segment import TICK, TICKS
from thinwire.links.pair.window import Acked
from thinwire.links.tcp.idle import rounds

WINDOW = 10.0  # seconds that the shortest round trip counts; as long as BBR's [memory]
LEAST = 4  # round trips that count, however old
GAIN = 0.125  # of the smoothed round trip (RFC 6298)
STALLED = 0.5  # seconds beyond the round trip after which what is not acknowledged speaks of the rate


class Estimator:
    """Collect round trips and arrivals.

    Arrivals are by the peer's clock, so an acknowledgement may itself be late, behind the traffic of the
    other direction: only differences of one clock count, and the least difference between the two. ``since``:
    nothing that was sent before counts. ``restarts``: whether the TCP below shuts its window in pauses.
    """

    def __init__(self, since: float = -math.inf, restarts: bool = False) -> None:
        self.restarts = restarts
        self.smoothed: float | None = None  # seconds, queues included
        self.trips = 0  # round trips measured
        self._since = since
        self._clock = _TickClock()
        self._trips: deque[tuple[float, float, float]] = deque()  # when, round trip, way there
        self._meter = RateMeter()
        self._acknowledged = -math.inf
        self._updated: float | None = None

    @property
    def shortest(self) -> float | None:
        """The least of the recent round trips in seconds: what the way itself takes."""
        return min((trip for _, trip, _ in self._trips), default=None)

    def round_trip(self, sent: float, ticks: int, now: float) -> None:
        """Note the answer to a heartbeat that left at ``sent``, and the peer's clock as it arrived there."""
        if sent < self._since:
            return
        trip = now - sent
        self.trips += 1
        self._trips.append((now, trip, self._clock.seconds(ticks) - sent))
        while len(self._trips) > LEAST and now - self._trips[0][0] > WINDOW:
            self._trips.popleft()
        before = trip if self.smoothed is None else self.smoothed
        self.smoothed = before + GAIN * (trip - before)
        self._updated = now

    def delivered(self, run: Acked, ticks: int, now: float) -> None:
        """Note that segments were acknowledged, and the peer's clock when the last of them arrived."""
        arrived = self._clock.seconds(ticks)
        self._acknowledged = now
        if not run.clean or run.first < self._since:
            self._meter.interrupted(arrived)
        elif self._trips:
            trip = self.shortest if self.restarts else None
            self._meter.add(run, min(way for _, _, way in self._trips), arrived, now, trip)

    def estimate(self, now: float, oldest: tuple[int, float] | None = None) -> LinkEstimate:
        """Return rate, round trip and the rate's age.

        ``oldest``: size and departure of the segment that waits longest for its acknowledgement; after a
        while it shows that the rate has fallen before any measurement can.
        """
        age = None if self._updated is None else now - self._updated
        rate, floor = None, False
        measured = self._meter.measured(now)
        if measured is not None:
            rate, floor, age = measured
        if oldest is not None and self._trips:
            nbytes, sent = oldest
            trips = [trip for _, trip, _ in list(self._trips)[-LEAST:]]
            expected = 1 + (rounds(nbytes) if self.restarts else 0)  # round trips
            waited = now - max(sent, self._acknowledged) - expected * max(trips)
            if waited > STALLED and (rate is None or nbytes / waited < rate):
                rate, floor, age = nbytes / waited, False, 0.0
        return LinkEstimate(rate, self.shortest, age, floor)


class _TickClock:
    """The peer's clock in seconds from its ticks, which begin again at ``TICKS``."""

    def __init__(self) -> None:
        self._ticks: int | None = None

    def seconds(self, ticks: int) -> float:
        before = ticks if self._ticks is None else self._ticks
        self._ticks = before + (ticks - before + TICKS // 2) % TICKS - TICKS // 2
        return self._ticks * TICK
