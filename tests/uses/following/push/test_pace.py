"""When a follower is sent what, in simulated time: windows, merging, ages."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from states import draft

from thinwire.state.patches.draft import Draft
from thinwire.types import PayloadError
from thinwire.uses.following.push.protocol import Abandon, Begin, Chunk, End, Message
from thinwire.uses.following.push.reception import PartialPatch
from thinwire.uses.following.push.send_schedule import (
    CHUNK_TIME,
    EARLY,
    MIN_CHUNK,
    SLACK,
    STALE,
    Pace,
    SendSchedule,
)

MBIT = 125_000.0  # bytes/s


@dataclass
class Sim:
    """A feed, a line of ``rate`` bytes/s and ``trip`` seconds, a follower; a publication every ``every`` s.

    ``size`` gives the bytes of a patch from one version to another, ``making`` and ``applying`` are seconds.
    A patch is made in ``sections``, and sent from the first one on.
    """

    rate: float
    trip: float
    every: float
    size: Callable[[int, int], int]
    until: float
    making: float = 0.0
    applying: float = 0.0
    sections: int = 1
    rates: list[tuple[float, float]] = field(default_factory=list)  # when the rate changes, and to what

    def __post_init__(self) -> None:
        self.now, self.newest, self.free_at, self.queue = 0.0, 1, 0.0, 0.0
        self.published = {1: 0.0}
        self.serving = SendSchedule()
        self.arrivals: list[tuple[float, int, float]] = []  # when, version, seconds of the transfer
        self.held, self.waits = 0, []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ids = itertools.count()
        self._received, self._partial, self._applied_at = 0, None, 0.0
        self._began: dict[int, float] = {}

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._ids), what))

    def run(self) -> Sim:
        self.serving.hello(0, None, 0.0)
        self.at(self.every, self._publish)
        for when, rate in self.rates:
            self.at(when, lambda rate=rate: setattr(self, "rate", rate))
        self._act()
        return self.go_on()

    def go_on(self) -> Sim:
        while self._events and self._events[0][0] <= self.until:
            self.now, _, what = heapq.heappop(self._events)
            what()
            self._act()
        return self

    def _publish(self) -> None:
        self.newest += 1
        self.published[self.newest] = self.now
        self.at(self.now + self.every, self._publish)

    def _act(self) -> None:
        for message in self.serving.messages(self.now):
            self._send(message)
        lead = self.making / self.sections
        order = self.serving.order(self.newest, self.now, self.making, lead=lead)
        if order is not None:
            nbytes = self.size(order.base, self.newest)
            made, last = draft(order.base, self.newest, 0, whole=False), self.sections
            for i in range(1, last + 1):
                part = bytes(nbytes * i // last - nbytes * (i - 1) // last)
                self.at(self.now + i * lead, lambda part=part, i=i: made.add([part]) or _end(made, i == last))
            there = self.making if order.compare else lead
            self.at(self.now + there, lambda: self.serving.made(order, made, self.now))

    def _send(self, message: Message) -> None:
        nbytes = len(message.data) if isinstance(message, Chunk) else 0
        self.waits.append(max(0.0, self.free_at - self.now))
        self.free_at = max(self.free_at, self.now) + nbytes / self.rate
        if isinstance(message, Begin):
            self._began[message.transfer] = self.now
        self.at(self.free_at + self.trip / 2, lambda: self._receive(message))

    def _receive(self, message: Message) -> None:
        if isinstance(message, Begin):
            self._partial = PartialPatch(message, 1 << 40)
        elif isinstance(message, Abandon):
            self._partial = None
        elif isinstance(message, Chunk):
            self._received += len(message.data)
            self._back(lambda total=self._received: self.serving.pace.acked(total, self.now))
            if self._partial is not None and self._partial.begin.transfer == message.transfer:
                self._partial.add(message)
        elif isinstance(message, End):
            assert self._partial is not None
            self._partial.end(message)
            begin, self._partial = self._partial.begin, None
            self._applied_at = max(self._applied_at, self.now) + self.applying
            self.at(self._applied_at, lambda: self._apply(begin))

    def _apply(self, begin: Begin) -> None:
        assert begin.base in (0, self.held) and begin.version > self.held
        self.held = begin.version
        self.arrivals.append((self.now, begin.version, self.now - self._began[begin.transfer]))
        self._back(lambda: self.serving.done(begin.transfer, begin.version, begin.hash))

    def _back(self, what: Callable[[], object]) -> None:
        self.at(self.now + self.trip / 2, what)

    @property
    def ages(self) -> list[float]:
        """Age of each version as it arrives."""
        return [when - self.published[version] for when, version, _ in self.arrivals]

    @property
    def oldest(self) -> list[float]:
        """Age of what was held just before each arrival but the first."""
        pairs = zip(self.arrivals[1:], self.arrivals[:-1], strict=True)
        return [when - self.published[before] for (when, _, _), (_, before, _) in pairs]


def _end(made: Draft, whole: bool) -> None:
    made.head = b"head" if whole else b""


def saturating(most: int, half: int) -> Callable[[int, int], int]:
    """Patches that grow with the versions they merge, towards ``most`` bytes."""
    return lambda base, version: most if not base else int(most * (version - base) / (half + version - base))


LINES = [(1.4, 0.03), (10, 0.03), (10, 0.1), (100, 0.05), (200, 0.2), (1000, 0.001)]


@pytest.mark.parametrize(("mbit", "trip"), LINES)
def test_a_long_transfer_uses_the_whole_line_and_hardly_queues(mbit: float, trip: float) -> None:
    rate = mbit * MBIT
    seconds = {200: 10.0, 1000: 5.0}.get(mbit, 20.0)
    sim = Sim(rate, trip, 1e9, lambda base, version: int(rate * seconds), until=60.0).run()
    (when, version, _), *_ = sim.arrivals
    assert (
        version == 1 and when < seconds * 1.05 + 14 * trip
    )  # a window of 8 KiB doubles a dozen times at most
    late = sorted(sim.waits[len(sim.waits) // 2 :])  # seconds that chunks wait for the line
    assert late[int(0.75 * len(late))] <= 0.3 * trip + SLACK + 0.02 + MIN_CHUNK / rate


@pytest.mark.parametrize(("mbit", "trip"), LINES[:4])
@pytest.mark.parametrize("making", [0.0, 0.02])
def test_publishing_ten_times_faster_than_the_line_keeps_the_age_bounded(
    mbit: float, trip: float, making: float
) -> None:
    """As it comes, a version is as old as transfer, round trip and encoding at most; never twice that."""
    rate = mbit * MBIT
    size = saturating(int(rate * 2.0), 100)  # the patch of 10 versions takes 0.18 s, of all of them 2 s
    sim = Sim(rate, trip, 0.02, size, until=40.0, making=making).run()
    steady = [i for i, (when, _, _) in enumerate(sim.arrivals) if when > 15.0]
    assert len(steady) > 15
    spare = EARLY + 2 * MIN_CHUNK / rate  # a chunk on the line is not interrupted
    for i in steady:
        line, former = (size(sim.arrivals[j - 1][1], sim.arrivals[j][1]) / rate for j in (i, i - 1))
        assert sim.ages[i] <= 0.02 + making + line + trip + spare, (i, line)
        assert sim.oldest[i - 1] <= 0.02 + 2 * making + former + line + trip + spare, (i, former)
    assert sorted({v for _, v, _ in sim.arrivals}) == [v for _, v, _ in sim.arrivals]


@pytest.mark.parametrize(("mbit", "trip"), LINES[1:4])
@pytest.mark.parametrize("making", [0.1, 0.2])
def test_a_patch_that_is_sent_while_it_is_made_is_no_older_than_its_transfer(
    mbit: float, trip: float, making: float
) -> None:
    """Its making counts by the first section alone, where the line takes longer than the rest."""
    rate, line, n = mbit * MBIT, 0.5, 8
    sims = [
        Sim(rate, trip, 0.02, lambda *_: int(rate * line), until=30.0, making=making, sections=sections).run()
        for sections in (1, n)
    ]
    slow, quick = (
        sorted(age for (at, *_), age in zip(s.arrivals, s.ages, strict=True) if at > 10) for s in sims
    )
    assert len(slow) > 30 and len(quick) > 30
    spare = EARLY + CHUNK_TIME + 2 * MIN_CHUNK / rate
    assert quick[len(quick) // 2] <= 0.02 + making / n + line + trip + spare
    assert quick[-1] < 2 * line + trip  # with the round trips that are measured now and then
    assert slow[len(slow) // 2] - quick[len(quick) // 2] > 0.5 * making


def test_a_fast_line_gets_every_version_as_it_is_published() -> None:
    sim = Sim(1000 * MBIT, 0.01, 0.1, lambda base, version: 100_000, until=5.0, making=0.005).run()
    assert [v for _, v, _ in sim.arrivals[2:]] == list(range(sim.arrivals[2][1], sim.arrivals[-1][1] + 1))
    assert max(sim.ages[2:]) < 0.005 + 0.0008 + 2 * 0.01 + 0.01


def test_a_line_that_slows_down_and_recovers_is_followed() -> None:
    rates = [(10.0, 1 * MBIT), (25.0, 20 * MBIT)]
    sim = Sim(10 * MBIT, 0.05, 0.05, saturating(2_000_000, 200), until=50.0, rates=rates).run()
    assert 10 * MBIT < (sim.serving.pace.rate or 0) < 22 * MBIT
    after = [age for (when, _, _), age in zip(sim.arrivals, sim.ages, strict=True) if when > 40]
    assert max(after) < 0.05 + 2_000_000 / (20 * MBIT) + 0.15
    assert sim.serving.pace.flight <= sim.serving.pace.window


def test_a_follower_that_applies_slowly_is_not_sent_more_than_two_ahead() -> None:
    sim = Sim(1000 * MBIT, 0.001, 0.01, lambda base, version: 10_000, until=5.0, applying=0.5).run()
    assert len(sim.serving.unproved) <= 2
    assert max(sim.ages[3:]) < 4 * 0.5


@given(st.lists(st.tuples(st.integers(1, 100_000), st.floats(0.0, 0.5)), max_size=60))
@settings(max_examples=50, deadline=None)
def test_the_window_is_bounded_whatever_the_acknowledgements(steps: list[tuple[int, float]]) -> None:
    pace, now = Pace(), 0.0
    for nbytes, seconds in steps:
        room = pace.room
        if room:
            pace.sent(min(nbytes, room), now)
        now += seconds
        pace.acked(pace.delivered + min(nbytes // 2 + 1, pace.flight), now)
        assert 2 * MIN_CHUNK <= pace.window <= 1 << 24 and pace.flight <= max(pace.window, room + (1 << 18))


def test_acknowledgements_that_cannot_be_are_errors() -> None:
    pace = Pace()
    pace.sent(1000, 0.0)
    with pytest.raises(PayloadError, match="of 1001 bytes"):
        pace.acked(1001, 0.1)
    pace.acked(1000, 0.1)
    with pytest.raises(PayloadError, match="of 999 bytes"):
        pace.acked(999, 0.1)


def test_a_longer_way_is_noticed() -> None:
    """A route that got slower shows once the shortest trip is stale: the window is emptied for a moment."""
    sim = Sim(10 * MBIT, 0.02, 1e9, lambda base, version: int(10 * MBIT * 60), until=STALE / 2).run()
    assert sim.serving.pace.trip == pytest.approx(0.02, abs=0.02)
    sim.trip, sim.until = 0.2, 19.0
    sim.go_on()
    assert sim.serving.pace.trip == pytest.approx(0.2, abs=0.02)
    assert sim.serving.pace.rate == pytest.approx(10 * MBIT, rel=0.1)
