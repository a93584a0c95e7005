"""Faults that a review of the state package found, each with the test that shows it."""

import contextlib
import gc
import json
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bench import state_links, state_worker

import states
from thinwire.engines.sync.follower import Follower
from thinwire.engines.sync.publisher import Publisher
from thinwire.engines.sync.relay import Relay
from thinwire.engines.sync.shelf_reader import ShelfReader
from thinwire.engines.sync.shelf_writer import ShelfWriter
from thinwire.state import binding, blocks, changes, log
from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.state.patch import MAX_TIME, Patch, check_meta, load_meta
from thinwire.state.replica import Replica
from thinwire.types import DesyncError, InputError, MeasurementError, PayloadError

LONG = 10.0  # seconds that nothing here takes


def published(share=0.1, n=1, **kwargs):
    """Return a history of ``n`` versions and what it last published."""
    state = states.tensors()
    history = History(states.layout(state), **kwargs)
    for i in range(n):
        if i:
            states.train(state, share, i)
        history.publish(state)
    return history, state


def advance(history, state, seed, share=0.1):
    before = history.newest.number
    states.train(state, share, seed)
    history.publish(state)
    return history.patch(before)


def follower(history, kind=Replica):
    replica = kind(history.layout)
    replica.apply(history.patch())
    assert replica.swap()
    return replica


class SwappedMeanwhile(Replica):
    """Somebody swaps just as the other thread has seen that the back buffer is ready."""

    armed = False

    @property
    def _back(self):
        if self.armed:
            self.armed = False
            user = threading.Thread(target=self.swap)
            user.start()
            user.join(LONG)
        return self._behind_the_front

    @_back.setter
    def _back(self, view):
        self._behind_the_front = view


def test_a_swap_while_a_buffer_is_chosen_does_not_show_the_older_one(tmp_path):
    history, state = published()
    replica = follower(history, SwappedMeanwhile)
    replica.apply(advance(history, state, 2, 1.0))
    patch = advance(history, state, 3, 1.0)
    replica.armed = True
    replica.apply(patch)
    replica.swap()
    replica.check()
    assert states.same(replica.tensors(), states.whole(history))
    replica.apply(advance(history, state, 4, 1.0))
    replica.armed = True
    replica.save(tmp_path / "held")
    assert states.same(Replica.load(tmp_path / "held").tensors(), states.whole(history))


def two_models():
    """Return a model, another of its kind, their state and a history of that."""
    torch.manual_seed(0)
    models = [torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)]
    state = {name: x.detach().clone() for name, x in models[0].state_dict().items()}
    history = History(Layout.of(state))
    history.publish(state)
    return models, state, history


def test_every_model_that_was_bound_follows():
    models, state, history = two_models()
    replica = follower(history)
    for i in range(2, 8):
        for model in models:
            replica.bind(model)  # as often as one likes
        for x in state.values():
            x += i
        history.publish(state)
        replica.apply(history.patch(i - 1))
        assert replica.swap()
        for model in models:
            assert states.same(dict(model.state_dict()), state)


def test_models_that_nobody_has_any_more_are_let_go():
    _, state, history = two_models()
    replica = follower(history)
    for _ in range(50):
        replica.bind(torch.nn.Linear(4, 3))
    gc.collect()
    model = torch.nn.Linear(4, 3)
    part = model.weight  # somebody has but this
    replica.bind(model)
    assert len(replica._bound._found) == 2
    del model
    gc.collect()
    state["weight"] += 1
    history.publish(state)
    replica.apply(history.patch(1))
    assert replica.swap() and torch.equal(part, state["weight"])


def test_what_a_model_writes_to_its_own_buffers_is_not_written_to_the_state():
    """Batch norm does, in the mode that a model is made in."""
    trained, model = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)
    state = trained.state_dict()  # shares the memory of the trained one
    history = History(Layout.of(state))
    history.publish(state)
    replica = follower(history)
    replica.bind(model)
    for _ in range(3):
        model(torch.randn(8, 3) + 5)
        assert not torch.equal(model.running_mean, trained.running_mean)
        replica.check()
        with torch.no_grad():
            trained.weight += 1  # and no buffer
        history.publish(state)
        replica.apply(history.patch(replica.held.number))
        assert replica.swap() and states.same(dict(model.state_dict()), state)


