"""How far another machine's clock is ahead of this one's, from the round trips of time stamps."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

DRIFT = 1e-4  # seconds a second that two cheap clocks may run apart
KEPT = 64  # samples
ROUNDING = 1e-6  # seconds: times since the epoch are floats, good to a quarter of that


class _Sample(NamedTuple):
    at: float  # by this clock, seconds
    trip: float
    ahead: float

    def doubt(self, now: float) -> float:
        """Return by how much the sample may be wrong at ``now``, in seconds."""
        return self.trip / 2 + DRIFT * abs(now - self.at)

    def agrees(self, new: _Sample) -> bool:
        """Return whether this and a newer sample may be of the same two clocks, which only drift."""
        return abs(new.ahead - self.ahead) <= self.doubt(new.at) + new.doubt(new.at) + ROUNDING


class PeerClock:
    """Estimate the peer's clock: of the recent samples, the one whose error is bounded best.

    A stamp read by the peer between ``sent`` and ``received`` is wrong by half the round trip at most, and
    gets worse by the drift of the clocks (the clock filter of NTP, RFC 5905, chooses likewise). Two samples
    that are further apart than both may be wrong cannot be of the same clocks: one of these was set, or stood
    still while its machine slept. What is older is forgotten then, however short its trip was.

    >>> clock = PeerClock()
    >>> clock.add(sent=10.0, theirs=15.5, received=11.0)
    >>> clock.add(sent=12.0, theirs=17.1, received=12.2)
    >>> round(clock.ahead, 3), round(clock.trip, 3)
    (5.0, 0.2)
    """

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=KEPT)

    def add(self, sent: float, theirs: float, received: float) -> None:
        """Note a stamp ``theirs`` in answer to a message that left at ``sent`` and came back at ``received``.

        All in seconds; a trip that ends before it began, or a number that is none, does not count.
        """
        if received >= sent and all(map(math.isfinite, (sent, theirs, received))):
            new = _Sample(received, received - sent, theirs - (sent + received) / 2)
            kept = [s for s in self._samples if s.agrees(new)]
            self._samples = deque([*kept, new], maxlen=KEPT)  # replaced as one: others read it meanwhile

    @property
    def ahead(self) -> float:
        """Seconds to add to this clock to get the peer's; 0 while nothing is known."""
        return self._best.ahead if self._samples else 0.0

    @property
    def doubt(self) -> float:
        """Bound on the error of ``ahead`` in seconds; infinite while nothing is known."""
        return self._best.doubt(self._samples[-1].at) if self._samples else math.inf

    @property
    def trip(self) -> float | None:
        """The least of the recent round trips in seconds."""
        return min((s.trip for s in list(self._samples)), default=None)

    @property
    def _best(self) -> _Sample:
        samples = list(self._samples)
        return min(samples, key=lambda s: s.doubt(samples[-1].at))
