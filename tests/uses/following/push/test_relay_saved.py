"""Relays that start again from a saved state; and what their followers get of that."""

from __future__ import annotations

import threading
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from following import ROWS, few, publisher, same, step, used, weights
from tcp_proxy import TcpProxy
from waiting import HOST, LONG, until

from thinwire.links.hub.hub import Hub
from thinwire.state.disk import saved
from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.state.replica import Replica
from thinwire.types import InputError
from thinwire.uses.following.push.feed import Feed
from thinwire.uses.following.push.follower import Follower
from thinwire.uses.following.push.state_relay import StateRelay


def test_a_relay_that_starts_again_from_its_file_takes_a_patch(tmp_path: Path) -> None:
    w, path = weights(rows=ROWS), tmp_path / "held.safetensors"
    with publisher(w) as p, StateRelay(HOST, p.port) as other, Follower(HOST, other.port) as far:
        p.publish()
        with Follower(HOST, p.port, relay=(HOST, 0), state=path) as near:
            near.wait(1)
            assert near.relay is not None
            port = near.relay.port
            below = Follower(HOST, port)
            below.wait(1)
        step(w)
        p.publish()
        with (
            below,
            Follower(HOST, p.port, relay=(HOST, port), state=path, base={}) as near,  # which comes after it
            Follower(HOST, port) as newcomer,
        ):
            for follower in (near, below, newcomer, far):
                assert follower.wait(2).number == 2 and same(follower.tensors(), used(w))
            assert near.relay is not None and few(near.relay.received, p) and few(near.status.nbytes, p)
            assert few(below.arrivals[1].nbytes, p) and not few(newcomer.status.nbytes, p)


def test_what_a_relay_had_saved_is_offered_once_the_publisher_has_spoken(tmp_path: Path) -> None:
    w, path = weights(rows=ROWS), tmp_path / "held.safetensors"
    with publisher(w) as p, TcpProxy(p.port) as line:
        p.publish()
        with Follower(HOST, p.port, state=path) as f:
            f.wait(1)
        line.cut()
        with (
            Follower(HOST, line.port, relay=(HOST, 0), state=path) as near,
            Follower(HOST, near.relay.port if near.relay else 0) as newcomer,
        ):
            assert near.wait(1).number == 1  # here at once, and said to be old
            sleep(0.5)
            assert not (near.confirmed or newcomer.confirmed or newcomer.arrivals)
            line.restore()
            until(lambda: near.confirmed)
            assert newcomer.wait(1).number == 1 and same(newcomer.tensors(), used(w))
            assert not near.arrivals and near.relay is not None and few(near.relay.received, p)


def test_who_holds_what_is_offered_later_is_told_then(tmp_path: Path) -> None:
    w, path = used(weights()), tmp_path / "held.safetensors"
    history, hub = History(Layout.of(w)), Hub.bind()
    history.publish(w)
    history.save(path)
    feed = Feed(history, hub, later=True)
    try:
        with Follower(HOST, hub.port, state=path) as f:
            until(lambda: any(s.greeted for s in feed.followers))
            sleep(0.2)
            assert not f.confirmed
            feed.wake()
            until(lambda: f.confirmed)
            assert f.held.number == 1 and not f.arrivals
    finally:
        feed.close()


def test_nobody_gets_what_a_relay_had_saved_before_the_publisher_publishes(tmp_path: Path) -> None:
    w, path, own = weights(), tmp_path / "held.safetensors", tmp_path / "publisher.safetensors"
    p = publisher(w, state=own)
    relay = StateRelay(HOST, p.port)
    with Follower(HOST, relay.port) as f:
        for version in (1, 2, 3):
            step(w, version)
            newest = p.publish()
            f.wait(version)
            if version == 1:
                f.save(path)
        p.close()
        relay.close()
        with (
            publisher(w, port=p.port, state=own) as p,  # which has published nothing yet
            StateRelay(HOST, p.port, (HOST, relay.port), state=path) as relay,
            Follower(HOST, relay.port) as newcomer,
        ):
            assert relay.held.number == 1
            until(lambda: sum(s.greeted for s in relay.followers) == 2)
            sleep(0.3)
            assert f.held.number == 3 and f.held.hash == newest.hash and not newcomer.arrivals
            step(w)
            newest = p.publish()
            for follower in (f, newcomer):
                until(lambda follower=follower: follower.held.hash == newest.hash)
                assert follower.held.number > 3 and same(follower.tensors(), used(w))


def test_a_follower_with_a_relay_writes_its_file_and_no_relay_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, wrote = saved.save, list[Path]()

    def counted(path: Path, *what: Any) -> None:
        wrote.append(path)
        writing(path, *what)

    monkeypatch.setattr(saved, "save", counted)
    path = tmp_path / "held.safetensors"
    with publisher(weights()) as p:
        p.publish()
        with StateRelay(HOST, p.port, state=path) as relay:
            relay.wait(1)
        assert not wrote
        with Follower(HOST, p.port, relay=(HOST, 0), state=path) as f:
            f.wait(1)
        assert wrote == [path] and Replica.load(path).held.number == 1


def test_a_saved_state_of_other_tensors_ends_a_relay(tmp_path: Path) -> None:
    path = tmp_path / "held.safetensors"
    with publisher(weights(rows=3)) as p:
        p.publish()
        p.save(path)
    with publisher(weights()) as p, StateRelay(HOST, p.port, state=path) as relay:
        p.publish()
        with pytest.raises(InputError, match=r"embed is .*\[300, 200\] at the publisher .*: follow it anew"):
            relay.wait(2, LONG)


@pytest.mark.parametrize("relayed", [False, True])
def test_a_file_that_is_no_saved_state_is_refused_before_anything_starts(
    tmp_path: Path, relayed: bool
) -> None:
    path, before = tmp_path / "held.safetensors", set(threading.enumerate())
    path.write_bytes(b"nothing of ours")
    with pytest.raises(InputError, match=f"{path} is not a saved state"):
        StateRelay(HOST, 1, state=path) if relayed else Follower(HOST, 1, relay=(HOST, 0), state=path)
    assert set(threading.enumerate()) <= before
