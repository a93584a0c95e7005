"""Replicas: bit-identical to a published version after anything, never older, nothing half-applied."""

import contextlib
import dataclasses
import os
import threading
import zlib

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule
from torch import nn

import states
from thinwire.state import body as bodies
from thinwire.state import moves
from thinwire.state.blocks import Block
from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.state.patch import HEAD, Patch
from thinwire.state.replica import Replica
from thinwire.types import DesyncError, InputError, LinkError, PayloadError

LONG = 60.0  # seconds; a limit, not an expectation


def pair(share=0.1, **kwargs):
    """Return a history of one version, its tensors, and a replica of it."""
    state = states.tensors()
    history = History(states.layout(state), budget=1 << 20, **kwargs)
    history.publish(state, {"step": 1}, published=5.0)
    replica = Replica(history.layout)
    replica.apply(history.patch())
    assert replica.swap()
    return history, state, replica


def advance(history, state, seed, share=0.1):
    before = history.newest.number
    states.train(state, share, seed)
    history.publish(state, {"step": seed})
    return history.patch(before)


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


def changed(patch, **fields):
    return Patch(**(patch.__dict__ | fields))


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


def resealed(packed):
    """Return a damaged patch with a checksum that fits: what only bounds and contents can tell."""
    packed[8:12] = zlib.crc32(packed[HEAD.size :]).to_bytes(4, "little")
    return bytes(packed)


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


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.own = nn.Parameter(torch.ones(2))


def test_a_bound_model_follows_and_keeps_its_tensors():
    trained, model = Model(), Model()
    state = {n: x for n, x in trained.state_dict().items() if n != "own"}
    history = History(Layout.of(state))
    history.publish(state)
    replica = Replica(history.layout)
    replica.apply(history.patch())
    replica.bind(model)  # before the first swap: from then on
    own, parameters = model.own, list(model.parameters())
    assert replica.swap()
    for i in range(3):
        assert all(torch.equal(model.state_dict()[n], x) for n, x in state.items())
        assert model.head.weight is model.embed.weight and model.own is own
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
        assert model.embed.weight.data_ptr() == replica.tensors()["embed.weight"].data_ptr()
        with torch.no_grad():
            trained.embed.weight[i] += 1
            trained.norm.running_mean += 1
            trained.norm.num_batches_tracked += 1
        history.publish(state)
        replica.apply(history.patch(replica.held.number))
        assert replica.swap() and replica.pause < LONG
    late = Model()
    replica.bind(late)
    assert torch.equal(late.head.weight, trained.head.weight)


class Untied(Model):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(self.embed.weight.detach().clone())


def test_a_model_that_does_not_fit_is_told_which_tensor():
    def bound(state, model):
        replica = Replica(Layout.of(state))
        before = [x.data_ptr() for x in model.parameters()]
        try:
            replica.bind(model)
        finally:
            assert before == [x.data_ptr() for x in model.parameters()]

    state = Model().state_dict()
    with pytest.raises(InputError, match=r"own is float32 \[2\] in the model and float32 \[3\] in the state"):
        bound(state | {"own": torch.zeros(3)}, Model())
    with pytest.raises(InputError, match=r"own is float32 \[2\] in the model and float16 \[2\] in the state"):
        bound(state | {"own": torch.zeros(2, dtype=torch.float16)}, Model())
    with pytest.raises(InputError, match="other is in the state but not in the model"):
        bound(state | {"other": torch.zeros(2)}, Model())
    with pytest.raises(InputError, match=r"head.weight is tied in the model to embed.weight"):
        bound(Untied().state_dict(), Model())
    bound(state, Untied())


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


def test_a_saved_replica_goes_on_where_it_was(tmp_path):
    history, state, replica = pair()
    replica.apply(advance(history, state, 2))
    replica.save(tmp_path / "state.safetensors")  # what is held, though not in front yet
    back = Replica.load(tmp_path / "state.safetensors")
    assert (back.version, back.hash, back.meta) == (2, history.newest.hash, {"step": 2})
    assert back.layout == history.layout and states.same(back.tensors(), states.whole(history))
    back.apply(advance(history, state, 3))
    assert back.swap() and states.same(back.tensors(), states.whole(history))
    assert [p.name for p in tmp_path.iterdir()] == ["state.safetensors"]
    from safetensors.torch import load_file

    assert load_file(tmp_path / "state.safetensors")["embed"].dtype == torch.bfloat16  # others read it too


