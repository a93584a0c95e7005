"""History and log: patches from any known version, merged, cached, bounded; relays; the trainer's faults."""

import itertools
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import states
from thinwire.state import body, changes, classes, lane
from thinwire.state import log as logs
from thinwire.state.history import History
from thinwire.state.lane import Ends, Lane, in_use
from thinwire.state.layout import Layout, Piece
from thinwire.state.log import IN_USE, KEPT, Change, Entry, Log, merge
from thinwire.state.past import Past
from thinwire.state.patch import Patch
from thinwire.state.replica import Replica
from thinwire.types import DesyncError, InputError, PayloadError


@pytest.fixture
def arrays_only(monkeypatch):
    """Let a log count the bytes of its arrays, which tests know to the byte, and not what is around them."""
    monkeypatch.setattr(logs, "OVERHEAD", 0)


def published(n=1, share=0.1, **kwargs):
    """Return a history of ``n`` versions and what it last published."""
    state = states.tensors()
    history = History(states.layout(state), **kwargs)
    for i in range(n):
        if i:
            states.train(state, share, i)
        history.publish(state, {"step": i})
    return history, state


def forget(history):
    """Let nothing be left to patch from."""
    history._log._entries.clear()
    history._log.nbytes = 0


def follower(history):
    replica = Replica(history.layout)
    replica.apply(states.over_the_wire(history.patch()))
    replica.swap()
    return replica


def test_versions_count_from_one_and_say_what_changed():
    history, state = published()
    assert history.newest.number == 1 and history.newest.changed == history.layout.numel
    state["one"] += 1
    version = history.publish(state, {"step": 7}, published=12.5)
    assert (version.number, version.changed, version.meta, version.published) == (2, 1, {"step": 7}, 12.5)
    assert history.newest is version and history.publish(state).changed == 0


@pytest.mark.parametrize("share", [0.001, 0.05, 0.5, 1.0])
def test_a_patch_from_every_version_leads_to_the_newest(share):
    history, state = published(budget=1 << 20)
    followers = []
    for i in range(6):
        followers.append(follower(history))
        states.train(state, share, i)
        history.publish(state)
    for base, replica in enumerate(followers, 1):
        patch = states.over_the_wire(history.patch(base))
        assert patch.base == base
        replica.apply(patch)
        replica.swap()
        replica.check()
        assert states.same(replica.tensors(), states.whole(history))


def test_what_followers_get_is_what_was_published():
    history, state = published(3)
    got = states.whole(history)
    for name, x in state.items():
        if name == "lossy":
            assert (got[name].double() - x).abs().max() <= states.BOUND + 2**-8 * x.abs().max()
        else:
            want = x.bfloat16() if x.is_floating_point() else x
            assert torch.equal(got[name], want)


def test_merged_versions_cost_what_one_would():
    """A value that moves on and on travels once, and one that is back where it was not at all."""
    state = {"x": torch.zeros(4096)}
    history = History(Layout.of(state))
    history.publish(state)
    for i in range(8):
        state["x"][:512] += 1
        state["x"][1024:2048] = i % 2
        history.publish(state)
    state["x"][1024:2048] = 0
    history.publish(state)
    direct = History(Layout.of(state))
    direct.publish({"x": torch.zeros(4096)})
    direct.publish(state)
    assert history.patch(1).body == direct.patch(1).body


def test_a_patch_is_made_once():
    history, state = published(3, budget=1 << 20)
    patch = history.patch(1)
    assert history.patch(1) is patch and history.patch() is history.patch(None)
    for base in (2, None):
        assert history.patch(base).version == patch.version
    assert history.patch(1) is patch
    states.train(state)
    history.publish(state)
    assert history.patch(1).version == 4 and history.patch(1).base == 1


def test_an_unknown_base_gets_a_keyframe():
    history, _ = published(3)
    for base in (None, 0, 99, -1):
        assert history.patch(base).base == 0
    with pytest.raises(InputError, match="version 3 is the newest"):
        history.patch(3)
    with pytest.raises(InputError, match="nothing has been published"):
        History(states.layout()).patch()


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
    log = Log(states.layout(), 200)
    for base in range(1, 40):
        at = np.array([base % 7], np.int32)
        log.append(Entry(base, base, {0: Change(at, np.zeros(1, np.int16))}))
        if base in (3, 5):
            log.mark(base)
    assert {1, 3, 5, 39} <= set(log.bases()) and log.nbytes <= 200
    log.budget = 50
    log.append(Entry(40, 40, {}))
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
    monkeypatch.setattr(lane, "LATELY", 0.0)
    patches.hand_over(1, 8)
    assert in_use(lanes, [3]) == [9, 3, 1, 7]


