"""When each packet arrives: the emulator's model of time, without sockets and without a clock of its own.

Every rank has an uplink and a downlink; between them, packets take the propagation delay::

    sender ─▶ queue ─▶ uplink ─▶ loss ─▶ delay + jitter ─▶ queue ─▶ downlink ─▶ receiver

A line sends one packet after another, each for nbytes / rate seconds. A downlink takes bytes as they come
from an uplink (cut-through): one that is as fast adds nothing, but two senders to a rank share it. In front
of each line is a queue limited in bytes that drops what does not fit; an idle line takes any packet.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import chain
from random import Random
from typing import Any

from thinwire.links.profile import Profile, one_way
from thinwire.links.trace import Rate

# cut(packet, first, last): a packet of the segments from first to before last, and its bytes on the wire
Cut = Callable[[Any, int, int], tuple[Any, int]]
ROUNDING = 0.5  # bytes; a queue's content is a time multiplied by a rate


@dataclass(slots=True)
class Count:
    """How much went one way."""

    # With segmentation offload one holds many segments. Lost are counted those that lost any; behind a loss,
    # what is left of one are as many as it has parts.
    packets: int = 0
    segments: int = 0
    nbytes: int = 0  # on the wire, headers of every segment included

    def add(self, segments: int, nbytes: int) -> None:
        """Count one packet more."""
        self.packets += 1
        self.segments += segments
        self.nbytes += nbytes


@dataclass(frozen=True)
class LineCounts:
    """What became of the packets of one line."""

    passed: Count  # up: left the rank, lost ones included; down: delivered
    dropped: Count  # found the queue full
    lost: Count  # lost on the way after an uplink; none on a downlink


@dataclass(frozen=True)
class RankCounts:
    """What a rank's two lines have carried so far."""

    up: LineCounts
    down: LineCounts


class _LineQueue:
    """A serialiser behind a queue."""

    def __init__(self, rate: Rate, limit: float) -> None:
        self.rate, self.limit = rate, limit
        self.free = -math.inf  # when all it holds has left
        self.passed, self.dropped, self.lost = Count(), Count(), Count()

    def finish(self, head: float, tail: float, nbytes: int) -> float:
        """Return when a packet has left whose bytes come from ``head`` to ``tail``; infinity: dropped."""
        begin = self.free if self.free > head else head
        end = self.rate.finish(begin, nbytes)
        if end <= tail:
            end = tail
        elif begin > head and self.rate.between(tail, end) > self.limit + ROUNDING:
            return math.inf
        self.free = end
        return end

    def counts(self) -> LineCounts:
        return LineCounts(*(replace(count) for count in (self.passed, self.dropped, self.lost)))


class _Propagation:
    """What happens between one rank's uplink and another's downlink."""

    def __init__(self, a: Profile, b: Profile, rng: Random) -> None:
        self._ends, self._rng = (a, b), rng
        self._jitter = (a.jitter + b.jitter) / 2
        self._fixed = a.trace is None and b.trace is None
        self._delay, self._loss = one_way(a, b), (a.loss_at(0) + b.loss_at(0)) / 2
        self.last = -math.inf  # when the last packet arrives

    def survivors(self, time: float, segments: int) -> list[tuple[int, int]]:
        """Return the runs of a packet's segments, each from one to before another, that are not lost.

        Each is lost or not by itself. One draw tells how many get through before the next that is lost: that
        number is geometrically distributed.
        """
        a, b = self._ends
        loss = self._loss if self._fixed else (a.loss_at(time) + b.loss_at(time)) / 2
        if not loss:
            return [(0, segments)]
        found, first, each = list[tuple[int, int]](), 0, math.log1p(-loss)
        while first < segments:
            more = math.log1p(-self._rng.random()) / each
            lost = first + int(more) if more < segments - first else segments
            if lost > first:
                found.append((first, lost))
            first = lost + 1
        return found

    def arrival(self, time: float) -> float:
        """Return when what leaves at ``time`` is there; it never overtakes."""
        delay = self._delay if self._fixed else one_way(*self._ends, time)
        if self._jitter:
            delay += self._jitter * self._rng.random()
        self.last = max(self.last, time + delay)
        return self.last


