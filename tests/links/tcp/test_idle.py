"""TCP's window that shuts in pauses: what it costs a message and a step, and what the policy makes of it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from each import each

from tests.choosing.test_policies import after, both, rungs, steady
from thinwire.links.tcp.idle import FIRST_WINDOW, Line, idle_seconds
from thinwire.uses.training.pipeline.choosing.hide import HideBehindCompute
from thinwire.uses.training.pipeline.choosing.replay import Hop, Pipeline, Stage, step_seconds
from thinwire.uses.training.pipeline.recipes import parse_recipe

TRIP, RATE = 0.1, 25e6  # seconds, bytes/s: 200 Mbit/s, 50 ms one way
WIDE = FIRST_WINDOW / RATE


def auto(schedule: str = "eager1f1b") -> HideBehindCompute:
    policy = parse_recipe("auto").policy
    assert isinstance(policy, HideBehindCompute)
    return policy.under(schedule)


def seconds(line: Line, now: float, nbytes: float, first: float = WIDE) -> float:
    """Return how long a message's last byte takes to leave."""
    return line.send(now, nbytes / RATE, TRIP, first) - now


@each(("windows", "waits"), [(1, 0), (1.01, 1), (3, 1), (3.01, 2), (7, 2), (15.1, 4)])
def test_a_message_waits_a_round_trip_for_each_doubling(windows: float, waits: int) -> None:
    """Ten segments, twenty, forty: what was sent before counts as line time of the round."""
    sent = (2**waits - 1) * WIDE
    expected = waits * TRIP + windows * WIDE - sent
    assert seconds(Line(), 0.0, windows * FIRST_WINDOW) == pytest.approx(expected)


def test_a_slow_line_is_full_before_the_window_is_open() -> None:
    slow = 1e5  # ten segments take longer than a round trip
    line = Line()
    assert line.send(0.0, 1e6 / slow, TRIP, FIRST_WINDOW / slow) == pytest.approx(10.0)


def test_a_window_once_open_stays_open_and_shuts_in_pauses() -> None:
    nbytes = 15 * FIRST_WINDOW
    line = Line()
    first = seconds(line, 0.0, nbytes)
    assert first > 3 * TRIP
    assert seconds(line, line.free + 0.29, nbytes) == pytest.approx(nbytes / RATE)  # within the timeout
    halved = seconds(line, line.free + 0.31, nbytes)
    assert nbytes / RATE < halved < 2 * TRIP
    assert seconds(line, line.free + 60.0, nbytes) == pytest.approx(first)


def test_small_messages_do_not_open_it() -> None:
    line = Line()
    for _ in range(50):
        seconds(line, line.free, FIRST_WINDOW / 3)
    assert seconds(line, line.free, 15 * FIRST_WINDOW) == pytest.approx(
        seconds(Line(), 0.0, 15 * FIRST_WINDOW)
    )


def test_who_keeps_the_window_waits_for_nothing() -> None:
    assert seconds(Line(), 0.0, 1e6, first=0.0) == pytest.approx(1e6 / RATE)


def test_what_a_message_waited_is_told_from_its_time() -> None:
    """However fast the line: the time of a message has one explanation."""
    rng = random.Random(0)
    for _ in range(300):
        rate, trip, nbytes = 10 ** rng.uniform(4, 8), rng.uniform(0.01, 0.3), int(10 ** rng.uniform(3, 7))
        took = Line().send(0.0, nbytes / rate, trip, FIRST_WINDOW / rate)
        assert idle_seconds(nbytes, took, trip) == pytest.approx(took - nbytes / rate, abs=1e-9)


def step(nbytes: float, compute: float, restarts: bool) -> float:
    hops = (Hop.over(nbytes, RATE, TRIP / 2, restarts),)
    stages = (Stage(compute / 12, compute / 6), Stage(compute / 12, compute / 6))
    return step_seconds(Pipeline(stages, hops, hops, 4, "eager1f1b"))


def test_a_step_pays_for_pauses_only() -> None:
    """What the study of links shows: long steps pay for large messages, short ones do not."""
    assert step(295e3, 2.0, True) > step(295e3, 2.0, False) * 1.1
    assert step(10e3, 2.0, True) == pytest.approx(step(10e3, 2.0, False))
    assert step(295e3, 0.2, True) == pytest.approx(step(295e3, 0.2, False), rel=0.01)


def test_a_restart_never_makes_a_shorter_step() -> None:
    rng = random.Random(0)
    for _ in range(200):
        nbytes, compute = 10 ** rng.uniform(2, 7), 10 ** rng.uniform(-2, 1)
        assert step(nbytes, compute, True) >= step(nbytes, compute, False) - 1e-9


def test_a_rate_that_is_not_limited_needs_no_window() -> None:
    assert Hop.over(1e6, None, 0.05, True) == Hop(0.0, 0.05)
    assert Hop.over(1e6, RATE, 0.05, False).window == 0.0


# -- the policy ----------------------------------------------------------------------------------------------


def test_the_policy_sends_no_more_than_the_window_lets_through() -> None:
    known = {"rate": RATE, "compute": 2.2, "rtt": TRIP}
    steady_tcp = steady(auto(), both(**known))  # type: ignore[arg-type]
    restarting = steady(auto(), both(**known, restarts=True))  # type: ignore[arg-type]
    assert rungs(steady_tcp) == [5, 5]
    assert restarting[0].rung < 4 and "TCP restarts after pauses" in restarting[0].reason
    # The window shuts for long between two steps, for one timeout between gradients, which 1F1B parts.
    assert restarting[1].rung == 5
    assert rungs(steady(auto("gpipe"), both(**known, restarts=True)))[1] < 5  # type: ignore[arg-type]
    assert not any("restarts" in p.reason for p in steady_tcp)


def test_where_nothing_pauses_a_restart_is_no_matter() -> None:
    for rate in (1e5, 1e6, RATE):
        sites = both(rate, 0.15, TRIP)
        there = [replace(s, restarts=True) for s in sites]
        assert rungs(steady(auto(), there)) == rungs(steady(auto(), sites))


@each("schedule", ["eager1f1b", "gpipe", "1f1b"])
def test_bits_and_rates_that_waver_change_next_to_nothing(schedule: str) -> None:
    """The margin is one to the window too: a message just within it would fall out of it again."""
    rng, policy = random.Random(4), auto(schedule)
    for k in range(5):
        rate, changes, held = 10 ** (5 + 2 * k / 3), -1, list[int]()
        sites = both(rate, 2.0, TRIP, restarts=True)
        plans = policy.choose(sites)
        for _ in range(100):
            sites = [
                replace(
                    s,
                    rate=rate * rng.uniform(0.9, 1.1),
                    bits=policy.ladder(s)[p.rung].bits * rng.uniform(0.95, 1.05),
                )
                for s, p in zip(after(sites, plans), plans, strict=True)
            ]
            plans = policy.choose(sites)
            changes += rungs(plans) != held
            held = rungs(plans)
        assert changes <= 4, (rate, changes)
