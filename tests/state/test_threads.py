"""Pieces worked on at once: the same bytes as one after another, the same errors, and no thread left."""

from __future__ import annotations

import threading
import time

import pytest
import states
from histories import follower, published

from thinwire.state import layout as layouts
from thinwire.state import threads
from thinwire.state.threads import in_order
from thinwire.types import InputError


def at_once(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    """Let even small states be worked on by so many threads."""
    monkeypatch.setattr(layouts, "PIECE", 64)
    monkeypatch.setattr(threads, "WORTH", 16)
    monkeypatch.setattr(threads, "cores", lambda: cores)


def test_many_threads_make_and_apply_the_bytes_that_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    states.in_sections(monkeypatch)
    states.by_class(monkeypatch)
    bodies: list[list[bytes]] = []
    for cores in (1, 4):
        at_once(monkeypatch, cores)
        history, state = published(2)
        replica = follower(history)
        found = [history.patch().body]
        for i in range(3):
            states.train(state, 0.05 + 0.4 * i, 7 + i)  # few words, many, and nearly all
            history.publish(state, {"step": i})
            patch = history.patch(replica.held.number)
            states.piecemeal(states.over_the_wire(patch), replica, i)
            found += [patch.body, history.patch(1).body]
        assert replica.swap() and states.same(replica.tensors(), states.whole(history))
        replica.check()
        bodies.append(found)
    assert bodies[0] == bodies[1]


def test_an_error_in_one_thread_undoes_what_the_others_did(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once(monkeypatch, 4)
    history, state = published(2)
    before, words, running = history.newest, history._words.copy(), threading.active_count()
    states.train(state, 0.5)
    state["lossy"][90] = float("nan")  # in the last piece of it
    with pytest.raises(InputError, match="lossy has NaN"):
        history.publish(state)
    assert history.newest == before and history._words.hash() == words.hash() == before.hash
    assert threading.active_count() <= running


def test_what_is_left_is_not_begun() -> None:
    begun, others = list[int](), set(threading.enumerate())  # readings that tests let go live until collected

    def slowly(i: int) -> None:
        begun.append(i)
        time.sleep(0.01 * bool(i))  # so that others do not do it all before the first is looked at

    for _ in in_order(slowly, range(1000)):
        break
    assert len(begun) < 1000
    assert not [t for t in threading.enumerate() if t.name.startswith("words") and t not in others]
