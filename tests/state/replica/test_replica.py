"""A replica: patches, swaps, damage, contents that are checked, work done ahead."""

import contextlib
import dataclasses

import numpy as np
import pytest
import states
import torch
from replicas import LONG, advance, changed, pair, resealed

from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.state.patch_code.blocks import Block
from thinwire.state.patches import body as bodies
from thinwire.state.patches import moves
from thinwire.state.patches.patch import Patch
from thinwire.state.replica import Replica
from thinwire.types import DesyncError, InputError, PayloadError


def test_what_is_applied_is_seen_after_the_swap():
    history, state, replica = pair()
    first = {n: x.clone() for n, x in replica.tensors().items()}
    patch = advance(history, state, 2)
    assert replica.apply(patch).number == 2
    assert replica.version == 1 and replica.held.number == 2 and states.same(replica.tensors(), first)
    assert replica.swap() and not replica.swap()
    assert (replica.version, replica.hash, replica.meta) == (2, history.newest.hash, {"step": 2})
    assert replica.published == history.newest.published and 0 < replica.pause < LONG
    assert states.same(replica.tensors(), states.whole(history))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_both_buffers_stay_alike_however_often_they_are_swapped(share, every):
    history, state, replica = pair()
    for i in range(2, 14):
        replica.apply(states.over_the_wire(advance(history, state, i, share)))
        if i % every == 0:
            assert replica.swap()
            replica.check()
            assert states.same(replica.tensors(), states.whole(history))


def test_nothing_is_shown_before_the_first_version():
    history, _, _ = pair()
    replica = Replica(history.layout)
    assert not replica.swap() and replica.version == 0 and replica.held.hash == 0
    with pytest.raises(InputError, match="nothing is in front"):
        replica.tensors()
    with pytest.raises(InputError, match="nothing to save"):
        replica.save("nowhere")
    replica.check()


def test_lossy_tensors_follow_within_their_bound():
    history, state, replica = pair()
    for _ in range(8):
        state["lossy"] += 0.004
        history.publish(state)
        replica.apply(history.patch(replica.held.number))
        replica.swap()
        exact = replica.tensors()["lossy"].double()
        assert (exact - state["lossy"].double()).abs().max() <= states.BOUND + 2**-8 * exact.abs().max()


def test_a_patch_that_does_not_fit_changes_nothing():
    history, state, replica = pair()
    second = advance(history, state, 2)
    third = advance(history, state, 3)
    old, again = history.patch(1), Replica(history.layout)
    for wrong, error, match in [
        (third, DesyncError, "a patch from version 2, held is 1; ask for a keyframe"),
        (changed(second, base_hash=1), DesyncError, "ask for a keyframe"),
        (changed(second, hash=1), DesyncError, "came out different"),
        (changed(second, version=1), DesyncError, "version 1 is not newer than 1"),
        (changed(second, layout="00" * 16), PayloadError, "other names, shapes or dtypes"),
        (changed(second, body=b""), PayloadError, "ends 2 bytes too early"),
        (changed(second, body=second.body + b"x"), PayloadError, "1 bytes too many"),
        (changed(second, body=third.body), DesyncError, "came out different"),
        (changed(history.patch(), hash=1), DesyncError, "came out different"),
        (changed(history.patch(), body=second.body), PayloadError, "kind 1"),
        (changed(second, body=history.patch().body), PayloadError, "kind 2"),
    ]:
        with pytest.raises(error, match=match):
            replica.apply(wrong)
        assert replica.held.number == 1 and not replica.swap()
    with pytest.raises(DesyncError, match="held is 0"):
        again.apply(second)
    replica.apply(second)
    with pytest.raises(DesyncError):
        replica.apply(old)
    replica.apply(third)
    assert replica.swap() and states.same(replica.tensors(), states.whole(history))


@pytest.mark.parametrize("keyframe", [False, True])
def test_damage_that_the_checksum_does_not_tell_is_told_by_the_contents(keyframe):
    history, state, replica = pair()
    patch = advance(history, state, 2)
    patch = history.patch() if keyframe else patch
    packed, start, g = patch.pack(), len(patch.pack()) - patch.nbytes, np.random.default_rng(0)
    for _ in range(400):
        bad = bytearray(packed)
        for at in g.integers(start, len(packed), g.integers(1, 4)):
            bad[at] ^= g.integers(1, 256)
        other = states.copy_of(replica)
        with contextlib.suppress(PayloadError, DesyncError):
            other.apply(Patch.unpack(resealed(bad)))
            assert other.held.hash == patch.hash  # damage that means the same
            continue
        assert other.held.number == 1
        other.check()
    replica.check()
    replica.apply(patch)
    assert replica.swap() and states.same(replica.tensors(), states.whole(history))


