"""What somebody wrote to a state, versions without changes, times and meta data."""

import contextlib
import json
import time
from dataclasses import replace

import pytest
import states
import torch
from each import each
from histories import follower, published
from replicas import advance

from thinwire.state import log
from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.state.patches.patch import MAX_TIME, Patch, check_meta, load_meta
from thinwire.state.replica import Replica
from thinwire.types import DesyncError, InputError, PayloadError


def test_versions_in_which_nothing_changes_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(log, "MOST", 50)
    history, state = published(budget=1 << 30)
    for _ in range(200):
        history.publish(state)
    assert len(history._log.bases()) == 50
    held = follower(history)
    states.train(state, 0.1, 3)
    history.publish(state)
    held.apply(history.patch(held.version))
    assert held.swap() and states.same(held.tensors(), states.whole(history))


def test_entries_count_however_little_changed():
    history, state = published(budget=100 * log.OVERHEAD)
    for _ in range(300):
        history.publish(state)
    assert history.log_nbytes <= 100 * log.OVERHEAD and len(history._log.bases()) <= 100


def test_more_entries_than_may_be_go_even_if_they_are_in_use(monkeypatch):
    monkeypatch.setattr(log, "MOST", 20)
    history, state = published(budget=1 << 30)
    history.keep(lambda: range(1, 500))
    for _ in range(60):
        history.publish(state)
    assert len(history._log.bases()) == 20


def test_a_follower_that_never_swaps_does_not_gather_changes_for_ever():
    state = {"w": torch.zeros(1 << 16)}
    history = History(Layout.of(state))
    history.publish(state)
    replica, gathered = follower(history), []
    replica.apply(advance_one(history, state, 0))
    assert replica.swap()
    for i in range(1, 200):
        replica.apply(advance_one(history, state, i))
        gathered.append(len(replica._behind or ()))
    assert 1 < max(gathered) <= 64
    assert replica.swap() and torch.equal(replica.tensors()["w"], state["w"])
    replica.apply(advance_one(history, state, 200))
    assert len(replica._behind) == 1 and replica.swap()
    assert torch.equal(replica.tensors()["w"], state["w"])


def advance_one(history, state, i):
    state["w"][i] = 1.0
    history.publish(state)
    return history.patch(history.newest.number - 1)


def test_what_somebody_wrote_to_is_not_saved(tmp_path):
    history, _ = published()
    replica = follower(history)
    replica.save(tmp_path / "held")
    replica.tensors()["embed"][0, 0] += 1
    with pytest.raises(InputError, match="version 1 was written to"):
        replica.save(tmp_path / "held")
    assert states.same(Replica.load(tmp_path / "held").tensors(), states.whole(history))
    assert [path.name for path in tmp_path.iterdir()] == ["held"]


@each("swaps", [False, True])
@each("every", [1, 3, 8])
def test_what_somebody_wrote_to_shows_in_time_and_a_keyframe_mends_it(every, swaps):
    history, state = published(budget=1 << 20)
    replica = Replica(history.layout, check_every=every)
    replica.apply(history.patch())
    for seed in range(2 * every):  # all is well, as often as it is looked at
        replica.swap()
        replica.apply(advance(history, state, seed + 2))
    replica.swap()
    before = replica.held
    replica.tensors()["embed"].view(torch.int16)[0, 0] ^= 1
    counted, passed = history.newest.number, 0
    with pytest.raises(DesyncError, match="were written to"):
        for _ in range(every):
            state["one"] += 1.0
            history.publish(state)
            replica.apply(history.patch(replica.held.number))
            passed += 1
            if swaps:
                replica.swap()
    assert passed < every and replica.held.number == before.number + passed
    for base in (replica.held.number, replica.held.number, None):  # as a follower asks
        with contextlib.suppress(DesyncError):
            replica.apply(history.patch(base))
            break
    assert base is None or swaps  # another buffer that is well is copied
    assert replica.swap() and history.newest.number > counted
    assert states.same(replica.tensors(), states.whole(history))


def test_whoever_does_not_want_contents_checked_need_not():
    history, state = published()
    replica = Replica(history.layout, check_every=0)
    replica.apply(history.patch())
    replica.swap()
    replica.tensors()["embed"].view(torch.int16)[0, 0] ^= 1
    for _ in range(5):
        state["one"] += 1.0
        history.publish(state)
        replica.apply(history.patch(replica.held.number))
    with pytest.raises(InputError, match="check_every=-1"):
        Replica(history.layout, check_every=-1)


@pytest.mark.parametrize("published", [1e308, -1.0, float(MAX_TIME), float("nan"), float("inf")])
def test_times_can_be_told_as_dates(published, tmp_path):
    history, state = published_at(5.0)
    with pytest.raises(InputError, match="is no time"):
        history.publish(state, published=published)
    assert history.newest.number == 1
    patch = history.patch()
    with pytest.raises(PayloadError, match="published at"):
        Patch.unpack(replace(patch, published=published).pack())
    replica = follower(history)
    replica._held = replace(replica.held, published=published)
    replica.save(tmp_path / "held")
    with pytest.raises(InputError, match="published at"):
        Replica.load(tmp_path / "held")
    time.localtime(MAX_TIME)


def published_at(when):
    state = states.tensors()
    history = History(states.layout(state))
    history.publish(state, published=when)
    return history, state


@each("text", ["\x1b[2J", "a\x07", "\r", "\u202e", "\x9b1m", "\ud800", "a\0"])
def test_meta_data_cannot_move_a_terminal_s_cursor(text):
    for meta in ({"a": text}, {text: 1}):
        with pytest.raises(InputError, match="plain text"):
            check_meta(meta)
        with pytest.raises(PayloadError, match="plain text") as error:
            load_meta(json.dumps(meta).encode())
        assert text not in str(error.value)


def test_meta_data_are_what_people_write():
    meta = {"note": "Läuft: 学習率 1e-6\n\tsecond line", "step": 3, "done": True, "loss": 0.5}
    assert load_meta(json.dumps(meta).encode()) == check_meta(meta) == meta
    for value in (10**400, -(10**30), float("nan")):
        with pytest.raises(InputError, match="finite numbers"):
            check_meta({"a": value})
