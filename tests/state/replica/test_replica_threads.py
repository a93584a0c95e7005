"""Swapping, saving and applying at the same time."""

import os
import threading

import numpy as np
import pytest
import states
from replicas import LONG, advance, pair

from thinwire.state.patches import moves
from thinwire.state.replica import Replica
from thinwire.types import LinkError


def midway(monkeypatch):
    """Return a replica, the words of a newer version being written; what lets that go on; its thread."""
    history, state, replica = pair()
    replica.apply(advance(history, state, 2))
    patch = advance(history, state, 3)
    entered, go = threading.Event(), threading.Event()
    writing = moves.write

    def slow(words, made):
        entered.set()
        assert go.wait(LONG)
        writing(words, made)

    monkeypatch.setattr(moves, "write", slow)
    thread = threading.Thread(target=replica.apply, args=(patch,), daemon=True)
    thread.start()
    assert entered.wait(LONG)
    return replica, go, thread


def test_a_swap_does_not_wait_for_words_being_written(monkeypatch):
    replica, go, thread = midway(monkeypatch)
    assert not replica.swap() and replica.version == 1
    go.set()
    thread.join(LONG)
    assert replica.swap() and replica.version == 3
    replica.check()


def test_catching_up_waits_for_words_being_written(monkeypatch):
    replica, go, thread = midway(monkeypatch)
    with pytest.raises(LinkError, match=r"waited 0\.05 s for a version being written here"):
        replica.catch_up(0.05)
    threading.Timer(0.1, go.set).start()
    replica.catch_up(LONG)
    thread.join(LONG)
    assert replica.version == 3
    replica.catch_up(0.0)  # nothing is newer
    replica.check()


@pytest.mark.parametrize("swapped", [False, True], ids=["front", "ready"])
def test_patches_are_applied_while_a_version_is_saved(tmp_path, monkeypatch, swapped):
    history, state, replica = pair()
    replica.apply(advance(history, state, 2))
    if swapped:
        replica.swap()
    kept = states.whole(history)
    entered, go = threading.Event(), threading.Event()
    flush = os.fsync

    def slow(name):
        entered.set()
        assert go.wait(LONG)
        flush(name)

    monkeypatch.setattr(os, "fsync", slow)
    path = tmp_path / "state.safetensors"
    thread = threading.Thread(target=replica.save, args=(path,), daemon=True)
    thread.start()
    assert entered.wait(LONG)
    buffer = replica._saved
    before = [buffer.words[i].copy() for i in range(len(replica.layout.blocks()))]
    for seed in range(3, 8):
        replica.apply(advance(history, state, seed))
        if seed % 2:
            assert replica.swap() and states.same(replica.tensors(), states.whole(history))
            replica.check()
    assert all(np.array_equal(buffer.words[i], words) for i, words in enumerate(before))
    go.set()
    thread.join(LONG)
    found = Replica.load(path)
    assert found.version == 2 and states.same(found.tensors(), kept)
    replica.apply(advance(history, state, 9))
    assert replica._saved is None and replica.swap() and states.same(replica.tensors(), states.whole(history))


def test_one_thread_applies_while_another_uses_and_swaps():
    history, state, replica = pair()
    known = {1: replica.hash}
    done, wrong = threading.Event(), []

    def use():
        last = 0
        while not done.is_set():
            replica.swap()
            words = {n: x.clone() for n, x in replica.tensors().items()}
            if known.get(replica.version) != replica._front.words.hash() or replica.version < last:
                wrong.append(replica.version)
            if not states.same(words, replica.tensors()):
                wrong.append(-replica.version)
            last = replica.version

    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    for i in range(2, 60):
        patch = advance(history, state, i, 0.05)
        known[i] = patch.hash
        replica.apply(patch if i % 10 else history.patch())
    done.set()
    thread.join(LONG)
    assert not wrong and not thread.is_alive()
    replica.swap()
    assert states.same(replica.tensors(), states.whole(history))
