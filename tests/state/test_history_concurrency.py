"""Publishing while patches and keyframes are coded, and many who ask at once."""

import threading
import time

import numpy as np
import pytest
import states
import torch
from histories import follower, forget, positions, published
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.state.log import Change, Past, merge
from thinwire.state.patch_code import changes, classes
from thinwire.state.patches import body
from thinwire.state.replica import Replica
from thinwire.types import DesyncError, InputError, PayloadError


@pytest.mark.parametrize("share", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("log", ["kept", "merged", "lost"])
def test_what_is_published_while_a_patch_is_coded_is_not_in_it(monkeypatch, share, log):
    """Words are read as they were, whatever the log still knows."""
    states.by_class(monkeypatch)
    history, state = published(3, 0.1, budget=1 << 20)
    replica = follower(history)
    states.train(state, 0.05, 50)
    content = history.publish(state).hash
    choosing = classes.choose

    def publish_and_choose(blocks, look):
        if history.newest.number == 4:
            states.train(state, share, 60)
            history.publish(state)
            if log == "merged":
                history._log._entries[-2:] = [merge(history._log._entries[-2:], history.layout.blocks())]
            elif log == "lost":
                forget(history)
        return choosing(blocks, look)

    monkeypatch.setattr(changes, "choose", publish_and_choose)
    patch = history.patch(3)
    assert (patch.base, patch.version, patch.hash) == (3, 4, content) and history.newest.number == 5
    replica.apply(states.over_the_wire(patch))
    assert replica.held.hash == patch.hash
    assert not history._pasts


class Overwritten:
    """Words that somebody overwrites: before they are read, as they are, or never."""

    def __init__(self, version, touched, when):
        self.live, self.touched, self.when = version.copy(), touched, when
        self.past = Past(self)
        if when == "before":
            self.overwrite()

    def overwrite(self):
        self.past.keep(0, self.live.copy())
        self.live[self.touched] += 1

    def __getitem__(self, piece):
        if self.when == "as":
            self.overwrite()
        return self.live


@settings(deadline=None, max_examples=60)
@given(
    positions,
    positions,
    st.integers(0, 150),
    st.integers(0, 50),
    st.sampled_from(["never", "before", "as"]),
)
def test_words_of_a_version_are_read_whoever_overwrites_them(at, touched, start, length, when):
    base, stop = np.zeros(200, np.int16), start + length
    version, change = base.copy(), Change(at, base[at])
    version[at] += 7

    def past():
        return Overwritten(version, touched, when).past

    assert np.array_equal(past().words(0, start, stop), version[start:stop])
    assert np.array_equal(past().before(change, 0, start, stop), base[start:stop])
    for known in (change, Change(None, base), Change(np.arange(200, dtype=np.int32), base)):
        found, diffs = past().difference(known, 0).sparse()
        assert np.array_equal(found, at) and (diffs == 7).all()


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_published_while_a_keyframe_is_coded_is_not_in_it(monkeypatch, fails):
    history, state = published(3, budget=1 << 20)
    encoding, first = body.encode_whole, history.newest

    def publish_and_encode(words):
        if history.newest is first:
            states.train(state, 0.3, 70)
            if fails:  # what changed before the tensor that does not fit is put back
                with pytest.raises(InputError, match="lossy"):
                    history.publish(state | {"lossy": torch.full((97,), float("nan"))})
            history.publish(state)
            forget(history)
        return encoding(words)

    monkeypatch.setattr(body, "encode_whole", publish_and_encode)
    patch = history.patch()
    assert patch.version == 3 and not history._pasts
    replica = Replica(history.layout)
    assert replica.apply(states.over_the_wire(patch)).hash == patch.hash


def test_a_patch_by_class_needs_the_words_it_is_for(monkeypatch):
    states.by_class(monkeypatch)
    history, state = published()
    replica = follower(history)
    states.train(state, 0.1, 7)
    history.publish(state)
    patch = history.patch(1)
    with pytest.raises(PayloadError, match="none are held"):
        for section in body.Sections(history.layout, body.CHANGES).through(patch.body):
            body.unpack_section(history.layout, section)
    replica.tensors()["embed"].mul_(3)  # somebody writes to what is for reading
    with pytest.raises((PayloadError, DesyncError), match=r"other words|came out different"):
        replica.apply(patch)
    assert replica.held.number == 1 and not replica.swap()
    replica.apply(history.patch())
    assert replica.swap() and states.same(replica.tensors(), states.whole(history))


@pytest.mark.parametrize("jumps", [False, True])
def test_a_section_may_have_nothing_for_the_classes_that_others_have(monkeypatch, jumps):
    states.by_class(monkeypatch)
    states.in_sections(monkeypatch, 1)
    g = torch.Generator().manual_seed(0)
    names = ["jumps", "a", "b", "still"] if jumps else ["a", "b", "still"]
    state = {n: torch.randn(20_000 if n == "jumps" else 80_000, generator=g) for n in names}
    history = History(Layout.of(state, torch.bfloat16))
    history.publish(state)
    replica = follower(history)
    for n in ("a", "b"):  # small values change, as they do at a small learning rate
        state[n] += 1e-4 * torch.randn(80_000, generator=g)
    if jumps:
        state["jumps"] = 50 * torch.randn(20_000, generator=g)
    history.publish(state)
    chosen, choose = list[list[int]](), changes.choose
    monkeypatch.setattr(changes, "choose", lambda *a: chosen.append(choose(*a)) or chosen[-1])
    patch = history.patch(1)
    assert len(chosen) == 1 and chosen[0]
    replica.apply(states.over_the_wire(patch))
    assert replica.swap() and states.same(replica.tensors(), states.whole(history))


@pytest.mark.parametrize("by_class", [False, True])
def test_many_threads_ask_while_one_publishes(monkeypatch, by_class):
    if by_class:
        states.by_class(monkeypatch)
    history, state = published(budget=1 << 20)
    wrong, done = [], threading.Event()

    def follow():
        replica = Replica(history.layout)
        try:
            while not (done.is_set() and replica.held.number == history.newest.number):
                if replica.held.number < history.newest.number:
                    replica.apply(states.over_the_wire(history.patch(replica.held.number)))
                    replica.swap()
                    replica.check()
                else:
                    time.sleep(0.001)
        except Exception as e:
            wrong.append(e)

    threads = [threading.Thread(target=follow, daemon=True) for _ in range(3)]
    for t in threads:
        t.start()
    for i in range(40):
        states.train(state, 0.05, i)
        history.publish(state)
    done.set()
    for t in threads:
        t.join(120)
    assert not wrong and not any(t.is_alive() for t in threads)