def test_truths_are_zero_or_one():
    state = {"mask": torch.zeros(8, dtype=torch.bool)}
    history = History(Layout.of(state))
    history.publish(state)
    replica = Replica(history.layout)
    replica.apply(history.patch())
    at, layout = np.array([3], np.int32), history.layout
    body = bodies.pack_changes(layout, {0: Block(8, at, np.array([2], np.int8))})
    with pytest.raises(PayloadError, match="true or false"):
        replica.apply(Patch(1, 2, history.newest.hash, 5, 0.0, {}, layout.digest, body))


def test_a_tensor_that_was_written_to_is_found():
    history, state, replica = pair()
    replica.tensors()["embed"][0, 0] += 1
    with pytest.raises(DesyncError, match="were written to"):
        replica.check()
    states.train(state)
    history.publish(state)
    replica.apply(history.patch())
    replica.swap()
    replica.check()


def test_a_base_from_elsewhere_is_held_once():
    history, state, replica = pair()
    with pytest.raises(InputError, match="version 1 is held already"):
        replica.start(state)
    other = Replica(history.layout)
    with pytest.raises(InputError, match="one: shape"):
        other.start(state | {"one": torch.zeros(3)})
    other.start(state)
    with pytest.raises(DesyncError, match="is not version 0"):
        other.confirm(advance(history, state, 2).target)
    assert other.held.number == 0


@pytest.mark.parametrize("swapped", [False, True])
def test_what_is_made_beside_is_taken_when_it_is_newer(swapped):
    history, state, replica = pair()
    keyframe, patches = history.patch(), [advance(history, state, seed) for seed in (2, 3, 4)]
    replica.apply(patches[0])
    assert not swapped or replica.swap()
    beside, held = replica.beside(), replica.held
    for patch in (keyframe, patches[0]):
        beside.apply(patch)
        with pytest.raises(DesyncError, match="is not newer than 2"):
            replica.take(beside)
    with pytest.raises(DesyncError, match="came out different"):
        beside.apply(dataclasses.replace(patches[1], hash=7))
    beside.apply(patches[1])
    assert replica.held == held and replica.version == 1 + swapped
    assert (
        replica.take(beside) == replica.held and replica.held.number == 3 and replica.version == 1 + swapped
    )
    assert replica.swap() and replica.version == 3
    replica.check()
    replica.prepare()
    replica.apply(patches[2])
    assert replica.swap() and states.same(replica.tensors(), states.whole(history))


@pytest.mark.parametrize("ready", [False, True])
def test_writing_that_breaks_off_leaves_the_front_and_the_next_patch_whole(monkeypatch, ready):
    history, state, replica = pair()
    seen = {n: x.clone() for n, x in replica.tensors().items()}
    before = {n: x.clone() for n, x in state.items()}
    if ready:
        replica.apply(advance(history, state, 2))
    patch = advance(history, state, 3)

    def broken(words, made):
        writing(words, made[:1])
        raise MemoryError

    writing = moves.write
    with monkeypatch.context() as m:
        m.setattr(moves, "write", broken)
        with pytest.raises(MemoryError):
            replica.apply(patch)
    assert not replica.swap() and replica.held.number == 1 and states.same(replica.tensors(), seen)
    history.publish(before)  # so nothing that was half-written is written again
    replica.apply(history.patch(1))
    assert replica.swap() and states.same(replica.tensors(), states.whole(history))
    replica.check()


def test_what_can_be_done_before_a_patch_is_done_then():
    state = {"w": torch.zeros(64), "v": torch.zeros(8)}
    history = History(Layout.of(state))
    history.publish(state)
    replica = Replica(history.layout)
    replica.prepare()  # nothing is held yet
    replica.apply(history.patch())
    replica.prepare()  # what is held is not in use yet: its buffer is the one that a patch goes to
    assert replica.swap()
    replica.prepare()
    back = replica._back
    assert back is not None and back.words.hash() == history.newest.hash
    for step in range(3):
        state["w"][step] = 1.0
        history.publish(state)
        replica.apply(history.patch(replica.held.number))
        assert replica.swap() and replica.hash == history.newest.hash
        if step != 1:
            replica.prepare()  # with or without
            assert replica._back.words.hash() == replica._front.words.hash() == history.newest.hash
        replica.check()
    assert {replica._front, replica._back} >= {back}  # the two buffers that there were
