"""What a follower is sent and when, in simulated time: windows, merging, abandoning, ages; the messages."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from states import draft
from thinwire.engines.sync.landing import Landing
from thinwire.engines.sync.making import Making
from thinwire.engines.sync.pace import CHUNK_TIME, EARLY, MIN_CHUNK, SLACK, STALE, Pace
from thinwire.engines.sync.protocol import (
    DOWN,
    MAGIC,
    UP,
    Abandon,
    Ack,
    Again,
    Begin,
    Chunk,
    Done,
    End,
    Hello,
    Message,
    unpack,
)
from thinwire.engines.sync.serving import Order, Serving, useless
from thinwire.state.draft import Draft
from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.types import PayloadError

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
        self.serving = Serving()
        self.arrivals: list[tuple[float, int, float]] = []  # when, version, seconds of the transfer
        self.held, self.waits = 0, []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ids = itertools.count()
        self._received, self._landing, self._applied_at = 0, None, 0.0
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
            self._landing = Landing(message, 1 << 40)
        elif isinstance(message, Abandon):
            self._landing = None
        elif isinstance(message, Chunk):
            self._received += len(message.data)
            self._back(lambda total=self._received: self.serving.pace.acked(total, self.now))
            if self._landing is not None and self._landing.begin.transfer == message.transfer:
                self._landing.add(message)
        elif isinstance(message, End):
            assert self._landing is not None
            self._landing.end(message)
            begin, self._landing = self._landing.begin, None
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


@settings(deadline=None)
@given(st.lists(st.binary(max_size=9), max_size=9), st.integers(0, 60), st.integers(1, 60))
def test_a_draft_is_cut_as_if_its_parts_were_one(parts: list[bytes], start: int, n: int) -> None:
    cut, body = Draft(0, 0, 1, 1), b"".join(parts)
    cut.add(parts[:2])
    cut.add(parts[2:])
    assert cut.nbytes == len(body) and bytes(cut.cut(start, n)) == body[start : start + n] and not cut.whole
    assert cut.body == body


def test_what_is_sent_of_a_patch_is_the_patch_and_the_history_s_own_bytes() -> None:
    pytest.importorskip("zstandard")
    history = History(Layout.of({"w": torch.zeros(5000)}))
    history.publish({"w": torch.randn(5000)})
    patch, making = history.patch(), Making(history, lambda: None)
    made = making.start(Order(0, 1)).result(60.0)
    making.close()
    assert made.body is patch.body and made.whole and made.head + made.body == patch.pack()
    assert bytes(made.cut(0, made.nbytes)) == patch.body


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


def test_a_follower_that_acknowledges_nothing_gets_two_chunks() -> None:
    serving = Serving()
    serving.hello(0, None, 0.0)
    order = serving.order(1, 0.0, 0.0)
    assert order == Order(0, 1)
    serving.made(order, draft(0, 1, 1 << 20), 0.0)
    sent = serving.messages(0.0)
    assert [type(m) for m in sent] == [Begin, Chunk, Chunk]
    assert all(not serving.messages(float(t)) for t in range(1000))
    assert serving.pace.flight == 2 * MIN_CHUNK


def started(base: int = 5, version: int = 6, nbytes: int = 2_000_000) -> tuple[Serving, Begin]:
    """A serving in the middle of a transfer, with a window that is known."""
    serving = Serving()
    serving.hello(base, None, 0.0)
    order = serving.order(version, 0.0, 0.0)
    assert order is not None and order.base == base
    serving.made(order, draft(base, version, nbytes), 0.0)
    now, total, begin = 0.0, 0, None
    for _ in range(4):
        for m in serving.messages(now):
            begin = m if isinstance(m, Begin) else begin
            total += len(m.data) if isinstance(m, Chunk) else 0
        now += 0.1
        serving.pace.acked(total, now)
    assert begin is not None
    return serving, begin


def test_a_transfer_is_given_up_where_a_fresh_patch_is_smaller_than_what_is_left() -> None:
    serving, begin = started()
    order = serving.order(7, 1.0, 0.001)  # only to compare: from the same base
    assert order is not None and order.base == 5
    serving.made(order, draft(5, 7, 20_000), 1.1)
    told = serving.messages(1.1)
    assert told[0] == Abandon(begin.transfer, 7)
    assert isinstance(told[1], Begin) and (told[1].base, told[1].version) == (5, 7)
    assert serving.abandoned == 1 and isinstance(told[2], Chunk) and told[2].at == 0


def test_a_transfer_goes_on_where_a_fresh_patch_is_larger() -> None:
    serving, begin = started()
    order = serving.order(7, 1.0, 0.001)
    assert order is not None
    at = serving.sending.at if serving.sending else 0
    serving.made(order, draft(5, 7, 2_400_000), 1.1)
    told = serving.messages(1.1)
    assert all(isinstance(m, Chunk) and m.transfer == begin.transfer for m in told)
    assert isinstance(told[0], Chunk) and told[0].at == at and not serving.abandoned
    assert serving.order(7, 1.2, 0.001) is None  # the same version is not compared twice


def test_comparing_takes_a_tenth_of_the_time_at_most_and_keyframes_are_not_compared() -> None:
    serving, _ = started()
    assert serving.order(7, 0.5, 0.1) is None  # 0.1 s of work after 0.5 s of sending
    assert serving.order(7, 1.1, 0.1) is not None
    keyframe, _ = started(base=0)
    assert keyframe.order(7, 5.0, 0.001) is None


@settings(deadline=None)
@given(left=st.integers(0, 10**9), fresh=st.integers(1, 10**9))
def test_giving_up_never_costs_bytes(left: int, fresh: int) -> None:
    assert min(left, fresh) == (fresh if useless(left, fresh) else left)


def test_again_starts_from_what_is_held_and_counts_once() -> None:
    serving, begin = started()
    serving.again(begin.transfer, 0)
    assert serving.messages(1.0) == [Abandon(begin.transfer, 0)]
    order = serving.order(6, 1.0, 0.0)
    assert order is not None and order.base == 0
    serving.again(begin.transfer, 5)  # about the same transfer: known already
    serving.made(order, draft(0, 6, 5000), 1.0)
    assert isinstance(serving.messages(1.0)[0], Begin)


def test_a_late_patch_for_a_follower_that_began_anew_is_dropped() -> None:
    serving = Serving()
    serving.hello(3, None, 0.0)
    order = serving.order(6, 0.0, 0.0)
    serving.hello(5, None, 1.0)
    assert order is not None
    serving.made(order, draft(3, 6, 100), 1.0)
    assert serving.messages(1.0) == []
    again = serving.order(6, 1.0, 0.0)
    assert again is not None and again.base == 5


def test_after_again_nothing_older_than_what_was_held_will_do() -> None:
    serving = Serving()
    serving.hello(1, None, 0.0)
    order = serving.order(2, 0.0, 0.0)
    assert order is not None
    serving.made(order, draft(1, 2, 10), 0.0)
    (begin, _, end) = serving.messages(0.0)
    assert isinstance(begin, Begin) and isinstance(end, End) and serving.done(begin.transfer, 2, 1002)
    serving.pace.acked(10, 0.5)
    serving.again(begin.transfer, 0)
    order = serving.order(3, 1.0, 0.0)
    assert order == Order(0, order.number if order else 0, above=2)
    serving.made(order, draft(0, 2, 10), 1.0)  # of somebody else's job
    assert not [m for m in serving.messages(1.0) if isinstance(m, Begin)]
    again = serving.order(3, 1.0, 0.0)
    assert again is not None and again.above == 2


def test_a_follower_is_never_sent_what_looks_older_to_it() -> None:
    serving = Serving()
    serving.hello(1, None, 0.0, floor=57)  # it calls version 1 number 57: an earlier life's
    assert serving.order(57, 0.0, 0.0) is None
    assert serving.order(58, 0.0, 0.0) == Order(1, 1, above=57)


def test_a_part_goes_on_where_it_broke_off() -> None:
    serving, kept = Serving(), draft(0, 6, 100_000)
    serving.hello(0, (kept, 60_000), 0.0)
    begin, chunk, *_ = serving.messages(0.0)
    assert isinstance(begin, Begin) and begin.start == 60_000
    assert isinstance(chunk, Chunk) and chunk.at == 60_000


def test_done_for_another_version_is_an_error_and_for_an_unknown_transfer_nothing() -> None:
    serving, begin = started(nbytes=20_000)
    assert not serving.done(99, 6, 1006)
    with pytest.raises(PayloadError, match="version 7 is held where 6 was sent"):
        serving.done(begin.transfer, 7, 1007)


# pace


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


# messages


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_hostile_messages_are_payload_errors_or_messages(data: bytes) -> None:
    for kinds in (UP, DOWN):
        try:
            found = unpack(data, kinds)
        except PayloadError:
            continue
        assert found.pack() == data


def test_messages_read_back() -> None:
    messages: list[Message] = [
        Hello(MAGIC, 1, 7, bytes(16), b"d" * 16, 1, 2, 3, 4, 5, 6, 7),
        Ack(1, 2),
        Done(1, 2, 3, 4),
        Again(1, 2, 3, 4),
    ]
    for m in messages:
        assert unpack(m.pack(), UP) == m
    assert bytes(unpack(Chunk(1, 2, b"abc").pack(), DOWN).data) == b"abc"
    with pytest.raises(PayloadError):
        unpack(Ack(1, 2).pack() + b"x", UP)
    with pytest.raises(PayloadError):
        unpack(b"", UP)


def test_a_landing_takes_only_the_next_bytes() -> None:
    begin = Begin(1, 0, 0, 1, 2, 0)
    landing = Landing(begin, 10)
    with pytest.raises(PayloadError, match="the end of a patch of 0 bytes"):
        landing.end(End(1, 0, b"head"))
    landing.add(Chunk(1, 0, b"12345"))
    for at, data, why in ((0, b"1", "expected at 5"), (6, b"1", "expected at 5"), (5, b"", "0 bytes"),
                          (5, b"123456", "over 10 bytes")):  # fmt: skip
        with pytest.raises(PayloadError, match=why):
            landing.add(Chunk(1, at, data))
    assert landing.continued_by(Begin(9, 0, 0, 1, 2, 5))
    assert not landing.continued_by(Begin(9, 0, 0, 1, 2, 4))
    assert not landing.continued_by(Begin(9, 0, 0, 2, 2, 5))
    landing.add(Chunk(1, 5, b"67890"))
    assert not landing.whole and bytes(landing.data) == b"1234567890"
    for end in (End(1, 9, b"head"), End(1, 11, b"head"), End(1, 10, b"")):
        with pytest.raises(PayloadError, match="of which 10 are here"):
            landing.end(end)
    landing.end(End(1, 10, b"head"))
    assert landing.whole and landing.ended
    with pytest.raises(PayloadError, match="begins at byte 4"):
        Landing(Begin(1, 0, 0, 1, 2, 4), 100)
