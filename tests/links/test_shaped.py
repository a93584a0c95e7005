"""Shaped links: the text form, the timetable in virtual time, and the thread that keeps it."""

from __future__ import annotations

import threading
from concurrent.futures import wait
from time import monotonic

import pytest
from each import each
from hypothesis import given
from hypothesis import strategies as st

from thinwire.links import LinkShape, Metered, Shaped, ZmqLink, loopback_pair
from thinwire.links.shape import SEGMENT
from thinwire.links.shaped import Timetable
from thinwire.types import InputError, LinkError

LONG = 30.0


@each(
    ("text", "shape"),
    [
        ("none", LinkShape()),
        ("10mbit,30ms", LinkShape(1.25e6, 0.03)),
        ("10mbit,30ms,jitter=2ms,loss=0.1%", LinkShape(1.25e6, 0.03, 0.002, 0.001)),
        ("500kbit", LinkShape(62500.0)),
        ("1.5gbit, 200us", LinkShape(187.5e6, 2e-4)),
        ("1s", LinkShape(None, 1.0)),
        ("delay=5ms,rate=1mbit", LinkShape(125e3, 0.005)),
        ("0ms,loss=0.01", LinkShape(loss=0.01)),
        ("10MBIT", LinkShape(1.25e6)),
    ],
)
def test_parse(text: str, shape: LinkShape) -> None:
    assert LinkShape.parse(text) == shape
    assert LinkShape.parse(str(shape)) == shape


@each(
    ("text", "part"),
    [
        ("", "''"),
        ("10", "'10'"),
        ("fast", "'fast'"),
        ("0mbit", "'0mbit'"),
        ("-1mbit", "'-1mbit'"),
        ("10mbit,-3ms", "'-3ms'"),
        ("10mbit,30ms,40ms", "second delay"),
        ("10mbit,20mbit", "second rate"),
        ("10mbit,,30ms", "''"),
        ("10mbit,jitter=3mbit", "'jitter=3mbit'"),
        ("loss=100%", "loss of 100% is not"),
        ("loss=3ms", "'loss=3ms'"),
        ("speed=3ms", "'speed=3ms'"),
        ("none,3ms", "'none'"),
        ("1e3mbit", "'1e3mbit'"),
        ("nanms", "'nanms'"),
    ],
)
def test_a_bad_link_names_the_part(text: str, part: str) -> None:
    with pytest.raises(InputError, match=r"write it like 10mbit") as e:
        LinkShape.parse(text)
    assert part in str(e.value)
    assert "\n" not in str(e.value)


def test_bad_numbers_are_refused_in_the_constructor_too() -> None:
    for bad in ({"rate": 0.0}, {"rate": -1.0}, {"delay": -1.0}, {"jitter": float("nan")}, {"loss": 1.0}):
        with pytest.raises(InputError):
            LinkShape(**bad)


@given(
    st.none() | st.integers(1, 10**7).map(lambda n: n * 125.0),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.integers(0, 999),
)
def test_str_reads_back(rate: float | None, delay: int, jitter: int, loss: int) -> None:
    shape = LinkShape(rate, delay * 1e-6, jitter * 1e-6, loss / 1000)
    again = LinkShape.parse(str(shape))
    assert again.rate == pytest.approx(shape.rate) if rate else again.rate is None
    assert (again.delay, again.jitter, again.loss) == pytest.approx((shape.delay, shape.jitter, shape.loss))


def test_a_message_holds_the_line_and_then_travels() -> None:
    line = Timetable(LinkShape(1000.0, 0.5))
    assert line.arrival(10.0, 100) == pytest.approx(10.6)
    assert line.arrival(10.0, 200) == pytest.approx(10.8)  # behind the first
    assert line.arrival(20.0, 100) == pytest.approx(20.6)  # the line was free again


def test_lifted_messages_take_no_line_time_but_keep_the_order() -> None:
    line = Timetable(LinkShape(1000.0, 0.5))
    assert line.arrival(0.0, 1000) == pytest.approx(1.5)
    assert line.arrival(0.1, 10**9, shaped=False) == pytest.approx(1.5)
    assert line.arrival(2.0, 10**9, shaped=False) == 2.0
    assert line.arrival(2.0, 1000) == pytest.approx(3.5)


@given(st.lists(st.tuples(st.floats(0, 0.01), st.integers(0, 5000)), max_size=50), st.integers(0, 9))
def test_jitter_and_loss_never_change_the_order(steps: list[tuple[float, int]], seed: int) -> None:
    line, now, last = Timetable(LinkShape(1e6, 0.01, 0.02, 0.2), seed), 0.0, 0.0
    for step, size in steps:
        now += step
        due = line.arrival(now, size)
        assert due >= max(last, now + 0.01 + size / 1e6)
        last = due


