"""The clock of a peer, told from time stamps of messages."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.links.hub.spoke import PeerClock


@settings(deadline=None)
@given(
    st.floats(-1e9, 1e9),
    st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), min_size=1, max_size=30),
)
def test_the_peer_s_clock_is_within_half_the_least_round_trip(
    ahead: float, ways: list[tuple[float, float]]
) -> None:
    """Whatever the queues on either way: the error is bounded by ``doubt``."""
    clock, now = PeerClock(), 0.0
    for there, back in ways:
        clock.add(now, now + there + ahead, now + there + back)
        now += there + back
    assert abs(clock.ahead - ahead) <= clock.doubt + 1e-6
    assert clock.trip == pytest.approx(min(a + b for a, b in ways), abs=1e-6)


def _told(clock: PeerClock, start: float, ahead: float, trip: float, stamps: int) -> float:
    """Let so many stamps come, one a second, with all of the trip on the way back; return when it is then."""
    for second in range(stamps):
        clock.add(start + second, start + second + ahead, start + second + trip)
    return start + stamps


@pytest.mark.parametrize("step", [-3600.0, -0.3, 0.3, 3600.0])
def test_a_clock_that_was_set_is_believed_at_once_whatever_came_before(step: float) -> None:
    """Also where the trips were shorter before: by how much it was set is more than both may be wrong."""
    clock, ahead = PeerClock(), 1.7e9
    now = _told(clock, 0.0, ahead, 0.01, 70)
    assert abs(clock.ahead - ahead) <= clock.doubt + 1e-6 and clock.doubt < 0.02
    _told(clock, now, ahead + step, 0.2, 1)
    assert abs(clock.ahead - ahead - step) <= clock.doubt + 1e-6 and clock.doubt < 0.2


def test_one_stamp_that_is_far_off_costs_no_more_than_the_next_one() -> None:
    clock, ahead = PeerClock(), 1.7e9
    now = _told(clock, 0.0, ahead, 0.01, 10)
    now = _told(clock, now, ahead + 99.0, 0.01, 1)
    _told(clock, now, ahead, 0.01, 1)
    assert abs(clock.ahead - ahead) <= clock.doubt + 1e-6 and clock.doubt < 0.01


def test_clocks_that_only_drift_keep_their_best_sample() -> None:
    clock, ahead = PeerClock(), 1.7e9
    now = _told(clock, 0.0, ahead, 0.01, 1)
    for second in range(60):
        _told(clock, now + second, ahead + 0.9e-4 * second, 0.5, 1)
    assert clock.trip == pytest.approx(0.01)
    assert abs(clock.ahead - ahead - 0.9e-4 * 60) <= clock.doubt + 1e-6


def test_stamps_that_cannot_be_are_not_believed() -> None:
    clock = PeerClock()
    for sent, theirs, received in ((2.0, 0.0, 1.0), (0.0, float("nan"), 1.0), (float("-inf"), 0.0, 1.0)):
        clock.add(sent, theirs, received)
    assert clock.trip is None and clock.ahead == 0.0 and clock.doubt == float("inf")