class SimulatedNetwork:
    """All ranks' lines and what is under way between them, in the time of the caller's clock.

    Calls must come in order of time. Traces begin at ``start``. The same calls with the same ``seed`` give
    the same losses and jitter. ``cut`` takes packets apart where some of their segments are lost.

    >>> net = SimulatedNetwork([Profile.parse("8kbit,50ms")] * 2, cut=lambda packet, first, last: (packet, 0))
    >>> net.offer(0.0, source=0, destination=1, nbytes=100, segments=1, packet=b"...")
    True
    >>> [(round(due, 6), rank) for due, rank, packet in net.deliver(1.0)]
    [(0.15, 1)]
    """

    def __init__(self, profiles: Sequence[Profile], seed: int = 0, start: float = 0.0, *, cut: Cut) -> None:
        self._start, self._cut = start, cut
        self._up = [_LineQueue(p.uplink, p.limit(p.uplink)) for p in profiles]
        self._down = [_LineQueue(p.downlink, p.limit(p.downlink)) for p in profiles]
        self._ways = [
            [_Propagation(a, b, Random(f"{seed} {i} {j}")) for j, b in enumerate(profiles)]
            for i, a in enumerate(profiles)
        ]
        self._offered = 0
        self._under_way: list[tuple[float, int, float, int, int, int, Any]] = []  # a heap, by arrival
        self._leaving: list[deque[tuple[float, int, int, Any]]] = [deque() for _ in profiles]

    def offer(
        self, now: float, source: int, destination: int, nbytes: int, segments: int, packet: Any
    ) -> bool:
        """Send a packet of ``nbytes`` on the wire in ``segments``; False: nothing of it will arrive."""
        now -= self._start
        line = self._up[source]
        begin = line.free if line.free > now else now
        end = line.finish(now, now, nbytes)
        if end == math.inf:
            line.dropped.add(segments, nbytes)
            return False
        line.passed.add(segments, nbytes)
        way = self._ways[source][destination]
        runs = way.survivors(end, segments)
        if not runs:
            line.lost.add(segments, nbytes)
            return False
        before, tail = way.last, way.arrival(end)
        head = begin + (tail - end)
        if runs[0] == (0, segments):
            self._push(tail, head, destination, nbytes, segments, packet)
            return True
        each, left = (tail - head) / segments, nbytes
        for first, last in runs:
            part, size = self._cut(packet, first, last)
            there = min(tail, max(before, head + last * each))  # the packet's time is shared by its segments
            self._push(there, head + first * each, destination, size, last - first, part)
            left -= size
        line.lost.add(segments - sum(last - first for first, last in runs), left)
        return True

    def _push(
        self, tail: float, head: float, destination: int, nbytes: int, segments: int, packet: Any
    ) -> None:
        self._offered += 1  # equal times: in the order offered
        heappush(self._under_way, (tail, self._offered, head, destination, nbytes, segments, packet))

    def rewind(self, now: float) -> None:
        """Let traces begin again at ``now``; what is under way, and all counts, go on as they are."""
        gone, self._start = now - self._start, now
        for line in (*self._up, *self._down):
            line.free -= gone
        for way in chain(*self._ways):
            way.last -= gone
        self._under_way = [(tail - gone, n, head - gone, *rest) for tail, n, head, *rest in self._under_way]
        heapify(self._under_way)
        self._leaving = [deque((time - gone, *rest) for time, *rest in line) for line in self._leaving]

    def next(self) -> float | None:
        """Return when ``deliver`` should be called again; None: nothing is under way."""
        due = self._under_way[0][0] if self._under_way else math.inf
        for waiting in self._leaving:
            if waiting and waiting[0][0] < due:
                due = waiting[0][0]
        return None if due == math.inf else due + self._start

    def deliver(self, now: float) -> list[tuple[float, int, Any]]:
        """Return what is due until ``now``: due time, destination, packet; in order for each destination."""
        now -= self._start
        self._arrive(now)
        due: list[tuple[float, int, Any]] = []
        for rank, waiting in enumerate(self._leaving):
            passed = self._down[rank].passed
            while waiting and waiting[0][0] <= now:
                time, nbytes, segments, packet = waiting.popleft()
                passed.add(segments, nbytes)
                due.append((time + self._start, rank, packet))
        return due

    def _arrive(self, now: float) -> None:
        under_way = self._under_way
        while under_way and under_way[0][0] <= now:
            tail, _, head, rank, nbytes, segments, packet = heappop(under_way)
            line = self._down[rank]
            end = line.finish(head, tail, nbytes)
            if end == math.inf:
                line.dropped.add(segments, nbytes)
            else:
                self._leaving[rank].append((end, nbytes, segments, packet))

    def counts(self) -> list[RankCounts]:
        """Return what every rank's lines have carried, dropped and lost since the start."""
        return [RankCounts(up.counts(), down.counts()) for up, down in zip(self._up, self._down, strict=True)]