def test_versions_in_use_are_bounded_and_the_least_important_goes_first(arrays_only):
    used = [5, 30, 1, 3]
    log = Log(states.layout(), 100, lambda: used)
    for base in range(1, 40):
        log.append(Entry(base, base, {0: Change(None, np.zeros(100, np.int16))}))
    assert set(log.bases()) == {*used} and log.nbytes <= 100 * IN_USE
    log.budget = 60
    log.append(Entry(40, 40, {0: Change(None, np.zeros(100, np.int16))}))
    assert list(log.bases()) == [5, 30] and log.nbytes == 400
    used = []
    log.append(Entry(41, 41, {}))
    assert list(log.bases()) == [5, 41]  # nobody uses them: the budget holds, but for the last two


def test_small_entries_are_not_merged_into_a_large_one_in_use_as_they_come(monkeypatch, arrays_only):
    sizes = []
    monkeypatch.setattr(
        logs, "merge", lambda entries, pieces: sizes.append(len(entries)) or merge(entries, pieces)
    )
    log = Log(states.layout(), 300, lambda: [1])
    log.append(Entry(1, 1, {0: Change(None, np.zeros(500, np.int16))}))
    for base in range(2, 52):
        at = np.array([base % 7], np.int32)
        log.append(Entry(base, base, {0: Change(at, np.zeros(1, np.int16))}))
    assert not sizes and log.nbytes == 1000 + 50 * 6
    log.append(Entry(52, 52, {0: Change(np.array([3], np.int32), np.zeros(1, np.int16))}))
    assert sizes and 1 in log.bases() and log.nbytes <= 1000 + 50 * 6


def test_whoever_is_released_is_asked_no_more():
    history, state = published(budget=0)
    asked = []
    history.keep(asked_for := (lambda: asked.append(1) or ()))
    for i in range(4):
        states.train(state, 1.0, i)
        history.publish(state)
    assert asked
    history.release(asked_for)
    history.release(asked_for)
    asked.clear()
    states.train(state, 1.0, 9)
    history.publish(state)
    assert not asked


positions = st.lists(st.integers(0, 199), unique=True, max_size=60).map(
    lambda p: np.array(sorted(p), np.int32)
)


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
        entries.append(Entry(base, 0, {0: change}))
    merged = merge(entries, [Piece(0, 0, numel, np.dtype(np.int16), 0)])
    change = merged.changes[0]
    back = words.copy()
    back[slice(None) if change.positions is None else change.positions] = change.old
    assert merged.base == 1 and np.array_equal(back, first)
    assert change.positions is None or (np.diff(change.positions) > 0).all()


def test_find_goes_by_contents():
    history, state = published(3)
    hashes = {v: history.patch(v).base_hash for v in (1, 2)}
    assert history.find(1, hashes[1]) == 1 and history.find(2, hashes[2]) == 2
    assert history.find(3, history.newest.hash) == 3
    assert history.find(0, hashes[1]) == 1  # a base from elsewhere, published as version 1
    assert history.find(77, hashes[2]) == 2  # of a publisher that counted otherwise
    assert not history.find(1, hashes[2] + 1) and not history.find(0, 0)
    history.publish(state)
    assert history.find(0, history.newest.hash) == 4 and history.find(3, history.newest.hash) == 3


def test_a_follower_with_the_base_gets_one_patch():
    history, state = published()
    replica = Replica(history.layout)
    held = replica.start(state)
    assert held.number == 0 and history.find(0, held.hash) == 1
    assert replica.confirm(history.newest).number == 1
    states.train(state)
    history.publish(state)
    other = Replica(history.layout)
    other.start(states.tensors())
    for r in (replica, other):
        r.apply(history.patch(history.find(r.held.number, r.held.hash)))
        r.swap()
        assert r.version == 2 and states.same(r.tensors(), states.whole(history))


def test_a_publisher_that_starts_again_outnumbers_its_followers():
    history, state = published(5)
    replica = follower(history)
    again = History(history.layout)
    again.publish(state)
    with pytest.raises(DesyncError, match="version 1 is not newer than 5"):
        replica.apply(again.patch())
    assert again.outnumber(5).number == 6 and again.outnumber(3).number == 6
    assert again.find(replica.held.number, replica.held.hash) == 6  # the same contents, so nothing to send
    assert replica.confirm(again.newest).number == 6
    states.train(state)
    again.publish(state)
    replica.apply(again.patch(6))
    assert replica.held.number == 7 and again.patch(1).base == 1
    assert History(history.layout, start=7).publish(state).number == 8
    with pytest.raises(InputError, match="no version number"):
        again.outnumber(1 << 52)
    early = History(history.layout)
    assert early.outnumber(9).number == 0 and early.publish(state).number == 10


