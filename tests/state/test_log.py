"""The log of changes: its budget, what it keeps longest, merged entries."""

import itertools

import numpy as np
import pytest
import states
import torch
from histories import follower, positions, published
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.state import log as logs
from thinwire.state.history import History
from thinwire.state.layout import Layout, Piece
from thinwire.state.log import IN_USE, KEPT, Change, ChangeLog, LogEntry, merge
from thinwire.state.patches import draft
from thinwire.state.patches.draft import Ends, Lane, in_use


def test_the_log_stays_within_its_budget_and_keeps_what_is_asked_for():
    budget = 2000
    history, state = published(budget=budget)
    replica = follower(history)
    for i in range(30):
        states.train(state, 0.02, i)
        history.publish(state)
        assert history.log_nbytes <= budget or len(history._log.bases()) == KEPT
    assert history.find(1, replica.held.hash) == 1  # the oldest, since others could be merged
    patch = history.patch(1)
    assert patch.base == 1 and len(history._log.bases()) < 30
    replica.apply(patch)
    replica.swap()
    assert states.same(replica.tensors(), states.whole(history))


def test_a_log_without_room_keeps_the_last_two():
    history, state = published(budget=0)
    for i in range(5):
        states.train(state, 1.0, i)
        history.publish(state)
        assert len(history._log.bases()) == min(i + 1, KEPT)
    assert history.patch(5).base == 5


def test_a_base_lately_asked_for_outlives_others(arrays_only):
    log = ChangeLog(states.layout(), 200)
    for base in range(1, 40):
        at = np.array([base % 7], np.int32)
        log.append(LogEntry(base, base, {0: Change(at, np.zeros(1, np.int16))}))
        if base in (3, 5):
            log.mark(base)
    assert {1, 3, 5, 39} <= set(log.bases()) and log.nbytes <= 200
    log.budget = 50
    log.append(LogEntry(40, 40, {}))
    assert list(log.bases()) == [5, 40]  # what was asked for longer ago went first


@pytest.mark.parametrize("share", [0.01, 0.1, 0.4])
def test_what_a_follower_is_about_to_hold_outlives_all_that_is_made_to_compare(share):
    """A link slower than its publisher: patches are made only for their size, from what is held still."""
    state, number = {"w": torch.randn(20_000)}, itertools.count()
    history, used = History(Layout.of(state, torch.bfloat16)), []
    history.keep(lambda: used)

    def publish(times):
        for _ in range(times):
            hit = torch.rand(20_000, generator=torch.Generator().manual_seed(next(number))) < share
            state["w"] = torch.where(hit, state["w"] * 1.01, state["w"])
            history.publish(state)

    publish(1)
    held = 1
    for _ in range(4):
        publish(4)
        sent = history.patch(held)
        used = [sent.version, held]
        for _ in range(3):
            publish(3)
            assert history.patch(held, mark=False).base == held
        publish(3)
        assert history.patch(sent.version).base == sent.version
        held = sent.version
        assert history.log_nbytes <= history.layout.nbytes * 2 or len(history._log.bases()) == KEPT


def test_an_entry_of_several_versions_is_not_taken_for_the_last_one():
    history, state = published(2, budget=0)
    replica = follower(history)
    history.keep(lambda: [1, 2])
    for i in range(5):
        states.train(state, 0.1, 10 + i)
        history.publish(state)
    assert len(history._log.since(2)) == 1  # there was no room for what lies between
    patch = history.patch(2)
    assert (patch.base, patch.version) == (2, 7)
    assert replica.apply(states.over_the_wire(patch)).hash == history.newest.hash


def test_where_a_patch_leads_is_kept_before_where_it_starts(monkeypatch):
    """Else the next one were a keyframe, and so slow to send that the one after it is lost in turn."""
    keyframes, patches = lanes = [Lane(), Lane()]
    assert in_use(lanes, [3]) == [3]
    patches.hand_over(1, 8)
    assert in_use(lanes, [3]) == [8, 3, 1]
    patches.under_way, keyframes.under_way = Ends(1, 9), Ends(0, 7)
    assert in_use(lanes, [3]) == [8, 3, 1, 7, 1, 9]  # made to see how large they are
    patches.wanted = True
    assert in_use(lanes, [3]) == [8, 9, 3, 1, 1, 7]
    monkeypatch.setattr(draft, "LATELY", 0.0)
    patches.hand_over(1, 8)
    assert in_use(lanes, [3]) == [9, 3, 1, 7]


def test_versions_in_use_are_bounded_and_the_least_important_goes_first(arrays_only):
    used = [5, 30, 1, 3]
    log = ChangeLog(states.layout(), 100, lambda: used)
    for base in range(1, 40):
        log.append(LogEntry(base, base, {0: Change(None, np.zeros(100, np.int16))}))
    assert set(log.bases()) == {*used} and log.nbytes <= 100 * IN_USE
    log.budget = 60
    log.append(LogEntry(40, 40, {0: Change(None, np.zeros(100, np.int16))}))
    assert list(log.bases()) == [5, 30] and log.nbytes == 400
    used = []
    log.append(LogEntry(41, 41, {}))
    assert list(log.bases()) == [5, 41]  # nobody uses them: the budget holds, but for the last two


def test_small_entries_are_not_merged_into_a_large_one_in_use_as_they_come(monkeypatch, arrays_only):
    sizes = []
    monkeypatch.setattr(
        logs, "merge", lambda entries, pieces: sizes.append(len(entries)) or merge(entries, pieces)
    )
    log = ChangeLog(states.layout(), 300, lambda: [1])
    log.append(LogEntry(1, 1, {0: Change(None, np.zeros(500, np.int16))}))
    for base in range(2, 52):
        at = np.array([base % 7], np.int32)
        log.append(LogEntry(base, base, {0: Change(at, np.zeros(1, np.int16))}))
    assert not sizes and log.nbytes == 1000 + 50 * 6
    log.append(LogEntry(52, 52, {0: Change(np.array([3], np.int32), np.zeros(1, np.int16))}))
    assert sizes and 1 in log.bases() and log.nbytes <= 1000 + 50 * 6


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(positions, st.booleans()), min_size=1, max_size=5), st.sampled_from([200, 1 << 16]))
def test_merged_entries_undo_what_each_of_them_undoes(steps, numel):
    """Undoing entries one by one, the latest first, or their merger at once, gives the same words."""
    g = np.random.default_rng(0)
    words, entries = g.integers(-99, 99, numel).astype(np.int16), []
    first = words.copy()
    for base, (at, whole) in enumerate(steps, 1):
        change = Change(None, words.copy()) if whole else Change(at, words[at])
        words[at] += 1
        entries.append(LogEntry(base, 0, {0: change}))
    merged = merge(entries, [Piece(0, 0, numel, np.dtype(np.int16), 0)])
    change = merged.changes[0]
    back = words.copy()
    back[slice(None) if change.positions is None else change.positions] = change.old
    assert merged.base == 1 and np.array_equal(back, first)
    assert change.positions is None or (np.diff(change.positions) > 0).all()
