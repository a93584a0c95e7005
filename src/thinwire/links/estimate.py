"""What a reliable link measures as it goes: round trip from heartbeats, rate from acknowledgements."""

from __future__ import annotations

from collections import deque

from thinwire.links.base import LinkEstimate
from thinwire.links.window import Sample

KEPT = 64  # samples; older ones say little about a changing link
GAIN = 0.125  # of the smoothed round trip (RFC 6298)
FLOOR = 1e-6  # seconds; the clock's grain


class Estimator:
    """Collect round trips and rate samples; both use this end's clock alone."""

    def __init__(self) -> None:
        self.smoothed: float | None = None  # seconds, queues included
        self._trips: deque[float] = deque(maxlen=KEPT)
        self._samples: deque[Sample] = deque(maxlen=KEPT)
        self._updated: float | None = None

    @property
    def shortest(self) -> float | None:
        """The least of the recent round trips in seconds: what the way itself takes."""
        return min(self._trips, default=None)

    @property
    def trips(self) -> int:
        """How many recent round trips there are."""
        return len(self._trips)

    def round_trip(self, seconds: float, now: float) -> None:
        """Note the round trip of a heartbeat."""
        self._trips.append(seconds)
        before = seconds if self.smoothed is None else self.smoothed
        self.smoothed = before + GAIN * (seconds - before)
        self._updated = now

    def delivered(self, sample: Sample, now: float) -> None:
        """Note that some bytes were acknowledged."""
        self._samples.append(sample)
        self._updated = now

    def estimate(self, now: float) -> LinkEstimate:
        """Return rate (bytes over the time they kept the line busy), round trip and age."""
        age = None if self._updated is None else now - self._updated
        return LinkEstimate(self._rate(), self.shortest, age)

    def _rate(self) -> float | None:
        trip = self.shortest or 0.0
        rates = sorted((s.nbytes / max(s.seconds - trip, FLOOR), s.nbytes) for s in self._samples)
        half = sum(weight for _, weight in rates) / 2
        for rate, weight in rates:  # the median by bytes: a cut or a stalled thread spoils single samples
            half -= weight
            if half <= 0:
                return rate
        return None
