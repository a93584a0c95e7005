"""The emulator's model of time: rates that vary, and packets between ranks."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import Self

import pytest
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.links.profile import Profile, one_way, profiles
from thinwire.links.trace import Trace, TraceRow, VaryingRate
from thinwire.runs.emulator.path import SimulatedNetwork

STEP = Trace((TraceRow(0, 1e6, 2e6, 0.01), TraceRow(1, 1e5, 2e5, 0.03, 0.5)), period=2.0, name="step")


# Rates that vary


@st.composite
def varying(draw: st.DrawFn) -> VaryingRate:
    gaps = draw(st.lists(st.integers(1, 50), min_size=1, max_size=6))
    times = [sum(gaps[:i]) / 10 for i in range(len(gaps))]
    rates = [float(draw(st.integers(1, 10**6))) for _ in gaps]
    return VaryingRate(tuple(times), tuple(rates), sum(gaps) / 10)


def walk(line: VaryingRate, begin: float, nbytes: int) -> float:
    """Find the finish from change to change, in exact fractions: slow and plain."""
    times, period = [Fraction(round(10 * t), 10) for t in line.times], Fraction(round(10 * line.period), 10)
    time, left = Fraction(round(100 * begin), 100), Fraction(nbytes)
    while True:
        cycle, rest = divmod(time, period)
        i = bisect_right(times, rest) - 1
        end = cycle * period + [*times[1:], period][i]
        fits = (end - time) * int(line.rates[i])
        if left <= fits:
            return float(time + left / int(line.rates[i]))
        time, left = end, left - fits


TIMES = st.integers(0, 10**4).map(lambda n: n / 100)


@settings(deadline=None)
@given(varying(), TIMES, st.integers(1, 10**6))
def test_finish_is_what_walking_finds(line: VaryingRate, begin: float, nbytes: int) -> None:
    nbytes = min(nbytes, int(50 * line.period * line.mean) + 1)
    end = line.finish(begin, nbytes)
    assert end == pytest.approx(walk(line, begin, nbytes), rel=1e-9, abs=1e-9)
    assert line.between(begin, end) == pytest.approx(nbytes, rel=1e-6, abs=1e-3)


@settings(deadline=None)
@given(varying(), TIMES, st.integers(1, 10**6), st.integers(1, 10**6), st.integers(0, 1000))
def test_finish_adds_up_and_never_goes_back(
    line: VaryingRate, begin: float, first: int, second: int, later: int
) -> None:
    once = line.finish(begin, first + second)
    assert line.finish(line.finish(begin, first), second) == pytest.approx(once, rel=1e-9, abs=1e-9)
    assert begin < line.finish(begin, first) < once
    assert line.finish(begin + later / 100, first) >= line.finish(begin, first) - 1e-9


# The network


Offer = tuple[float, int, int, int]


class Sized(int):
    """The number of a packet that has so many bytes."""

    def __new__(cls, number: int, nbytes: int) -> Self:
        made = super().__new__(cls, number)
        made.nbytes = nbytes
        return made


def cut(packet: Sized, first: int, last: int) -> tuple[Sized, int]:
    """Return the packet for a part of itself, and a share of its bytes."""
    segments = 1 + packet.nbytes // 1500
    nbytes = packet.nbytes * last // segments - packet.nbytes * first // segments
    return Sized(packet, nbytes), nbytes


network = partial(SimulatedNetwork, cut=cut)


def run(net: SimulatedNetwork, offers: list[Offer], between: bool = True) -> list[tuple[float, int, Sized]]:
    """Offer packets (time, source, destination, bytes), deliver at every event; due, destination, number."""
    got: list[tuple[float, int, Sized]] = []

    def until(limit: float) -> None:
        while (due := net.next()) is not None and due <= limit:
            got.extend(net.deliver(due))

    for number, (time, source, destination, nbytes) in enumerate(offers):
        if between:
            until(time)
        net.offer(time, source, destination, nbytes, 1 + nbytes // 1500, Sized(number, nbytes))
    until(math.inf)
    return got


@st.composite
def traffic(draw: st.DrawFn) -> tuple[list[Profile], list[Offer]]:
    """Any links, and packets in order of time."""
    ranks = draw(st.integers(2, 4))
    rate = st.none() | st.integers(10**3, 10**7).map(float)
    profile = st.builds(
        Profile,
        up=rate,
        down=rate,
        delay=st.sampled_from([0.0, 1e-3, 0.05]),
        jitter=st.sampled_from([0.0, 0.02]),
        loss=st.sampled_from([0.0, 0.2]),
        queue=st.none() | st.integers(100, 10**5),
    )
    trace = st.just(Profile(trace=STEP))
    links = draw(st.lists(profile | trace, min_size=ranks, max_size=ranks))
    packet = st.tuples(
        st.sampled_from([0.0, 0.0, 1e-3, 0.1]),
        st.integers(0, ranks - 1),
        st.integers(1, ranks - 1),
        st.integers(1, 65000),
    )
    offers, time = [], 0.0
    for gap, source, step, nbytes in draw(st.lists(packet, max_size=60)):
        time += gap
        offers.append((time, source, (source + step) % ranks, nbytes))
    return links, offers


@settings(deadline=None)
@given(traffic(), st.integers(0, 3))
def test_every_packet_is_delivered_dropped_or_lost(
    traffic: tuple[list[Profile], list[Offer]], seed: int
) -> None:
    links, offers = traffic
    net = network(links, seed)
    got = run(net, offers)
    up, down = [c.up for c in net.counts()], [c.down for c in net.counts()]
    assert len(got) == sum(c.passed.packets for c in down)
    offered_packets = sum(c.passed.packets + c.dropped.packets for c in up)
    assert (
        offered_packets
        == len(offers)
        <= len({number for *_, number in got}) + sum(c.dropped.packets + c.lost.packets for c in (*up, *down))
    )
    for what in ("segments", "nbytes"):
        offered = {"segments": sum(1 + n // 1500 for *_, n in offers)}
        offered["nbytes"] = sum(n for *_, n in offers)
        total = lambda side, fate, what=what: sum(getattr(getattr(c, fate), what) for c in side)  # noqa: E731
        assert total(up, "passed") + total(up, "dropped") == offered[what]
        arrived = total(up, "passed") - total(up, "lost")
        assert total(down, "passed") + total(down, "dropped") == arrived
    assert all(c.lost.packets == 0 for c in down)
    assert net.next() is None


@settings(deadline=None)
@given(traffic())
def test_packets_of_a_pair_keep_their_order_and_their_delay(
    traffic: tuple[list[Profile], list[Offer]],
) -> None:
    links, offers = traffic
    last: dict[tuple[int, int], tuple[float, int]] = {}
    for due, rank, number in run(network(links), offers):
        time, source, destination, _ = offers[number]
        assert destination == rank
        least = one_way(links[source], links[rank], time) if not links[source].trace else 0.0
        if links[rank].trace is None:
            assert due >= time + least - 1e-9
        due_before, number_before = last.get((source, rank), (0.0, -1))
        assert number >= number_before
        assert due >= due_before
        last[source, rank] = (due, number)


@settings(deadline=None)
@given(traffic())
def test_no_window_of_a_downlink_holds_more_than_its_rate(traffic: tuple[list[Profile], list[Offer]]) -> None:
    links, offers = traffic
    arrivals: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for due, rank, number in run(network(links), offers):
        arrivals[rank].append((due, number.nbytes))
    for rank, at in arrivals.items():
        line = links[rank].downlink
        assert all(a <= b for (a, _), (b, _) in pairwise(at))
        for i in range(len(at)):
            sent = 0
            for due, nbytes in at[i + 1 :]:
                sent += nbytes
                assert line.finish(at[i][0], sent) <= due + 1e-6


@settings(deadline=None)
@given(traffic())
def test_when_it_is_called_changes_nothing(traffic: tuple[list[Profile], list[Offer]]) -> None:
    """A router that is late delivers late, but computes the same due times."""
    links, offers = traffic
    punctual = run(network(links), offers)
    late = network(links)
    for number, (time, source, destination, nbytes) in enumerate(offers):
        late.offer(time, source, destination, nbytes, 1 + nbytes // 1500, Sized(number, nbytes))
    assert sorted(late.deliver(1e9)) == sorted(punctual)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 3000)), max_size=80), st.integers(1, 8000))
def test_drop_tail_is_exact(packets: list[tuple[int, int]], queue: int) -> None:
    """Against a count of the bytes that wait, of which 100 leave a tick; an idle line takes any packet."""
    net = network([Profile(up=100.0, queue=queue)] * 2)
    waiting = tick = 0
    for gap, nbytes in packets:
        tick += gap
        waiting = max(0, waiting - 100 * gap)
        fits = not waiting or waiting + nbytes <= queue
        assert net.offer(float(tick), 0, 1, nbytes, 1, None) == fits
        waiting += nbytes if fits else 0


def test_an_idle_link_takes_exactly_its_time() -> None:
    net = network(profiles(["up=1mbit,down=2mbit,30ms", "1=none"], 2), start=1e6)
    assert run(net, [(1e6 + 3, 0, 1, 1250)]) == [(pytest.approx(1e6 + 3 + 0.01 + 0.015, abs=1e-9), 1, 0)]
    assert run(net, [(1e6 + 9, 1, 0, 1250)]) == [(pytest.approx(1e6 + 9 + 0.005 + 0.015, abs=1e-9), 0, 0)]


def test_a_trace_begins_with_the_network() -> None:
    net = network([Profile(loss=0.0, trace=STEP), Profile(delay=0.01)], start=1e6)
    first, second = run(net, [(1e6, 0, 1, 1000), (1e6 + 0.9999, 0, 1, 10100)])
    assert first[0] == pytest.approx(1e6 + 0.001 + 0.01, abs=1e-9)
    assert second[0] == pytest.approx(
        1e6 + 1.1 + 0.02, abs=1e-4
    )  # 100 bytes before the drop, the rest at a tenth


def test_a_trace_begins_again_when_asked_and_nothing_else_changes() -> None:
    """A packet is on the downlink and one on its way there when the trace goes back to its start."""
    ends = [Profile(loss=0.0, trace=STEP), Profile(delay=0.01, down=5e4)]
    net, straight = (network(ends, start=1e6) for _ in range(2))
    for n in (net, straight):
        assert all(n.offer(1e6 + 1.5, 0, 1, 1000, 1, number) for number in range(2))
        assert n.deliver(1e6 + 1.535) == []
    net.rewind(1e6 + 1.535)
    assert net.next() == pytest.approx(straight.next(), abs=1e-9)
    assert net.counts() == straight.counts()
    found, wanted = (n.deliver(1e6 + 1.7) for n in (net, straight))
    assert [(rank, packet) for _, rank, packet in found] == [(1, 0), (1, 1)]
    assert [due for due, *_ in found] == pytest.approx([due for due, *_ in wanted], abs=1e-9)
    second, first = (run(n, [(1e6 + 1.8, 0, 1, 1000)])[0][0] for n in (straight, net))
    assert second == pytest.approx(1e6 + 1.8 + 0.02 + 0.02, abs=1e-9)  # one way, and the slow downlink
    assert first == pytest.approx(1e6 + 1.8 + 0.01 + 0.02, abs=1e-9)


def test_one_sender_is_not_slowed_by_an_equal_downlink_and_two_share_it() -> None:
    burst = [(0.0, source, 0, 1000) for _ in range(20) for source in (1, 2)]
    one = run(network([Profile.parse("8mbit,10ms")] * 3), burst[::2])
    both = run(network([Profile.parse("8mbit,10ms")] * 3), burst)
    assert [due for due, *_ in one] == pytest.approx([0.01 + 0.001 * (i + 1) for i in range(20)])
    assert [due for due, *_ in both] == pytest.approx([0.01 + 0.001 * (i + 1) for i in range(40)])
    assert [number % 2 for *_, number in both] == [0, 1] * 20


def test_the_nearer_sender_arrives_first_though_it_sent_later() -> None:
    net = network([Profile(delay=0.2), Profile(), Profile(down=1e4)])
    assert run(net, [(0.0, 0, 2, 100), (0.05, 1, 2, 100)]) == [
        (pytest.approx(0.06), 2, 1),
        (pytest.approx(0.11), 2, 0),
    ]


def test_a_downlink_s_queue_drops_what_two_senders_overfill() -> None:
    links = [Profile.parse("8mbit,10ms,queue=5kB"), Profile.parse("8mbit,10ms"), Profile.parse("8mbit,10ms")]
    net = network(links)
    got = run(net, [(0.0, source, 0, 1000) for _ in range(30) for source in (1, 2)])
    dropped = net.counts()[0].down.dropped.packets
    assert dropped == 60 - len(got) > 10
    assert max(due for due, *_ in got) <= 0.01 + 0.03 + 0.005 + 1e-9


def test_losses_and_jitter_are_as_often_and_as_large_as_asked_and_the_same_again() -> None:
    offers = [(i * 0.1, 0, 1, 1000) for i in range(4000)]
    links = [Profile(delay=0.02, jitter=0.05, loss=0.1)] * 2
    net = network(links, seed=5)
    got = run(net, offers)
    assert 300 < net.counts()[0].up.lost.packets < 500
    late = [due - offers[number][0] for due, _, number in got]
    assert 0.02 <= min(late) < 0.021
    assert 0.069 < max(late) <= 0.07
    assert run(network(links, seed=5), offers) == got != run(network(links, seed=6), offers)


def test_jitter_does_not_reorder_a_pair() -> None:
    offers = [(i * 1e-3, 0, 1, 1000) for i in range(500)]
    got = run(network([Profile(jitter=0.05)] * 2), offers)
    assert [number for *_, number in got] == list(range(500))
    assert len({due for due, *_ in got}) < 400  # many came right behind a late one


@each("loss", [0.001, 0.02, 0.5])
def test_each_segment_is_lost_by_itself_as_often_as_asked(loss: float) -> None:
    net = network([Profile(loss=loss)] * 2, seed=1)
    lost, packets = 0, 4000
    for i in range(packets):
        net.offer(float(i), 0, 1, 65999, 44, Sized(i, 65999))
        before, lost = lost, net.counts()[0].up.lost.segments
        assert net.counts()[0].up.lost.packets <= i + 1 and lost - before <= 44
    counts = net.counts()[0].up
    assert counts.lost.segments == pytest.approx(loss * 44 * packets, rel=0.15)
    assert counts.lost.packets == pytest.approx(packets * (1 - (1 - loss) ** 44), rel=0.15)
    net.deliver(math.inf)
    down = net.counts()[1].down.passed
    assert down.segments == 44 * packets - counts.lost.segments
    assert down.nbytes == 65999 * packets - counts.lost.nbytes


def test_what_is_left_of_a_packet_arrives_when_its_bytes_do() -> None:
    """At 8 Mbit/s, 44 segments of 1500 bytes take 66 ms; the second half of them no less for the loss."""
    ends = [Profile.parse("8mbit,10ms,loss=10%")] * 2
    for seed in range(20):
        net = network(ends, seed)
        net.offer(0.0, 0, 1, 65999, 44, Sized(0, 65999))
        runs = net.deliver(math.inf)
        line = [due - 0.01 for due, *_ in runs]
        assert line == sorted(line) and line[-1] <= 0.066 + 1e-9
        counts = net.counts()
        assert line[-1] >= counts[1].down.passed.nbytes / 1e6 - 1e-9
        assert len(runs) == counts[1].down.passed.packets > 1


def test_nothing_that_is_left_overtakes() -> None:
    links = [Profile(delay=0.01, jitter=0.05, loss=0.2, up=1e6)] * 2
    got = run(network(links), [(i * 1e-3, 0, 1, 6000) for i in range(400)])
    assert [number for *_, number in got] == sorted(number for *_, number in got)