def test_jitter_is_spread_over_its_range() -> None:
    line = Timetable(LinkShape(delay=0.1, jitter=0.01), seed=1)
    late = [line.arrival(float(i), 100) - i - 0.1 for i in range(500)]
    assert 0 <= min(late) < 0.001
    assert 0.009 < max(late) < 0.01


def test_loss_costs_the_segments_again_and_a_round_trip() -> None:
    shape, n = LinkShape(1e6, 0.05, loss=0.01), 4000
    line = Timetable(shape, seed=2)
    extra = [line.arrival(float(i), SEGMENT) - i - SEGMENT / 1e6 - 0.05 for i in range(n)]
    hit = [e for e in extra if e > 1e-6]
    assert 0.5 * 0.01 * n < len(hit) < 1.7 * 0.01 * n
    assert min(hit) == pytest.approx(0.1 + SEGMENT / 1e6)  # one round trip and one segment more
    again = Timetable(shape, seed=2)
    assert [again.arrival(float(i), SEGMENT) - i - SEGMENT / 1e6 - 0.05 for i in range(n)] == extra
    bulk = Timetable(LinkShape(1e6, loss=0.1), seed=3).arrival(0.0, 1000 * SEGMENT)
    assert bulk == pytest.approx(1000 * SEGMENT / 0.9 / 1e6, rel=0.05)


def test_the_thread_keeps_the_timetable_and_the_order() -> None:
    a, b = loopback_pair()
    shaped = Shaped(a, LinkShape(25e4, 0.05))
    start = monotonic()
    sent = [shaped.send(bytes([i]) * 10_000) for i in range(20)]
    queued = monotonic() - start
    assert not sent[-1].done()
    for i in range(20):
        assert b.recv().result(LONG) == bytes([i]) * 10_000
    took = monotonic() - start
    assert took >= 0.05 + 20 * 10_009 / 25e4
    assert queued < took / 2  # sending does not wait for the line
    assert not wait(sent, LONG).not_done
    assert shaped.lateness.messages == 20
    assert 0 <= shaped.lateness.mean <= shaped.lateness.worst
    shaped.close()


def test_what_was_not_shaped_says_nothing_of_how_exact_the_shape_was() -> None:
    a, _ = loopback_pair()
    shaped = Shaped(a, LinkShape(1e6, 0.01))
    with shaped.lifted():
        sent = [shaped.send(b"evaluation") for _ in range(3)]
    sent.append(shaped.send(b"training"))
    assert not wait(sent, LONG).not_done
    assert shaped.lateness.messages == 1
    shaped.close()


def test_an_injected_clock_decides_when_messages_go() -> None:
    a, b = loopback_pair()
    now = [100.0]
    shaped = Shaped(a, LinkShape(delay=1.0), clock=lambda: now[0])
    first = shaped.send(b"x")
    assert wait([first], 0.2).not_done
    now[0] = 101.0
    with shaped.lifted():
        shaped.send(b"y")  # behind the first; wakes nobody before its time
    assert b.recv().result(LONG) == b"x"
    assert b.recv().result(LONG) == b"y"
    shaped.close()


def test_lifted_traffic_passes_at_once() -> None:
    a, b = loopback_pair()
    shaped = Shaped(a, LinkShape(delay=1000.0))
    with shaped.lifted():
        shaped.send(b"evaluation", "evaluation")
    assert b.recv().result(LONG) == b"evaluation"
    stuck = shaped.send(b"training")
    shaped.close(timeout=0.1)
    with pytest.raises(LinkError, match="closed"):
        stuck.result(LONG)


def test_close_flushes_and_leaves_no_thread() -> None:
    before = threading.active_count()
    a, b = loopback_pair()
    shaped = Shaped(Metered(a), LinkShape(delay=0.1))
    got, done = b.recv(), shaped.send(b"last words")
    shaped.close()
    assert (got.result(0), done.result(0)) == (b"last words", None)
    with pytest.raises(LinkError):
        shaped.send(b"more").result(0)
    shaped.close()
    assert threading.active_count() <= before


def test_no_shape_passes_through_without_a_thread() -> None:
    before = threading.active_count()
    a, b = loopback_pair()
    shaped = Shaped(a, LinkShape())
    with shaped.lifted():
        shaped.send(b"x")
    assert b.recv().result(0) == b"x"
    assert threading.active_count() <= before
    shaped.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_message_that_the_link_below_refuses_fails_all_that_wait() -> None:
    below = ZmqLink.bind(b"n", peer="rank 1", connect_timeout=LONG, max_message=100)
    shaped = Shaped(below, LinkShape(delay=0.1))
    waiting = [shaped.send(bytes(size)) for size in (200, 1, 1)]
    why = r"^the shaped link to rank 1 \(.*\) failed: InputError: a message of 200 bytes"
    for sent in waiting:
        with pytest.raises(LinkError, match=why):
            sent.result(LONG)
    with pytest.raises(LinkError, match=why):
        shaped.send(b"late").result(LONG)
    shaped.close()
