"""What a reliable link measures as it goes: round trips of heartbeats, the rate from acknowledgements."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from thinwire.links.link import LinkEstimate
from thinwire.links.pair.segment import TICK, TICKS
from thinwire.links.pair.window import Acked
from thinwire.links.tcp.idle import FIRST_WINDOW, TIMEOUT, idle_seconds, opened, rounds, waiting

WINDOW = 10.0  # seconds that the shortest round trip counts; as long as BBR's [memory]
LEAST = 4  # round trips that count, however old
GAIN = 0.125  # of the smoothed round trip (RFC 6298)
STALLED = 0.5  # seconds beyond the round trip after which what is not acknowledged speaks of the rate
RESOLVED = 0.002  # seconds of line time below which a burst gives a floor and no measurement
CHUNK = 0.1  # seconds of line time after which a long burst begins another entry
PAUSE = 0.2  # share of a burst's time that may have been an idle line
COUNTED = 3.0  # seconds that entries count
LEAST_ENTRIES = 5  # entries that count, however old,
STALE = 30.0  # seconds, until there is a newer one
KEPT = 64  # entries at most
TOLERANCE = 1.25  # factor between two rates that are still called equal
FALL, RISE = 3, 2  # entries in a row that make a change: lateness only ever feigns a fall
QUANTILE = 0.6  # by bytes, above the median: what disturbs a message makes it later, never earlier


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


@dataclass(eq=False)
class Burst:
    """Bytes that the line carried without a pause; grows with each acknowledgement until ``CHUNK``."""

    start: float  # seconds by the peer's clock
    follows: bool  # it began where another ended, not on an idle line
    nbytes: int = 0
    seconds: float = 0.0  # line time
    at: float = 0.0  # when it was acknowledged, by this end's clock
    paused: bool = False  # the line may have been idle in between
    explained: bool = False  # by TCP's window and the rate that was known: this is news of that rate too

    @property
    def floor(self) -> bool:
        """Whether the rate is at least ``rate``, and perhaps much more."""
        return self.paused or self.seconds < RESOLVED

    @property
    def rate(self) -> float:
        """Bytes/s."""
        return self.nbytes / max(self.seconds, RESOLVED)

    def contradicts(self, rate: float) -> int:
        """Return 1 where this speaks for a higher rate than ``rate``, -1 for a lower one, 0 for neither."""
        expected = self.nbytes / rate
        if self.rate > rate * TOLERANCE and expected - self.seconds > RESOLVED:
            return 1
        lower = not self.floor and self.rate * TOLERANCE < rate and self.seconds - expected > RESOLVED
        return -1 if lower else 0


@dataclass(eq=False)
class Opening:
    """What was sent since the line was idle, and TCP's window then at least; times by the peer's clock."""

    start: float
    window: float  # bytes
    nbytes: int = 0

    def idle(self, arrived: float, trip: float) -> float:
        """Return the share of the time until ``arrived`` for which the line may have been idle."""
        seconds = arrived - self.start + RESOLVED  # heartbeats feel threads that the data's times do not
        return idle_seconds(self.nbytes, seconds, trip, self.window) / seconds

    def explains(self, arrived: float, trip: float, rate: float) -> bool:
        """Say whether a line of ``rate`` bytes/s with such a window may have taken as long, and no longer."""
        line = self.nbytes / rate
        most = line + waiting(line, trip, self.window / rate)
        return line / TOLERANCE - RESOLVED <= arrived - self.start <= most * TOLERANCE + RESOLVED


class RateMeter:
    """Turn acknowledged runs into bursts and these into a rate, their quantile, which withstands outliers.

    A message that the line carries faster than clocks and threads can tell says only that the rate is at
    least so much. Such floors count where they contradict the measurements, and nowhere else.
    """

    def __init__(self) -> None:
        self._bursts: list[Burst] = []
        self._newest: float | None = None  # arrival of the newest run, by the peer's clock
        self._window, self._filled = 0.0, -math.inf  # TCP's in bytes, and when it was last filled
        self._opening: Opening | None = None

    def add(self, run: Acked, way: float, arrived: float, now: float, trip: float | None = None) -> None:
        """Note that a run arrived at ``arrived`` by the peer's clock.

        ``way``: the least difference between a segment's arrival there and its departure here, by the two
        clocks: one-way delay and the clocks' offset together. ``trip``: the round trip, if TCP shuts its
        window in pauses; what it may then have held back tells less of the line.
        """
        before, self._newest = self._newest, arrived
        idle = before is None or run.first + way > before
        start = run.first + way if before is None else max(run.first + way, before)
        paused = run.last + way - start > PAUSE * (arrived - start)
        held = explained = False
        if trip is not None:
            opening, known = self._opened(run, start, arrived, trip, idle), _level(self._bursts, now)
            held = opening.idle(arrived, trip) > PAUSE
            explained = held and known is not None and opening.explains(arrived, trip, known.rate)
        burst = self._bursts[-1] if self._bursts else None
        if burst is None or idle or burst.paused or burst.seconds >= CHUNK:
            burst = Burst(start, follows=not idle)
            self._bursts.append(burst)
        burst.nbytes += run.nbytes
        burst.seconds = max(0.0, arrived - burst.start)
        burst.at, burst.paused, burst.explained = now, paused or held, explained
        if burst.floor and burst.follows:  # the arrival before was late, so this one seems fast
            self._bursts.pop()
        self._fall()
        self._rise()
        self._trim(now)

    def _opened(self, run: Acked, start: float, arrived: float, trip: float, idle: bool) -> Opening:
        """Return what was sent since the line was idle, this run included, and the window then."""
        opening = self._opening
        if opening is None or idle:
            # After a timeout it may be half of what it was, or a tenth: taken for shut, it explains most.
            opening = Opening(start, FIRST_WINDOW if start - self._filled > trip + TIMEOUT else self._window)
        opening.nbytes += run.nbytes
        if run.nbytes > FIRST_WINDOW:  # less leaves the window as it is, to shut
            self._window, self._filled = opened(opening.window, opening.nbytes), arrived
        self._opening = opening
        return opening

    def interrupted(self, arrived: float) -> None:
        """Note an arrival that says nothing of the rate: something was lost and sent again."""
        self._newest = arrived

    def measured(self, now: float) -> tuple[float, bool, float] | None:
        """Return the rate in bytes/s, whether it is a floor only, and its age in seconds; None before any."""
        best = _level(self._bursts, now)
        if best is None:
            return None
        told = (b.at for b in self._bursts if b.floor == best.floor or b.explained)
        return best.rate, best.floor, now - max(told)

    def _fall(self) -> None:
        """Forget what was before the newest measurements if these agree that the rate is a lower one."""
        new = _measurements(self._bursts)[-FALL:]
        if len(new) < FALL:
            return
        since = self._bursts.index(new[0])
        level, lower = _level(self._bursts[:since]), _quantile(new).rate
        # on a line that is slow, none of the size would have been too fast to be measured
        least = min(b.nbytes for b in new)
        whole = [b for b in self._bursts[since:] if b.floor and not b.paused and b.nbytes >= least]
        faster = whole or any(b.floor and b.contradicts(lower) > 0 for b in self._bursts[since:])
        if level is not None and not faster and all(b.contradicts(level.rate) < 0 for b in new):
            del self._bursts[:since]

    def _rise(self) -> None:
        """The same for a higher rate, of which floors can tell too."""
        known = _measurements(self._bursts)
        if not known:
            return
        rate = _quantile(known[-LEAST_ENTRIES:]).rate
        new = [b for b in self._bursts if not b.floor or b.contradicts(rate) > 0][-RISE:]
        level = _level([b for b in known if b not in new])
        if level is not None and all(b.contradicts(level.rate) > 0 for b in new):
            del self._bursts[: self._bursts.index(new[0])]

    def _trim(self, now: float) -> None:
        """Drop what is too old to count or too much to keep; a measurement stays while there is no newer."""
        measured = _measurements(self._bursts)[-KEPT:]
        young = [b for b in measured if now - b.at <= STALE] or measured[-LEAST_ENTRIES:]
        floors = [b for b in self._bursts if b.floor][-KEPT:]
        kept = {id(b) for b in young + floors}
        self._bursts = [b for b in self._bursts if id(b) in kept]


def _measurements(bursts: list[Burst]) -> list[Burst]:
    return [b for b in bursts if not b.floor]


def _level(bursts: list[Burst], now: float | None = None) -> Burst | None:
    """Return the burst that has the rate: of the measurements, and of the floors that are above them.

    ``now``: leave out what is older than ``COUNTED``, except for the newest few measurements.
    """
    known = _recent(_measurements(bursts), now)
    floors = [b for b in bursts if b.floor]
    if not known:
        return max(_recent(floors, now), key=lambda b: b.rate, default=None)
    rate = _quantile(known).rate
    young = [b for b in floors if (now is None or now - b.at <= COUNTED) and b.contradicts(rate) > 0]
    return _quantile(known + young)


def _recent(bursts: list[Burst], now: float | None) -> list[Burst]:
    young = [] if now is None else [b for b in bursts if now - b.at <= COUNTED]
    return bursts[-LEAST_ENTRIES:] if len(young) < LEAST_ENTRIES else young


def _quantile(bursts: list[Burst]) -> Burst:
    """Return the burst with the quantile of the rates by bytes; there is one burst at least."""
    ordered = sorted(bursts, key=lambda b: b.rate)
    left = QUANTILE * sum(b.nbytes for b in bursts)
    for burst in ordered:
        left -= burst.nbytes
        if left <= 0:
            return burst
    return ordered[-1]