def test_a_damaged_file_is_no_saved_state(tmp_path):
    _, _, replica = pair()
    path = tmp_path / "state"
    replica.save(path)
    good, g = path.read_bytes(), np.random.default_rng(1)
    for at in g.integers(0, len(good), 60):
        bad = bytearray(good)
        bad[at] ^= 1 << g.integers(0, 8)
        path.write_bytes(bad)
        with contextlib.suppress(InputError):
            assert Replica.load(path).held == replica.held  # padding, or a tensor's name told by no one
    for n in (0, 5, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:n])
        with pytest.raises(InputError, match="delete it"):
            Replica.load(path)
    path.write_bytes(good)
    with pytest.raises(InputError, match=r"over the limit.*delete it"):
        Replica.load(path, max_nbytes=100)
    with pytest.raises(InputError, match="no file"):
        Replica.load(tmp_path / "none")


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    history, state, replica = pair()
    path = tmp_path / "state"
    replica.save(path)
    good = path.read_bytes()
    replica.apply(advance(history, state, 2))

    def full(name):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="No space left"):
        replica.save(path)
    assert path.read_bytes() == good and [p.name for p in tmp_path.iterdir()] == ["state"]
    with pytest.raises(InputError, match="cannot save a state to"):
        replica.save(tmp_path / "no" / "folder")


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


class Followers(RuleBasedStateMachine):
    """A publisher, a log too small for all, patches of both codes in any order, damage, replicas, a relay."""

    patches = Bundle("patches")
    which = st.integers(0, 2)

    def __init__(self):
        super().__init__()
        self.monkeypatch = pytest.MonkeyPatch()

    def teardown(self):
        self.monkeypatch.undo()

    @initialize(budget=st.sampled_from([0, 300, 1 << 20]), by_class=st.booleans(), cut=st.booleans())
    def begin(self, budget, by_class, cut):
        if by_class:
            states.by_class(self.monkeypatch)
        if cut:
            states.in_sections(self.monkeypatch)
        self.state = states.tensors()
        self.history = History(states.layout(self.state), budget=budget)
        self.versions = {}
        self.relay = History(self.history.layout, budget=budget)
        self.replicas = [Replica(self.history.layout) for _ in range(3)]
        self.last = [0, 0, 0]
        self.seed = 0
        self.note(self.history.publish(self.state))

    def note(self, version):
        assert version.number not in self.versions
        self.versions[version.number] = version.hash, states.whole(self.history)

    @rule(share=st.sampled_from([0.0, 0.002, 0.05, 0.4, 1.0]))
    def publish(self, share):
        self.seed += 1
        states.train(self.state, share, self.seed)
        self.note(self.history.publish(self.state))

    @rule(above=st.integers(0, 30))
    def count_anew(self, above):
        if above >= self.history.newest.number:
            self.note(self.history.outnumber(above))

    @rule(target=patches, data=st.data())
    def patch(self, data):
        older = [v for v in self.versions if v < self.history.newest.number]
        return self.history.patch(data.draw(st.sampled_from([None, *older])))

    @rule(i=which, patch=patches, seed=st.none() | st.integers(0, 99))
    def apply(self, i, patch, seed):
        replica = self.replicas[i]
        base, held = self.versions.get(patch.base, (0, {}))[0], replica.held
        fits = patch.version > held.number and (not patch.base or base == held.hash)
        if fits and seed is not None:
            assert states.piecemeal(patch, replica, seed).number == patch.version
        elif fits:
            assert replica.apply(states.over_the_wire(patch)).number == patch.version
        else:
            with pytest.raises(DesyncError):
                replica.apply(states.over_the_wire(patch))
            assert replica.held is held

    @rule(i=which, relayed=st.booleans())
    def catch_up(self, i, relayed):
        source = self.relay if relayed else self.history
        replica, newest = self.replicas[i], source.newest
        if replica.held.number < newest.number:
            base = source.find(replica.held.number, replica.held.hash)
            if base == newest.number:
                replica.confirm(newest)
            else:
                replica.apply(states.over_the_wire(source.patch(base)))
        assert replica.held.number == newest.number or relayed

    @rule(patch=patches)
    def hand_on(self, patch):
        newest = self.relay.newest
        base = self.versions.get(patch.base, (0, {}))[0]
        if patch.version > newest.number and (not patch.base or base == newest.hash):
            assert self.relay.adopt(states.over_the_wire(patch)).hash == patch.hash
        else:
            with pytest.raises(DesyncError):
                self.relay.adopt(patch)
            assert self.relay.newest is newest

    @rule()
    def hand_on_the_newest(self):
        held, newest = self.relay.newest, self.history.newest
        if held.number < newest.number:
            states.piecemeal(self.history.patch(held.number), self.relay, newest.number)

    @rule(
        i=which,
        patch=patches,
        at=st.floats(0, 1, exclude_max=True),
        by=st.integers(1, 255),
        seal=st.booleans(),
    )
    def damaged(self, i, patch, at, by, seal):
        packed = bytearray(patch.pack())
        packed[HEAD.size + int(at * (len(packed) - HEAD.size)) if seal else int(at * len(packed))] ^= by
        with contextlib.suppress(PayloadError, DesyncError):
            read = Patch.unpack(resealed(packed) if seal else packed)
            if read.hash in [h for h, _ in self.versions.values()] and read.version == patch.version:
                self.replicas[i].apply(read)

    @rule(i=which, patch=patches, share=st.floats(0, 1, exclude_max=True))
    def cut_short(self, i, patch, share):
        packed = patch.pack()
        with pytest.raises(PayloadError):
            self.replicas[i].apply(Patch.unpack(packed[: int(share * len(packed))]))
        with pytest.raises((PayloadError, DesyncError)):
            self.replicas[i].apply(changed(patch, body=patch.body[: int(share * patch.nbytes)]))

    @rule(i=which)
    def swap(self, i):
        ahead = self.replicas[i].held.number > self.replicas[i].version
        assert self.replicas[i].swap() or not ahead

    @rule(i=which)
    def prepare(self, i):
        self.replicas[i].prepare()

    @rule(i=which)
    def forget_all(self, i):
        self.replicas[i], self.last[i] = Replica(self.history.layout), 0

    @rule(i=which)
    def save_and_load(self, i):
        replica = self.replicas[i]
        if replica.held.number:
            newest = replica._back if replica._ready else replica._front
            words, version = newest.words.copy(), replica.held
            self.replicas[i] = Replica(self.history.layout)
            self.replicas[i]._install(words, version)
            self.replicas[i].swap()

    @invariant()
    def every_replica_is_a_published_version(self):
        relayed = self.relay.newest
        assert not relayed.number or self.versions[relayed.number][0] == relayed.hash
        for i, replica in enumerate(self.replicas):
            assert replica.held.number >= self.last[i] and replica.version <= replica.held.number
            self.last[i] = replica.held.number
            if replica.held.number:
                assert replica.held.hash == self.versions[replica.held.number][0]
            if replica.version:
                digest, tensors = self.versions[replica.version]
                assert replica.hash == digest and states.same(replica.tensors(), tensors)
                replica.check()


