"""What a history publishes: patches between any versions, keyframes, bases, failures that leave nothing."""

from dataclasses import replace

import pytest
import states
import torch
from histories import follower, forget, published

from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.state.patches.patch import Patch
from thinwire.state.replica import Replica
from thinwire.types import DesyncError, InputError, PayloadError


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


@pytest.mark.parametrize("share", [0.001, 0.1, 1.0])
def test_a_version_is_recalled_whatever_came_after_it(share):
    history, state = published(budget=1 << 20)
    seen = [(history.newest, states.whole(history))]
    for i in range(5):
        states.train(state, share, i)
        seen.append((history.publish(state, {"step": i}), states.whole(history)))
    for version, held in seen:
        patch = states.over_the_wire(history.recall(version))
        assert (patch.base, patch.target.number, patch.meta) == (0, version.number, version.meta)
        replica = Replica(history.layout)
        replica.apply(patch)  # which checks the hash
        replica.swap()
        assert states.same(replica.tensors(), held)
    assert not history._pasts
    again = replace(version, number=99, meta={"called": "otherwise"})
    assert history.recall(again).meta == again.meta and history.recall(again).version == 99
    assert history.recall(replace(version, hash=version.hash ^ 1)) is None
    forget(history)
    history._settle(history.newest)
    assert history.recall(seen[0][0]) is None


def test_an_unknown_base_gets_a_keyframe():
    history, _ = published(3)
    for base in (None, 0, 99, -1):
        assert history.patch(base).base == 0
    with pytest.raises(InputError, match="version 3 is the newest"):
        history.patch(3)
    with pytest.raises(InputError, match="nothing has been published"):
        History(states.layout()).patch()


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
