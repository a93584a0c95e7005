"""How late the router was: an emulated delay is true only as far as packets leave when they are due."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

MIN_LIMIT = 1e-3  # seconds
SHARE = 0.05  # of the one-way delay
LATE_SHARE = 0.05  # of the seconds of a run may be late; one always may
_STEPS = 8  # a doubling
_FLOOR = 1e-6  # seconds; the histogram's first bin
_BINS = 30 * _STEPS  # up to 18 minutes


def limit(delay: float) -> float:
    """Return the mean lateness [s] above which a run across a one-way ``delay`` [s] is invalid.

    >>> round(limit(0.05), 6), limit(0.0)
    (0.0025, 0.001)
    """
    return max(MIN_LIMIT, SHARE * delay)


@dataclass(frozen=True)
class PacketLateness:
    """By how much [s] packets were delivered after they were due."""

    packets: int = 0
    mean: float = 0.0
    p99: float = 0.0  # an upper bound, 9 % coarse
    worst: float = 0.0
    worst_second: float = 0.0  # the highest mean within one second
    seconds: int = 0  # in which packets were delivered
    late_seconds: int = 0  # of these, with a mean above the limit


def fault(late: PacketLateness, waited: float, dropped: int, allowed: float) -> str | None:
    """Return why a router did not keep time, or None; ``allowed`` [s] is its ``limit``.

    ``waited``: how long [s] it was ready to run but had no processor, on average. Packets are due from when
    they are read, so what they wait for that shows here alone. ``dropped``: how many the devices had no room
    for meanwhile, which is a loss that nobody ordered.

    >>> fault(PacketLateness(seconds=10, late_seconds=2), 0.0, 0, 0.001)
    'packets were late in 2 of 10 seconds'
    """
    above = f"above the limit of {allowed * 1e3:.2f} ms"
    if late.mean > allowed:
        return f"packets were {late.mean * 1e3:.2f} ms late on average, {above}"
    if late.late_seconds > max(1.0, LATE_SHARE * late.seconds):
        return f"packets were late in {late.late_seconds} of {late.seconds} seconds"
    if waited > allowed:
        return f"the router waited {waited * 1e3:.2f} ms for a processor on average, {above}"
    if dropped > 0:
        return f"packets were lost because the router did not read them in time ({dropped} of them)"
    return None


class LatenessMeter:
    """Add up lateness packet by packet; ``limit`` [s] decides which seconds count as late."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._packets, self._sum, self._worst = 0, 0.0, 0.0
        self._bins = [0] * _BINS
        self._second, self._second_packets, self._second_sum = 0, 0, 0.0
        self._seconds, self._late_seconds, self._worst_second = 0, 0, 0.0

    def add(self, now: float, late: float) -> None:
        """Count a packet delivered at ``now``, ``late`` seconds after it was due."""
        if int(now) != self._second:
            self._close_second()
            self._second = int(now)
        self._packets += 1
        self._sum += late
        self._second_packets += 1
        self._second_sum += late
        if late > self._worst:
            self._worst = late
        bin_ = ceil(log2(late / _FLOOR) * _STEPS) if late > _FLOOR else 0
        self._bins[bin_ if bin_ < _BINS else -1] += 1

    def _close_second(self) -> None:
        self._seconds, self._late_seconds, self._worst_second = self._with_open_second()
        self._second_packets, self._second_sum = 0, 0.0

    def _with_open_second(self) -> tuple[int, int, float]:
        """Return the seconds, those of them that were late, and the worst; the open one with them."""
        if not self._second_packets:
            return self._seconds, self._late_seconds, self._worst_second
        mean = self._second_sum / self._second_packets
        late = self._late_seconds + (mean > self._limit)
        return self._seconds + 1, late, max(self._worst_second, mean)

    def summary(self) -> PacketLateness:
        """Return what was measured so far. The open second counts as it is and stays open."""
        n = self._packets
        mean = self._sum / n if n else 0.0
        seconds, late, worst_second = self._with_open_second()
        return PacketLateness(n, mean, self._p99(), self._worst, worst_second, seconds, late)

    def _p99(self) -> float:
        above = self._packets * 0.01
        for i in range(_BINS - 1, -1, -1):
            above -= self._bins[i]
            if above < 0:
                return min(self._worst, _FLOOR * 2.0 ** (i / _STEPS))
        return 0.0
