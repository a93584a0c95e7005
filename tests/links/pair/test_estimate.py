"""The live estimate: on a simulated line with late threads, queues and changes, and on a real shaped link."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from time import monotonic, sleep
from typing import Any

import pytest
from each import each

from thinwire.links import Link, LinkEstimate, LinkShape, Mailbox, Metered, Reliable, Shaped, loopback_pair
from thinwire.links.pair.estimate import Estimator
from thinwire.links.pair.probe import NBYTES, probe
from thinwire.links.pair.reliable import ACK_DELAY, PIECE
from thinwire.links.pair.segment import HEADER, TICK, TICKS, ticks
from thinwire.links.pair.window import Acked
from thinwire.links.shaped import Timetable
from thinwire.links.tcp.idle import FIRST_WINDOW, Line
from thinwire.types import LinkError

LONG = 30.0
MBIT = 125e3
Looks = list[tuple[float, LinkEstimate]]


def simulate(
    rate: Callable[[float], float],
    size: int,
    gap: float,
    seconds: float = 20.0,
    delay: float = 0.03,
    stalls: float = 0.02,
    back: Callable[[float], float] = lambda now: 0.0,
    offset: float = 1000.0,
    jitter: float = 0.0,
    seed: int = 0,
    restarts: bool = False,
) -> Looks:
    """Send ``size`` bytes each ``gap`` s over a line of ``rate(now)`` bytes/s; return the estimates by time.

    The protocol is that of ``Reliable``. Threads are late by 0.3 ms on average, and by 3 to 20 ms in a share
    ``stalls`` of the cases. ``back``: seconds that the way back takes beyond ``delay``. ``restarts``: TCP's
    window shuts in pauses.
    """
    rng, estimator, looks = random.Random(seed), Estimator(restarts=restarts), Looks()
    line = Line()
    table = Timetable(LinkShape(rate(0.0), delay, jitter), seed)
    events: list[tuple[float, int, str, Any]] = []
    order = itertools.count()
    flying: deque[tuple[int, float]] = deque()
    pending: list[float] = []  # departures of pieces that wait for their acknowledgement
    read, beat, idled = 0.0, 1.0, 0.0

    def at(when: float, what: str, value: Any = None) -> None:
        heapq.heappush(events, (when, next(order), what, value))

    def late() -> float:
        return rng.expovariate(1 / 3e-4) + (rng.uniform(3e-3, 2e-2) if rng.random() < stalls else 0.0)

    for i in range(4):
        at(2.2 * i * delay + 1e-3, "ping")
    at(beat, "beat")
    for i in range(int((seconds - 0.6) / gap)):
        at(0.6 + i * gap, "send")
    for i in range(int(seconds / 0.02)):
        at(0.02 * i, "look")
    while events:
        now, _, what, value = heapq.heappop(events)
        table.shape = LinkShape(rate(now), delay, jitter)
        if what == "send":
            first, transfer = restarts * FIRST_WINDOW / rate(now), size / rate(now)
            waits = line.send(now, transfer, 2 * delay, first) - transfer - now if restarts else 0.0
            for start in range(0, size, PIECE):
                n = min(PIECE, size - start) + HEADER
                flying.append((n, now))
                at(table.arrival(now + waits, n + 9), "arrive", now)
        elif what == "beat":
            at(max(now, beat), "ping" if now >= beat else "beat")
        elif what == "ping":
            beat, idled = now + 1.0, idled if flying else now
            at(table.arrival(now, HEADER + 21), "pinged", now)
            if now < seconds:
                at(beat, "beat")
        elif what in ("arrive", "pinged"):
            read = max(read, now + late())  # one thread reads, in order
            at(read, "read" if what == "arrive" else "pong", value)
        elif what == "read":
            pending.append(now)
            if len(pending) == 1:
                at(now + ACK_DELAY, "ack")
        elif what == "ack":
            at(now + delay + back(now) + late(), "acked", (len(pending), ticks(pending[-1] + offset)))
            pending.clear()
        elif what == "acked":
            run = [flying.popleft() for _ in range(value[0])]
            estimator.delivered(Acked(sum(n for n, _ in run), run[0][1], run[-1][1]), value[1], now)
            if not flying and now - idled >= 1.0:
                at(now, "ping")
        elif what == "pong":
            at(now + delay + back(now) + late(), "ponged", (value, ticks(now + offset)))
        elif what == "ponged":
            sent, arrived = value
            estimator.round_trip(sent, arrived, now)
        elif what == "look":
            looks.append((now, estimator.estimate(now, flying[0] if flying else None)))
    return looks


def told(e: Estimator, nbytes: int, at: float, arrived: float, now: float) -> None:
    """Tell of bytes that left at one moment."""
    e.delivered(Acked(nbytes, at, at), ticks(arrived), now)


def steadily(rate: float) -> Callable[[float], float]:
    return lambda now: rate


def _ratios(looks: Looks, rate: float, after: float = 3.0) -> list[float]:
    """Return estimate over truth, sorted, once there was time to measure."""
    return sorted((seen.rate or 0.0) / rate for now, seen in looks if now > after)


def _when(looks: Looks, true: Callable[[float], bool], after: float) -> float:
    """Return the seconds from ``after`` until the rate was such for the first time."""
    return next(now for now, seen in looks if now > after and seen.rate and true(seen.rate)) - after


@each("delay", [0.005, 0.15])
@each("mbit, size", [(1.4, 2_000), (10, 20_000), (100, 100_000), (100, 300_000), (500, 300_000)])
@each("pause", [0.05, 1.0])
def test_a_steady_link_is_measured(mbit: float, size: int, delay: float, pause: float) -> None:
    gap = size / (mbit * MBIT) + pause
    ratios = _ratios(simulate(lambda now: mbit * MBIT, size, gap, delay=delay), mbit * MBIT)
    count = len(ratios)
    assert 0.85 <= ratios[count // 20] <= ratios[-1 - count // 20] <= 1.1
    assert ratios[count // 2] == pytest.approx(1.0, abs=0.08)


@each(
    ("mbit", "size"), [(1.4, 20_000), (10, 20_000), (10, 60_000), (200, 16_000), (200, 20_000), (200, 40_000)]
)
def test_what_a_window_holds_back_is_not_taken_for_the_line(mbit: float, size: int) -> None:
    """A message a second: each begins with a window that is shut, which makes the line look slow."""
    true, slow = mbit * MBIT, 1.4 * MBIT
    seen = [look for now, look in simulate(lambda now: true, size, 1.0, 30.0, restarts=True) if now > 3]
    assert all(look.rate is not None and look.rate < 1.1 * true for look in seen)
    measured = [look for look in seen if not look.lower_bound]
    assert bool(measured) == (true == slow)  # as a slow line is full all the time, its window shut or not
    assert all(look.rate == pytest.approx(true, rel=0.1) for look in measured)


def test_a_window_that_is_open_hides_nothing() -> None:
    for rate in (10 * MBIT, 100 * MBIT):
        ratios = _ratios(simulate(steadily(rate), 60_000, 0.15, restarts=True), rate)
        assert 0.85 < ratios[len(ratios) // 20] <= ratios[-1] < 1.1


def test_a_probe_outlives_what_a_shut_window_says() -> None:
    """The probe opens the window first; what tells less of the line does not take its place."""
    e = Estimator(restarts=True)
    e.round_trip(0.0, ticks(0.05), 0.1)
    for i in range(3):
        told(e, 500_000, 1.0 + i / 10, 1.07 + i / 10, 1.12 + i / 10)  # 25 MB/s
    for i in range(30):
        told(e, 20_000, 3.0 + i, 3.151 + i, 3.2 + i)  # a round trip more than the line takes
    seen = e.estimate(33.0)
    assert seen.rate == pytest.approx(25e6, rel=0.02) and not seen.lower_bound
    assert seen.age == pytest.approx(0.8)  # it is what that rate and a shut window make: news of the rate too


def test_a_window_that_is_half_open_is_not_taken_for_the_line_either() -> None:
    """295 kB each half a second, in pairs: the second of a pair still waits for a round trip."""
    e, line, seen = Estimator(restarts=True), Line(), []
    e.round_trip(0.0, ticks(0.05), 0.1)
    for i in range(3):
        told(e, 500_000, 1.0 + i / 10, 1.07 + i / 10, 1.12 + i / 10)  # 25 MB/s
    for i in range(60):
        at = 3.0 + 2 * (i // 2) + 0.5 * (i % 2)
        took = line.send(at, 295e3 / 25e6, 0.1, FIRST_WINDOW / 25e6) - at
        told(e, 295_000, at, at + took + 0.05, at + took + 0.1)
        seen.append(e.estimate(at + took + 0.1).rate or 0.0)
    assert min(seen) == pytest.approx(25e6, rel=0.02)


def test_what_waits_for_a_window_is_not_called_stalled() -> None:
    for restarts in (False, True):
        e = Estimator(restarts=restarts)
        e.round_trip(0.0, ticks(0.15), 0.3)
        told(e, 500_000, 1.0, 1.17, 1.32)  # 25 MB/s
        seen = e.estimate(3.1, oldest=(131_072, 2.0))  # three round trips to open it, and one
        assert (seen.rate == pytest.approx(25e6, rel=0.02)) is restarts


def test_a_link_forgets_its_estimate_but_not_that_the_window_shuts() -> None:
    with closing(Reliable(loopback_pair()[0])) as link:
        link.expect_restarts(True)
        link.forget_estimate()
        assert link._estimator.restarts


def test_a_saturated_link_is_measured() -> None:
    # 11 Mbit/s on a line of 10: the queue grows without end, and so do the round trips of the heartbeats
    ratios = _ratios(simulate(lambda now: 10 * MBIT, 110_000, 0.08), 10 * MBIT)
    assert 0.95 <= ratios[0] <= ratios[-1] <= 1.05


@each("size", [200, 2_000, 20_000])
def test_messages_too_small_for_the_link_bound_it_from_below(size: int) -> None:
    looks = simulate(lambda now: 1000 * MBIT, size, 0.05, stalls=0.0)
    late = [seen for now, seen in looks if now > 3]
    assert all(seen.lower_bound and seen.rate and seen.rate < 1000 * MBIT for seen in late)
    assert max(seen.age or 0.0 for seen in late) < 3.0


@each("delay", [0.005, 0.15])
@each("size", [20_000, 100_000, 300_000])
@each("gap", [0.2, 1.0])
def test_a_fall_and_a_rise_are_followed_within_a_few_messages(size: int, gap: float, delay: float) -> None:
    looks = simulate(lambda now: (20 if 10 <= now < 20 else 500) * MBIT, size, gap, 30.0, delay)
    patience = 3 * gap + 2 * delay + size / (20 * MBIT) + 0.1
    assert _when(looks, lambda rate: rate < 30 * MBIT, 10.0) <= patience
    assert _when(looks, lambda rate: rate > min(300 * MBIT, 0.5 * size / 0.002), 20.0) <= patience
    between = [seen for now, seen in looks if 10 + 2 * patience < now < 20]
    assert all(seen.rate == pytest.approx(20 * MBIT, rel=0.2) for seen in between)


@each("seed", range(3))
def test_stalled_threads_do_not_move_the_estimate(seed: int) -> None:
    looks = simulate(lambda now: 50 * MBIT, 60_000, 0.1, stalls=0.08, seed=seed)  # each 9.6 ms of line time
    ratios = _ratios(looks, 50 * MBIT)
    assert 0.9 < ratios[len(ratios) // 20] <= ratios[-1] < 1.1
    assert ratios[0] > 0.5  # three in a row are taken for a change, of a stalled machine's


def test_acknowledgements_stuck_behind_the_other_directions_traffic_cost_no_accuracy() -> None:
    looks = simulate(lambda now: 20 * MBIT, 50_000, 0.25, back=lambda now: 0.4 * (now % 1.0))
    ratios = _ratios(looks, 20 * MBIT)
    assert 0.9 < ratios[len(ratios) // 50] <= ratios[-1] < 1.1


def test_what_is_not_acknowledged_speaks_before_it_arrives() -> None:
    looks = simulate(lambda now: (0.1 if now >= 5 else 50) * MBIT, 100_000, 1.0, 12.0)
    assert _when(looks, lambda rate: rate < 1.0 * MBIT, 5.6) < 1.6
    assert _when(looks, lambda rate: rate < 0.2 * MBIT, 5.6) < 6.0
    before = [seen.rate for now, seen in looks if 1 < now < 5.6]
    assert min(rate or 0.0 for rate in before) > 40 * MBIT


def test_neither_offset_nor_wrap_of_the_peers_clock_matters() -> None:
    plain = simulate(lambda now: 10 * MBIT, 20_000, 0.1, 12.0)
    wraps = simulate(lambda now: 10 * MBIT, 20_000, 0.1, 12.0, offset=TICKS * TICK - 6.0)
    for (_, a), (_, b) in zip(plain, wraps, strict=True):
        assert a.rate == pytest.approx(b.rate, rel=1e-3) if a.rate else b.rate is None
        assert a.rtt == b.rtt


def test_an_estimate_says_how_old_it_is_and_yields_to_a_newer_one() -> None:
    e = Estimator()
    assert e.estimate(0.0) == LinkEstimate()
    e.round_trip(0.0, ticks(0.5), 1.0)  # half a second each way, equal clocks
    assert e.estimate(1.5) == LinkEstimate(None, 1.0, 0.5)
    for i in range(6):
        told(e, 10_000, 2.0 + i, 2.6 + i, 3.1 + i)
    seen = e.estimate(9.1)
    assert (seen.rate, seen.rtt, seen.age) == pytest.approx((1e5, 1.0, 1.0), rel=1e-3)
    assert e.estimate(68.1).age == pytest.approx(60.0)
    told(e, 10_000, 100.0, 100.7, 101.2)  # alone, but the others are a minute older
    assert e.estimate(101.2).rate == pytest.approx(5e4, rel=1e-3)
    e.delivered(Acked(10_000, clean=False), ticks(102.0), 103.0)  # sent again: no measurement
    assert e.estimate(103.0).rate == pytest.approx(5e4, rel=1e-3)


def test_small_messages_do_not_wipe_out_what_a_large_one_told() -> None:
    e = Estimator()
    e.round_trip(0.0, ticks(0.5), 1.0)
    told(e, 1_000_000, 2.0, 2.6, 3.1)  # 10 MB/s
    for i in range(200):
        told(e, 2_000, 4 + i / 10, 4.5003 + i / 10, 5 + i / 10)  # at least 1 MB/s
    seen = e.estimate(26.0)
    assert seen.rate == pytest.approx(10e6, rel=1e-3) and not seen.lower_bound
    assert seen.age == pytest.approx(22.9)
    for i in range(2):
        told(e, 60_000, 30.0 + i, 30.501 + i, 31.1 + i)  # at least 30 MB/s
    seen = e.estimate(33.0)
    assert seen.rate == pytest.approx(30e6) and seen.lower_bound


def test_what_was_sent_before_the_link_changed_does_not_count() -> None:
    e = Estimator(since=5.0)
    e.round_trip(4.9, ticks(4.9), 5.1)
    e.delivered(Acked(10_000, 4.9, 5.0), ticks(5.0), 5.1)
    assert e.estimate(6.0).rtt is e.estimate(6.0).rate is None


@contextmanager
def _mailboxes(shape: LinkShape) -> Iterator[tuple[Reliable, Mailbox, Mailbox, Metered, Shaped]]:
    x, y = loopback_pair()
    meter = Metered(x)
    shaped = Shaped(meter, shape)
    links: list[Link] = [shaped, Shaped(y, shape)]
    a, b = (Reliable(link, deadline=LONG) for link in links)
    boxes = Mailbox(a), Mailbox(b)
    try:
        a.wait_alive(LONG)
        yield a, *boxes, meter, shaped
    finally:
        for box in boxes:
            box.close(2.0)


@each("text", ["200kbit,10ms", "2mbit,30ms", "50mbit,5ms"])
def test_a_probe_measures_an_idle_link_within_its_bounds(text: str) -> None:
    shape = LinkShape.parse(text)
    with _mailboxes(shape) as (_, box, other, meter, _):
        end = monotonic() + LONG
        ratios: list[float] = []
        while (
            not (ratios and 0.75 < ratios[-1] < 1.25) and monotonic() < end
        ):  # a stalled machine may spoil one
            before, start = meter.snapshot(), monotonic()
            found = probe(box, box_link(box)).result(LONG)
            took = monotonic() - start
            assert (meter.snapshot() - before).sent_bytes <= 1.03 * NBYTES
            assert found.rate is not None and found.rtt is not None and shape.rate is not None
            assert found.rtt >= 2 * shape.delay
            ratios.append(found.rate / shape.rate)
            assert took < 0.6 + 6 * 2 * shape.delay + LONG / 3
        assert ratios and 0.75 < ratios[-1] < 1.25
        with pytest.raises(LinkError, match="waited"):
            other.get(b"x", 0.1, "anything")  # the filler is dropped, not filed
        assert not other._filed


def box_link(box: Mailbox) -> Reliable:
    link = box._link
    assert isinstance(link, Reliable)
    return link


def test_a_probe_leaves_a_busy_link_alone_and_fails_with_a_lost_one() -> None:
    with _mailboxes(LinkShape.parse("2mbit,30ms")) as (link, box, _, meter, _):
        sent = box.send(b"x", bytes(200_000), "forward")
        before = meter.snapshot()
        assert probe(box, link).result(0) == link.estimate()
        assert (meter.snapshot() - before).sent_bytes == 0
        sent.result(LONG)
        trial: Future[LinkEstimate] = probe(box, link)
        box.close(0.0)
        with pytest.raises(LinkError):
            trial.result(LONG)


def test_a_shaped_link_that_changes_is_followed() -> None:
    fast, slow = LinkShape.parse("100mbit,10ms"), LinkShape.parse("5mbit,10ms")
    with _mailboxes(fast) as (link, box, other, _, shaped):
        seen = []
        for shape in (fast, slow, fast):
            shaped._timetable.shape = shape
            end, found = monotonic() + LONG, False
            while monotonic() < end and not found:
                box.send(b"x", bytes(100_000), "forward")
                other.get(b"x", LONG, "the message")
                sleep(0.05)
                rate, truth = link.estimate().rate, shape.rate
                found = rate is not None and truth is not None and abs(rate / truth - 1) < 0.35
            seen.append(found)
        assert seen == [True, True, True]