def test_a_saved_history_knows_what_followers_hold(tmp_path):
    history, state = published(3)
    replica = follower(history)
    history.save(tmp_path / "state")
    again = History.load(tmp_path / "state", budget=1 << 20)
    assert again.newest.number == 3 and again.layout == history.layout
    states.train(state)
    assert again.publish(state).number == 4
    patch = again.patch(again.find(3, replica.held.hash))
    assert patch.base == 3
    replica.apply(patch)
    assert replica.swap() and states.same(replica.tensors(), states.whole(again))
    with pytest.raises(InputError, match="nothing to save"):
        History(history.layout).save(tmp_path / "state")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"lossy": torch.full((97,), float("nan"))}, "lossy"),
        ({"lossy": torch.full((97,), 1e30)}, "lossy"),
        ({"one": torch.zeros(3)}, "one: shape"),
        ({"mask": torch.zeros(9)}, "mask: torch.float32 cannot stand for torch.bool"),
    ],
)
def test_a_version_that_fails_leaves_nothing_behind(change, match):
    history, state = published(2)
    before, newest, log = states.whole(history), history.newest, history.log_nbytes
    moved = {n: x.clone() for n, x in state.items()}
    moved["head"] = moved["embed"]
    states.train(moved, 0.9, 5)
    with pytest.raises(InputError, match=match):
        history.publish(moved | change)
    assert history.newest is newest and history.log_nbytes == log
    assert states.same(states.whole(history), before) and history._words.hash() == newest.hash
    assert history.publish(state).changed == 0


def test_wrong_meta_data_and_times_publish_nothing():
    history, state = published()
    for kwargs in ({"meta": {"a": None}}, {"published": float("nan")}):
        with pytest.raises(InputError):
            history.publish(state, **kwargs)
    assert history.newest.number == 1


def test_a_nan_in_a_lossless_tensor_is_only_bits():
    history, state = published()
    state["embed"][3] = float("nan")
    state["exact"][0] = -0.0
    history.publish(state)
    got = states.whole(history)
    assert got["embed"][3].isnan().all() and torch.signbit(got["exact"][0]).all()


@pytest.mark.parametrize("at", [0, 1])
def test_truths_of_any_byte_are_published_as_zero_and_one(at):
    """A follower would refuse another byte; torch takes each for true, or for false, as it happens."""
    odd, plain = torch.tensor([2, 0, 255], dtype=torch.uint8), torch.tensor([1, 0, 1], dtype=torch.uint8)
    states_of = [{"mask": x.view(torch.bool)} for x in (odd, torch.zeros_like(odd))]
    history = History(Layout.of(states_of[0]))
    history.publish(states_of[at])
    assert history.publish(states_of[0]).changed == 2 * at  # whole, or what changed
    assert states.whole(history)["mask"].view(torch.uint8).equal(plain)


def test_tensors_in_any_order_of_memory_are_published():
    state = {"x": torch.randn(30, 20), "y": torch.randn(6, 4)[::2]}
    history = History(Layout.of(state))
    history.publish(state)
    assert torch.equal(states.whole(history)["y"], state["y"])
    turned = {"x": state["x"].T.contiguous().T, "y": state["y"].clone()}
    assert history.publish(turned).changed == 0
    turned["x"][3, 4] = 7
    assert history.publish(turned).changed == 1 and states.whole(history)["x"][3, 4] == 7


def test_a_relay_hands_on_what_it_gets():
    history, state = published(2, budget=1 << 20)
    relay = History(history.layout, budget=1 << 20)
    relay.adopt(states.over_the_wire(history.patch()))
    replicas = [follower(relay)]
    for i in range(4):
        held = relay.newest.number
        for j in range(3):
            states.train(state, 0.1, 10 * i + j)
            history.publish(state)
        patch = history.patch(held) if i != 2 else history.patch()  # one of them as a keyframe
        version = relay.adopt(states.over_the_wire(patch))
        assert version.number == history.newest.number and version.hash == history.newest.hash
        replicas.append(follower(relay))
    for replica in replicas[:-1]:
        patch = relay.patch(relay.find(replica.held.number, replica.held.hash))
        assert patch.base
        replica.apply(patch)
        replica.swap()
        assert states.same(replica.tensors(), states.whole(history))


def test_a_relay_takes_nothing_wrong():
    history, state = published(2)
    relay = History(history.layout)
    for base_hash in (history.patch(1).base_hash, 0):
        with pytest.raises(DesyncError, match="held is 0"):
            relay.adopt(Patch(**(history.patch(1).__dict__ | {"base_hash": base_hash})))
    relay.adopt(history.patch())
    with pytest.raises(DesyncError, match="not newer"):
        relay.adopt(history.patch())
    states.train(state)
    history.publish(state)
    patch, before = history.patch(2), relay._words.hash()
    for wrong, error in [
        ({"hash": patch.hash ^ 1}, DesyncError),
        ({"base_hash": 3}, DesyncError),
        ({"layout": "ab" * 16}, PayloadError),
        ({"body": patch.body[:-1]}, PayloadError),
    ]:
        with pytest.raises(error):
            relay.adopt(Patch(**(patch.__dict__ | wrong)))
        assert relay.newest.number == 2 and relay._words.hash() == before
    assert relay.adopt(patch).number == 3


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


def test_the_default_device_changes_nothing():
    expected, other = published()
    history, state = published()
    states.train(other)
    states.train(state)
    expected.publish(other, published=1.0)
    with torch.device("meta"):
        history.publish(state, published=1.0)
        assert history.patch(1).pack() == expected.patch(1).pack()
        assert states.same(states.whole(history), states.whole(expected))