TestFollowers = Followers.TestCase
TestFollowers.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


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


def cut(monkeypatch, n=3):
    """Return a history, a replica of it and the patch that leads on, of several sections."""
    states.in_sections(monkeypatch)
    history, state, replica = pair()
    patch = advance(history, state, n, 0.5)
    assert len(list(bodies.Sections(history.layout, bodies.CHANGES).through(patch.body))) > 4
    return history, state, replica, patch


def test_a_patch_is_read_section_by_section_as_it_comes(monkeypatch):
    history, _, replica, patch = cut(monkeypatch)
    read, unpack = [], bodies.unpack_section
    monkeypatch.setattr(bodies, "unpack_section", lambda *args: read.append(1) or unpack(*args))
    packed, reading = bytearray(patch.body), replica.reading(patch.base_hash)
    reading.feed(packed[:10])
    assert not read
    reading.feed(packed[: len(packed) // 2])
    half = len(read)
    reading.feed(packed[:-1])
    assert 0 < half < len(read)
    before, held = len(read), replica.held
    reading.feed(packed)
    assert len(read) == before + 1 and replica.held is held and not replica.swap()
    replica.apply(Patch.join(patch.head(), packed), reading)
    assert len(read) == before + 1  # nothing twice
    assert replica.swap() and states.same(replica.tensors(), states.whole(history))


def test_what_was_read_for_another_version_does_not_count(monkeypatch):
    history, state, replica, second = cut(monkeypatch)
    assert replica.reading(second.hash) is None and Replica(history.layout).reading(0) is None
    stale = replica.reading(second.base_hash)
    stale.feed(bytearray(second.body))
    replica.apply(second)
    third = advance(history, state, 4, 0.5)
    replica.apply(third, stale)
    with pytest.raises(DesyncError, match="came out different"):
        replica.apply(changed(advance(history, state, 5, 0.5), hash=1), replica.reading(third.hash))
    assert replica.held.number == third.version
    assert replica.swap() and replica.hash == third.hash
    replica.check()


def test_what_was_read_for_older_contents_of_the_same_buffer_does_not_count(monkeypatch):
    """Versions that nobody swaps in are written over each other: only the hash tells them apart."""
    history, state, replica, second = cut(monkeypatch)
    replica.apply(second)
    third = advance(history, state, 4, 0.5)
    stale = replica.reading(third.base_hash)
    stale.feed(bytearray(third.body))
    words = replica._newest().words
    replica.apply(third)
    assert replica._newest().words is words and not stale.of(words, replica.held)
    relay = History(history.layout)
    relay.adopt(history.patch())
    fourth = advance(history, state, 5, 0.5)
    of_relay = relay.reading(fourth.base_hash)
    of_relay.feed(bytearray(fourth.body))
    replica.apply(fourth, stale)
    relay.adopt(history.patch(), of_relay)  # all words come anew
    fifth = advance(history, state, 6, 0.5)
    assert relay.reading(fourth.base_hash) is None
    assert relay.adopt(fifth, of_relay).hash == replica.apply(fifth, of_relay).hash == fifth.hash
    assert replica.swap() and states.same(replica.tensors(), states.whole(relay))


def test_damage_in_a_section_shows_as_it_is_read_and_changes_nothing(monkeypatch):
    history, _, replica, patch = cut(monkeypatch)
    start, wrong, harmless = len(patch.pack()) - patch.nbytes, 0, 0
    for at in range(start, start + patch.nbytes, 7):
        packed, other = bytearray(patch.pack()), states.copy_of(replica)
        packed[at] ^= 255
        reading = other.reading(patch.base_hash)
        try:
            reading.feed(packed[start:])
        except PayloadError:
            wrong += 1
            assert not reading.of(other._newest().words, other.held)
        try:
            other.apply(Patch.unpack(resealed(packed)), reading)
            harmless += other.held.hash == patch.hash
        except (PayloadError, DesyncError):
            assert other.held.number == 1 and not other.swap()
            other.check()
            other.apply(patch, reading)  # which went wrong, and does not count
        assert other.swap() and states.same(other.tensors(), states.whole(history))
    assert wrong > 10 and harmless < 10


@pytest.mark.parametrize(
    ("sections", "match"),
    [
        ([], "without 2 pieces"),
        ([(2, 1, b"x")], "without 1 pieces"),
        ([(2, 0, b"x")], "0 pieces"),
        ([(2, 3, b"x")], "3 pieces"),
        ([(4, 1, b"x")], "4-byte words"),
        ([(2, 1, b"")], "0 bytes for 1 pieces"),
        ([(2, 1, b"x"), (2, 1, b"x"), (2, 1, b"x")], "1 sections too many"),
    ],
)
def test_sections_that_do_not_fit_the_state(sections, match):
    layout = Layout.of({"a": torch.zeros(3, dtype=torch.bfloat16), "b": torch.zeros(4, dtype=torch.bfloat16)})
    packed = bodies.HEAD.pack(bodies.CHANGES, len(sections))
    for itemsize, pieces, data in sections:
        packed += bodies.SECTION.pack(itemsize, pieces, len(data)) + data
    with pytest.raises(PayloadError, match=match):
        list(bodies.Sections(layout, bodies.CHANGES).through(packed))


def test_a_body_has_a_section_for_so_many_changes_and_no_more_than_8(monkeypatch):
    state = {f"w{i}": torch.zeros(100) for i in range(40)}
    history = History(Layout.of(state))
    history.publish(state)
    for changes, expected in ((100_000, 1), (1600, 2), (500, 8), (1, 8)):
        states.in_sections(monkeypatch, changes)
        for x in state.values():
            x += 1
        patch = history.patch(history.publish(state).number - 1)
        found = [len(s.pieces) for s in bodies.Sections(history.layout, bodies.CHANGES).through(patch.body)]
        assert len(found) == expected and sum(found) == 40 and max(found) <= min(found) + 1
    for x in [*state.values()][:30]:  # the last ones stay as they are
        x += 1
    patch = history.patch(history.publish(state).number - 1)
    found = [len(s.pieces) for s in bodies.Sections(history.layout, bodies.CHANGES).through(patch.body)]
    assert len(found) == 8 and sum(found) == 40
