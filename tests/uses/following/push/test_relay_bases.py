"""What a relay begins with: a base or a model's weights; and what its followers get of that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import states
import torch
from following import ROWS, Model, few, publisher, same, step, used, weights
from torch import Tensor
from waiting import HOST, LONG, until

from thinwire.links.hub.hub import Hub
from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.state.patches.patch import Patch
from thinwire.state.replica import Replica
from thinwire.types import DesyncError, InputError, PayloadError
from thinwire.uses.following.mirror import Mirror
from thinwire.uses.following.push.follower import Follower, ask
from thinwire.uses.following.push.publisher import Publisher
from thinwire.uses.following.push.state_relay import StateRelay


def model_of(tensors: dict[str, Tensor]) -> Model:
    model = Model(ROWS)
    model.load_state_dict(tensors)
    return model


def bases(base: dict[str, Tensor]) -> list[dict[str, Any]]:
    return [{"base": base | {"another": torch.zeros(1)}}, {"into": model_of(base)}]


def based() -> tuple[History, History, dict[str, Tensor]]:
    """Return a history with version 7, that of a relay that holds the same as a base, and the state."""
    state = weights(rows=20)
    history = History(Layout.of(state), start=6)
    history.publish(state)
    relay = History(history.layout)
    assert relay.start(state).number == 0 and relay.newest.hash == history.newest.hash
    return history, relay, state


def test_a_base_is_nothing_that_anybody_can_get_before_it_has_a_number(tmp_path: Path) -> None:
    history, relay, state = based()
    assert relay.find(0, relay.newest.hash) == 0 and relay.log_nbytes == 0
    for refused in (relay.patch, lambda: relay.save(tmp_path / "s"), lambda: relay.start(state)):
        with pytest.raises(InputError, match=r"nothing has been published|is held already"):
            refused()
    assert relay.confirm(history.newest) == history.newest == relay.newest
    assert relay.find(0, relay.newest.hash) == 7 and relay.patch().version == 7
    with pytest.raises(DesyncError):  # what holds nothing is no version, whatever a publisher says
        History(history.layout).confirm(Patch(0, 3, 0, 0, 0.0, {}, "", b"").target)


@pytest.mark.parametrize("read", [False, True])
def test_a_base_is_called_what_the_first_patch_from_it_calls_it(read: bool) -> None:
    history, relay, state = based()
    replica = Replica(history.layout)
    replica.start(state)
    replica.swap()
    for row in (0, 1):
        step(state, row)
        history.publish(state)
    patch = history.patch(7)
    with pytest.raises(PayloadError):
        relay.adopt(Patch(**(patch.__dict__ | {"body": patch.body[:-1]})))
    assert relay.newest.number == 0 and relay.find(0, replica.held.hash) == 0
    version = states.piecemeal(patch, relay) if read else relay.adopt(states.over_the_wire(patch))
    assert version.number == 9 and version.changed == 403
    known = relay.find(0, replica.held.hash)
    assert known == 7
    onward = relay.patch(known)
    assert onward.base == 7 and onward.nbytes == patch.nbytes
    replica.apply(states.over_the_wire(onward))
    replica.swap()
    assert states.same(replica.tensors(), states.whole(history))


def test_a_base_that_nobody_knows_gives_way_to_what_comes_whole() -> None:
    history, _, state = based()
    other = History(history.layout)
    other.start({n: x + 1 for n, x in state.items()})
    unknown = other.newest.hash
    version = other.adopt(states.over_the_wire(history.patch()))
    assert (version.number, version.changed) == (7, history.layout.numel)
    assert other.find(0, unknown) == 0 and other.log_nbytes == 0
    assert states.same(states.whole(other), states.whole(history))


def test_a_history_goes_on_from_a_base_that_a_follower_saved(tmp_path: Path) -> None:
    history, _, state = based()
    replica = Replica(history.layout)
    replica.start(state)
    replica.save(tmp_path / "s")
    relay = History.load(tmp_path / "s")
    step(state)
    history.publish(state)
    assert relay.adopt(history.patch(7)).number == 8 and relay.find(0, replica.held.hash) == 7


@contextmanager
def two_versions() -> Iterator[tuple[Publisher, dict[str, Tensor], dict[str, Tensor]]]:
    """A publisher, what it publishes, and the first of its two versions."""
    w = weights(rows=ROWS)
    base = used(w)
    with publisher(w) as p:
        p.publish()
        step(w)
        p.publish()
        yield p, w, base


@pytest.mark.parametrize("kind", [0, 1], ids=["tensors", "model"])
def test_a_relay_with_the_base_takes_a_patch_and_gives_one(kind: int) -> None:
    with (
        two_versions() as (p, w, base),
        StateRelay(HOST, p.port, **bases(base)[kind]) as relay,
        Follower(HOST, relay.port, base=base) as f,
        Follower(HOST, relay.port) as whole,
    ):
        assert relay.wait(2, LONG).number == 2 == f.wait(2).number == whole.wait(2).number
        step(w, 1)
        p.publish()
        for follower in (f, whole):
            assert follower.wait(3).number == 3 and same(follower.tensors(), used(w))
        assert few(relay.received, p) and few(f.status.nbytes, p) and not few(whole.status.nbytes, p)


@pytest.mark.parametrize("kind", [0, 1], ids=["tensors", "model"])
def test_a_follower_that_is_a_relay_begins_with_its_base_both_ways(kind: int) -> None:
    with (
        two_versions() as (p, w, base),
        Follower(HOST, p.port, relay=(HOST, 0), **bases(base)[kind]) as near,
    ):
        assert near.relay is not None
        near.wait(2)
        with StateRelay(HOST, near.relay.port, base=base) as relay, Follower(HOST, relay.port) as far:
            far.wait(2)
            assert same(near.tensors(), used(w)) and same(far.tensors(), used(w))
            assert few(relay.received, p)
        assert few(near.relay.received, p) and few(near.status.nbytes, p)


@pytest.mark.parametrize("there", ["later", "idle", "gone"])
def test_a_base_is_no_version_before_the_publisher_says_so(there: str) -> None:
    """The publisher comes later, or is there and has not published, or left before it did."""
    w, hub = weights(rows=ROWS), Hub.bind()
    base, port = used(w), hub.port
    hub.close(0.0)
    p = None if there == "later" else publisher(w, port=port)
    with (
        StateRelay(HOST, port, base=base) as relay,
        Follower(HOST, relay.port, base=base) as f,
        Follower(HOST, relay.port) as newcomer,
    ):
        if p is not None:
            until(lambda: sum(s.greeted for s in relay.followers) == 2)
            assert ask(HOST, relay.port).newest == 0
        if p is not None and there == "gone":
            p.close()
        sleep(0.5)
        assert f.held.number == newcomer.held.number == relay.held.number == 0
        assert not (f.confirmed or newcomer.confirmed or newcomer.arrivals)
        if p is None or there == "gone":
            p = publisher(w, port=port)
        with p:
            p.publish()
            until(lambda: f.confirmed)
            assert f.wait(1).number == 1 == newcomer.wait(1).number and not f.arrivals
            step(w)
            p.publish()
            for follower in (f, newcomer):
                assert follower.wait(2).number == 2 and same(follower.tensors(), used(w))
            assert few(relay.received, p) and few(f.status.nbytes, p)


def test_with_a_base_that_the_publisher_does_not_know_all_comes_whole() -> None:
    w, base = weights(rows=ROWS), used(weights(1, rows=ROWS))
    with publisher(w) as p:
        p.publish()
        with StateRelay(HOST, p.port, base=base) as relay, Follower(HOST, relay.port, base=base) as f:
            assert f.wait(1).number == 1 and same(f.tensors(), used(w))
            assert relay.received > p.history.layout.nbytes / 2
            step(w)
            p.publish()
            assert f.wait(2).number == 2 and same(f.tensors(), used(w)) and few(f.arrivals[1].nbytes, p)


def test_a_base_of_which_a_version_is_published_just_now_needs_no_keyframe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w = weights(rows=ROWS)
    with publisher(w) as p, Follower(HOST, p.port, base=used(w)) as f:
        until(lambda: any(s.greeted for s in p.followers))
        find = p.history.find

        def late(version: int, content: int) -> int:
            known = find(version, content)
            if not p.newest.number:  # what was found is old by the time that anybody looks at it
                p.publish()
                step(w)
                p.publish()
            return known

        monkeypatch.setattr(p.history, "find", late)
        p._feed._stir()
        assert f.wait(2).number == 2 and same(f.tensors(), used(w)) and few(f.status.nbytes, p)


OTHER = used(weights(rows=3))


@pytest.mark.parametrize(
    ("own", "text"),
    [
        ({"base": OTHER}, r"^the base does not fit what is published: embed: shape \(3, 200\), .*; leave "),
        ({"base": {}}, "^the base does not fit what is published: embed is .*not given; leave the base out"),
        ({"into": Model(rows=3)}, r"embed is bfloat16 \[3, 200\] in the model and bfloat16 \[300, 200\]"),
    ],
    ids=["shape", "names", "model"],
)
@pytest.mark.parametrize("alone", [False, True])
def test_a_base_that_does_not_fit_ends_a_relay(own: dict[str, Any], text: str, alone: bool) -> None:
    with publisher(weights()) as p:
        p.publish()
        end = StateRelay(HOST, p.port, **own) if alone else Follower(HOST, p.port, relay=(HOST, 0), **own)
        with end, pytest.raises(InputError, match=text) as e:
            end.wait(1, LONG)
        assert "\n" not in str(e.value)


def test_a_base_that_does_not_fit_is_told_to_be_the_base() -> None:
    layout = Layout.of({"w": torch.zeros(3), "b": torch.zeros(2)})
    for base, why in (
        ({"w": torch.zeros(3)}, "b is in the layout of this state, but was not given"),
        ({"w": torch.zeros(4), "b": torch.zeros(2)}, r"w: shape \(4,\), expected \(3,\)"),
    ):
        with pytest.raises(InputError, match=f"^the base does not fit what is published: {why}; leave"):
            Mirror(base=base).agree(layout, "state")
