"""Relays: they call versions as their publisher does, pass on its errors, and cost it one follower."""

from __future__ import annotations

import re
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from following import publisher, same, small, stranger, train, used, weights
from tcp_proxy import TcpProxy
from waiting import HOST, LONG, until

from thinwire.links.hub.hub import Hub
from thinwire.types import AuthError, InputError, LinkError
from thinwire.uses.following.commands import following as cli
from thinwire.uses.following.push import feed
from thinwire.uses.following.push import state_relay as relays
from thinwire.uses.following.push.follower import Follower
from thinwire.uses.following.push.publisher import Publisher
from thinwire.uses.following.push.state_relay import StateRelay


def test_a_relay_calls_versions_as_its_publisher_does() -> None:
    w = weights()
    with publisher(w) as p, StateRelay(HOST, p.port) as relay, Follower(HOST, relay.port) as f:
        port, first = p.port, p.publish()
        f.wait(1)
        p.history.outnumber(6)
        p.close()
        with publisher(w, port=port) as again:
            again.history.outnumber(6)
            assert again.publish().hash == first.hash
            assert relay.wait(7).hash == first.hash and f.wait(7).hash == first.hash
            train(w)
            again.publish()
            assert f.wait(8).number == 8 and same(f.tensors(), used(w))


def test_a_wrong_token_is_told_at_once_at_a_follower_that_is_a_relay() -> None:
    with (
        publisher(weights(), token=b"right") as p,
        Follower(HOST, p.port, b"wrong", relay=(HOST, 0)) as bad,
    ):
        began = monotonic()
        with pytest.raises(AuthError, match=rf"{HOST}:{p.port} refused this token"):
            bad.wait(1, LONG)
        assert monotonic() - began < LONG / 2
        assert "refused this token" in (bad.status.error or "")
        with pytest.raises(AuthError):
            next(iter(bad))


def test_what_ends_a_relay_ends_the_wait_of_its_own_follower() -> None:
    with publisher(weights()) as p, Follower(HOST, p.port, relay=(HOST, 0)) as f:
        p.publish()
        f.wait(1, LONG)
        p.close()
        with publisher({"other": torch.zeros(3)}, port=p.port) as other:
            other.publish()
            began = monotonic()
            with pytest.raises(InputError, match="follow it anew"):
                f.wait(2, LONG)
            assert monotonic() - began < LONG / 2 and "follow it anew" in (f.status.error or "")


def test_eight_followers_through_one_relay_cost_the_publisher_what_one_costs() -> None:
    w = weights(rows=1000)
    with publisher(w, token=b"t") as p, StateRelay(HOST, p.port, token=b"t") as relay:
        followers = [Follower(HOST, relay.port, b"t") for _ in range(8)]
        for _ in range(6):
            train(w)
            version = p.publish()
            for f in followers:
                f.wait(version.number)
        relay.wait(version.number)
        for f in followers:
            assert same(f.tensors(), used(w))
            until(lambda f=f: abs(f.clock - relay.now()) <= f.status.doubt + 0.05)
        one = followers[0].status.nbytes
        assert p.sent < 1.2 * one and len(p.followers) == 1
        assert relay.sent > 7 * one and len(relay.followers) == 8
        for f in followers:
            f.close()


def test_a_follower_may_be_a_relay_itself_and_relays_may_follow_relays() -> None:
    w = weights()
    with (
        publisher(w) as p,
        Follower(HOST, p.port, relay=(HOST, 0)) as near,
        StateRelay(HOST, near.relay.port if near.relay else 0) as relay,
        Follower(HOST, relay.port) as far,
    ):
        for _ in range(4):
            train(w)
            version = p.publish(3)
            assert far.wait(version.number).meta == {"step": 3}
            near.wait(version.number)
        assert same(near.tensors(), used(w)) and same(far.tensors(), used(w))
        assert len(p.followers) == 1


def test_after_publisher_and_relay_restart_versions_still_go_forward() -> None:
    w = weights()
    with publisher(w) as p, StateRelay(HOST, p.port) as relay:
        ports = p.port, relay.port
        for _ in range(7):
            train(w)
            p.publish()
        f = Follower(HOST, relay.port)
        f.wait(7)
    with f, publisher(w, port=ports[0]) as p, StateRelay(HOST, p.port, (HOST, ports[1])) as relay:
        p.publish()
        train(w)
        version = p.publish()  # number 2 here, until the relay hears of 7
        until(lambda: f.held.hash == version.hash)
        assert f.held.number > 7 and same(f.tensors(), used(w))
        assert p.newest.number == f.held.number == relay.held.number


