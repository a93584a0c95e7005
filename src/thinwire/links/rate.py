"""The rate of a link from what was acknowledged: bursts, and their quantile, which withstands outliers.

A message that the line carries faster than clocks and threads can tell says only that the rate is at least
so much. Such floors count where they contradict the measurements, and nowhere else.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from thinwire.links.window import Run

RESOLVED = 0.002  # seconds of line time below which a burst gives a floor and no measurement
CHUNK = 0.1  # seconds of line time after which a long burst begins another entry
PAUSE = 0.2  # share of a burst's time that may have been an idle line
WINDOW = 3.0  # seconds that entries count
LEAST = 5  # entries that count, however old,
STALE = 30.0  # seconds, until there are newer ones
KEPT = 64  # entries at most
TOLERANCE = 1.25  # factor between two rates that are still called equal
FALL, RISE = 3, 2  # entries in a row that make a change: lateness only ever feigns a fall
QUANTILE = 0.6  # by bytes, above the median: what disturbs a message makes it later, never earlier


@dataclass
class Burst:
    """Bytes that the line carried without a pause; grows with each acknowledgement until ``CHUNK``."""

    start: float  # seconds by the peer's clock
    follows: bool  # it began where another ended, not on an idle line
    nbytes: int = 0
    seconds: float = 0.0  # line time
    at: float = 0.0  # when it was acknowledged, by this end's clock
    paused: bool = False  # the line may have been idle in between

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


class RateMeter:
    """Turn acknowledged runs into bursts and these into a rate; without a clock of its own."""

    def __init__(self) -> None:
        self._bursts: deque[Burst] = deque(maxlen=KEPT)
        self._newest: float | None = None  # arrival of the newest run, by the peer's clock

    def add(self, run: Run, way: float, arrived: float, now: float) -> None:
        """Note that a run arrived at ``arrived`` by the peer's clock.

        ``way``: the least difference between a segment's arrival there and its departure here, by the two
        clocks: one-way delay and the clocks' offset together.
        """
        before, self._newest = self._newest, arrived
        idle = before is None or run.first + way > before
        start = run.first + way if before is None else max(run.first + way, before)
        paused = run.last + way - start > PAUSE * (arrived - start)
        burst = self._bursts[-1] if self._bursts else None
        if burst is None or idle or burst.paused or burst.seconds >= CHUNK:
            burst = Burst(start, follows=not idle)
            self._bursts.append(burst)
        burst.nbytes += run.nbytes
        burst.seconds = max(0.0, arrived - burst.start)
        burst.at, burst.paused = now, paused
        while now - self._bursts[0].at > STALE:
            self._bursts.popleft()
        if burst.floor and burst.follows:  # the arrival before was late, so this one seems fast
            self._bursts.pop()
        self._turn()

    def interrupted(self, arrived: float) -> None:
        """Note an arrival that says nothing of the rate: something was lost and sent again."""
        self._newest = arrived

    def measured(self, now: float) -> tuple[float, bool, float] | None:
        """Return the rate in bytes/s, whether it is a floor only, and its age in seconds; None before any."""
        bursts = self._recent(now)
        found = _quantile(bursts)
        if found is None:
            return None
        return found.rate, found.floor, now - max(b.at for b in bursts if b.floor == found.floor)

    def _recent(self, now: float) -> list[Burst]:
        bursts = list(self._bursts)
        young = [b for b in bursts if now - b.at <= WINDOW]
        return bursts[-LEAST:] if len(young) < LEAST else young

    def _turn(self) -> None:
        """Forget what was before the newest bursts where all of these contradict it in one direction."""
        for count, direction in ((FALL, -1), (RISE, 1)):
            old, new = list(self._bursts)[:-count], list(self._bursts)[-count:]
            level = _quantile(old[-LEAST:])
            if level is not None and all(b.contradicts(level.rate) == direction for b in new):
                self._bursts = deque(new, maxlen=KEPT)


def _quantile(bursts: list[Burst]) -> Burst | None:
    """Return the burst with the quantile of the rates by bytes; floors count above the measurements only."""
    measured = _at_quantile([b for b in bursts if not b.floor])
    if measured is None:
        return max(bursts, key=lambda b: b.rate, default=None)
    return _at_quantile([b for b in bursts if not b.floor or b.contradicts(measured.rate) > 0])


def _at_quantile(bursts: list[Burst]) -> Burst | None:
    left = QUANTILE * sum(b.nbytes for b in bursts)
    for burst in sorted(bursts, key=lambda b: b.rate):
        left -= burst.nbytes
        if left <= 0:
            return burst
    return None