@pytest.mark.parametrize("most", [1, 300, 1000, 5000])
def test_blocks_of_more_elements_than_a_stream_may_have_share_several(monkeypatch, most):
    numels, word = [100, 400, 5000, 250, 1, 3000], np.dtype(np.int16)
    rng, found = np.random.default_rng(0), []
    for i, n in enumerate(numels):
        at = np.flatnonzero(rng.random(n) < (0.9 if i == 2 else 0.2)).astype(np.int32)
        found.append(changes.Block(n, at, rng.choice(np.array([1, -1, 7], word), at.size)))
    as_one = changes.pack_blocks(found, word)
    monkeypatch.setattr(blocks, "MOST", most)
    body = changes.pack_blocks(found, word)
    assert (body == as_one) == (most == 5000)  # what fits is as it always was
    back = changes.unpack_blocks(body, numels, word)
    for a, b in zip(found, back, strict=True):
        assert np.array_equal(a.positions, b.positions) and np.array_equal(a.diffs, b.diffs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_after_a_jump_a_patch_is_no_larger_than_the_state(dtype):
    g = torch.Generator().manual_seed(0)
    history = History(Layout.of({"w": torch.zeros(1 << 18)}, dtype), budget=1 << 24)
    first = torch.randn(1 << 18, generator=g)
    for x in (first, first + 0.01 * first, torch.randn(1 << 18, generator=g), torch.zeros(1 << 18)):
        held = follower(history) if history.newest.number else None
        history.publish({"w": x})
        if held is not None:
            patch = history.patch(held.version)
            assert patch.base and patch.nbytes <= 1.001 * history.patch(None).nbytes + 64
            held.apply(patch)
            assert held.swap() and torch.equal(held.tensors()["w"], x.to(dtype))


def test_each_tensor_travels_as_what_is_smaller(monkeypatch):
    g = torch.Generator().manual_seed(0)
    n = 1 << 17
    x = {name: torch.randn(n, generator=g) for name in ("jumps", "moves", "steps", "stays")}
    history = History(Layout.of(x, torch.bfloat16))
    history.publish(x)
    held = follower(history)
    x["jumps"] = torch.randn(n, generator=g)  # new words
    x["moves"] *= 1 + 0.01 * torch.randn(n, generator=g)  # a difference for each
    x["steps"][::100] *= 1.5  # positions and differences
    history.publish(x)
    patch = history.patch(1)
    held.apply(patch)
    assert held.swap() and all(torch.equal(held.tensors()[k], v.bfloat16()) for k, v in x.items())
    monkeypatch.setattr(changes, "jumped", lambda blocks, look: [False] * len(blocks))
    history.publish(x)  # no cached patch
    without = history.patch(1)
    assert patch.nbytes < without.nbytes - 0.01 * n * 2  # the one tensor
    monkeypatch.setattr(changes, "jumped", lambda blocks, look: [b.positions is None for b in blocks])
    history.publish(x)
    assert patch.nbytes < history.patch(1).nbytes - 0.2 * n * 2  # the other one as differences


@pytest.mark.parametrize("way", ["link", "relay", "store"])
def test_followers_come_along_over_a_jump(tmp_path, way):
    weights = {"w": torch.randn(1 << 17, generator=torch.Generator().manual_seed(0)).bfloat16()}
    with contextlib.ExitStack() as open_:
        if way == "store":
            publisher = open_.enter_context(ShelfWriter.of(str(tmp_path), weights, name="jumps"))
            reader = open_.enter_context(ShelfReader(str(tmp_path), poll=0.05))
        else:
            publisher = open_.enter_context(Publisher(weights))
            port = publisher.port
            if way == "relay":
                port = open_.enter_context(Relay("127.0.0.1", port, ("127.0.0.1", 0))).port
            reader = open_.enter_context(Follower("127.0.0.1", port))
        for step, scale in enumerate((1.0, 0.0, 3.0, 1.001)):
            weights["w"] *= scale
            weights["w"] += (scale == 3.0) * torch.randn(1 << 17).bfloat16()
            version = publisher.publish(step=step)
            if way == "store":
                publisher.flush()
            assert reader.wait(version.number, timeout=LONG).number == version.number
            assert torch.equal(reader.tensors()["w"], weights["w"])


def test_a_patch_that_is_smaller_than_the_state_is_kept():
    x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    history = History(Layout.of({"w": x}), budget=1 << 24)
    history.publish({"w": x})
    x[: 1 << 17] = torch.randn(1 << 17, generator=torch.Generator().manual_seed(1))
    history.publish({"w": x})
    assert history.patch(1).base == 1


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


@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize("every", [1, 3, 8])
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


@pytest.mark.parametrize("text", ["\x1b[2J", "a\x07", "\r", "\u202e", "\x9b1m", "\ud800", "a\0"])
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


@pytest.mark.parametrize(("kind", "base"), [("one", False), ("relay", True), ("direct", False)])
def test_whoever_a_feed_s_publisher_talks_to_begins_with_a_keyframe(monkeypatch, tmp_path, kind, base):
    followers = [{"hash": "a", "arrivals": []}] * 8
    publish = {"hash": "a", "sent_first": 1, "sent": 2, "versions": [1]}
    orders = []

    class Cell:
        def __init__(self, link, place, order, control):
            orders.append(order)

        def run(self):
            network = {"uplink_bytes": 2}
            return {"network": network, "publish": publish, "follow": {"followers": followers}}

    monkeypatch.setattr(state_links, "Cell", Cell)
    assert state_links.feed(tmp_path, kind)["identical"]
    assert orders[0]["base"] is base
    publish["hash"] = "b"  # all alike, and none what was published
    assert not state_links.feed(tmp_path, kind)["identical"]


@pytest.mark.parametrize(("times", "arrived"), [([1.0, 2.0], 1), ([1.0, 2.0, 3.0], 0), ([1.0, 2.0, 2.0], 1)])
def test_a_measurement_too_short_to_say_anything_says_so(times, arrived):
    versions = [{"version": i, "published": t} for i, t in enumerate(times, 1)]
    with pytest.raises(MeasurementError, match="take longer"):
        state_links.summary({"publish": {"versions": versions}}, [{"age": 1.0}] * arrived, 0.5)


def test_the_bench_times_all_patches_that_are_made():
    history, _ = published(n=2)
    publishing = object.__new__(state_worker.Publishing)
    publishing._publisher, publishing._patches = SimpleNamespace(history=history), []
    publishing._watch_coding()
    assert history.patch(1, False).version == history.patch(None).version == 2
    assert [p["base"] for p in publishing._patches] == [1, 0]


class Elsewhere:
    """A device that is not there: what was copied to it, by slot."""

    def __init__(self, monkeypatch, model):
        self._names = {id(x): name for name, x in model.named_parameters()}
        self.holds, self.copied, self.broken = {}, [], False
        monkeypatch.setattr(binding, "_copy", self._copy)
        monkeypatch.setattr(binding, "_check_placed", lambda *_: None)  # meta stands for a device

    def _copy(self, x, values):
        if self.broken:
            raise RuntimeError("out of memory")
        self.copied.append(self._names[id(x)])
        self.holds[self.copied[-1]] = values.clone()


def layers(device):
    return torch.nn.Sequential(*(torch.nn.Linear(3, 2, device=device) for _ in range(4)))


@pytest.fixture
def elsewhere(monkeypatch):
    state = {name: x.detach().clone() for name, x in layers("cpu").state_dict().items()}
    history = History(Layout.of(state), budget=1 << 20)
    history.publish(state)
    replica, model = follower(history), layers("meta")
    there = Elsewhere(monkeypatch, model)
    replica.bind(model)
    assert states.same(there.holds, state)
    there.copied.clear()
    return history, state, replica, there, model


@pytest.mark.parametrize("every", [1, 2, 3])
def test_another_device_gets_what_changed_and_nothing_else(elsewhere, every):
    history, state, replica, there, _model = elsewhere
    touched = set()
    for i in range(2, 40):
        name = f"{i % 4}.weight"
        touched.add(name)
        state[name][0, i % 3] = float(i)
        history.publish(state)
        whole = i % 13 == 0  # a keyframe may change anything
        replica.apply(history.patch(None if whole else replica.held.number))
        touched |= set(state) if whole else set()
        if i % every == 0:
            assert replica.swap()
            assert sorted(there.copied) == sorted(touched) and states.same(there.holds, state)
            there.copied.clear()
            touched.clear()


def test_after_a_copy_that_failed_everything_is_copied(elsewhere):
    history, state, replica, there, _model = elsewhere
    for i, broken in enumerate((True, False)):
        state[f"{i}.weight"] += 1.0
        history.publish(state)
        replica.apply(history.patch(replica.held.number))
        there.broken = broken
        with pytest.raises(RuntimeError) if broken else contextlib.nullcontext():
            replica.swap()
    assert sorted(there.copied) == sorted(state) and states.same(there.holds, state)