@pytest.mark.parametrize("own", [True, False])
def test_a_publisher_that_is_gone_is_missed_behind_a_relay(
    own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "SILENT", 0.3)
    with Publisher(small()) as p:
        p.publish(1)
        with StateRelay(HOST, p.port) as relay:
            where = {"host": HOST, "port": p.port if own else relay.port, "relay": (HOST, 0) if own else None}
            with Follower(**where, patience=2.0) as f:  # type: ignore[arg-type]
                f.wait(1)
                p.close()
                began = monotonic()
                named = str(p.port if own else relay.port)
                with pytest.raises(LinkError, match=f"no sign of {HOST}:{named} for 2 s"):
                    for _ in f:
                        assert monotonic() - began < LONG
                if own:
                    until(lambda: not f.status.connected)


def test_a_publisher_that_comes_back_is_no_longer_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "SILENT", 0.3)
    w = small()
    p = Publisher(w)
    p.publish(1)
    with StateRelay(HOST, p.port) as relay, Follower(HOST, relay.port) as f:
        f.wait(1)
        p.close()
        until(lambda: f.silence > 1.5)
        w["w"] += 1
        with Publisher(w, port=p.port) as again:
            again.publish(2)
            assert f.wait(2).meta == {"step": 2}
            until(lambda: f.silence < 1.5)


def test_a_publisher_that_never_came_is_missed_behind_a_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "SILENT", 0.3)
    nobody = Hub.bind()
    port = nobody.port
    nobody.close(0.0)
    with StateRelay(HOST, port) as relay, Follower(HOST, relay.port, patience=3.0) as f:
        with pytest.raises(LinkError, match=f"no sign of {HOST}:{relay.port} for 3 s"):
            next(iter(f))
        assert f.status.connected
        with Publisher(small(), port=port) as p:  # and found when it comes
            p.publish(1)
            assert f.wait(1).number == 1
            until(lambda: f.silence < 2.0)


def test_a_feed_finds_the_reception_of_its_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout may come before the relay is done with being made."""

    class Slow(relays.Reception):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            sleep(1.0)

    monkeypatch.setattr(relays, "Reception", Slow)
    with Publisher(small()) as p:
        p.publish(1)
        with StateRelay(HOST, p.port) as relay:
            assert relay.wait(1).number == 1
            relay.check()


def test_a_relay_answers_who_dials_before_it_is_done_with_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    bind = Hub.bind

    def dialled(*args: Any, **options: Any) -> Hub:
        hub = bind(*args, **options)
        with stranger(hub.port) as spoke:
            until(lambda: spoke.clock.trip is not None, 10.0)  # it was told the time
        return hub

    with Publisher(small()) as p:
        p.publish(1)
        monkeypatch.setattr(Hub, "bind", dialled)
        with StateRelay(HOST, p.port) as relay:
            assert relay.wait(1).number == 1


def test_what_ends_a_relay_ends_its_port() -> None:
    p = Publisher(small())
    p.publish(1)
    with StateRelay(HOST, p.port) as relay, Follower(HOST, relay.port) as f:
        f.wait(1)
        p.close()
        with Publisher({"other": torch.zeros(3)}, port=p.port) as other:
            other.publish(1)
            with pytest.raises(InputError, match="follow it anew"):
                relay.wait(2, LONG)
            until(lambda: not f.status.connected)


def test_a_relay_passes_on_no_other_state_than_it_told_its_followers_of() -> None:
    first = Publisher({"w": torch.zeros(3)}, name="a")
    first.publish()
    with StateRelay(HOST, first.port) as relay:
        relay.wait(1)
        first.close()
        with Publisher({"w": torch.ones(3)}, port=first.port, name="b") as second:
            second.publish()
            with pytest.raises(InputError, match="the state 'b', not 'a'"):
                relay.wait(2, LONG)
        assert relay.held.number == 1


LATE = 0.05  # seconds


class FarProxy(TcpProxy):
    """A ``TcpProxy`` that hands everything on later."""

    def _counted(self, data: bytes, way: str) -> bytes:
        sleep(LATE)
        return super()._counted(data, way)


def test_a_follower_with_a_relay_tells_of_the_link_to_its_publisher_and_not_of_the_hop_to_the_relay() -> None:
    w = used(weights())
    with (
        publisher(w) as p,
        FarProxy(p.port) as line,
        Follower(HOST, line.port, relay=(HOST, 0)) as near,
    ):
        p.publish()
        near.wait(1)
        assert near.relay is not None
        until(lambda: near.status.doubt < LONG and near.status.rate is not None)
        before, status, after = near.relay.received, near.status, near.relay.received
        assert before <= status.nbytes <= after and status.rate == near.relay.rate
        assert status.trip is not None and status.trip >= 2 * LATE and status.doubt >= LATE
        assert float(re.findall(r"round trip ([\d.e+]+) ms", cli.line(near))[0]) >= 2e3 * LATE
        until(lambda: [f.version for f in p.followers] == [1])  # or closing waits for what the line holds
