"""Hubs and spokes that fall silent, are cut off or busy: who is lost, and who is not."""

from __future__ import annotations

from time import monotonic, sleep

import pytest
from hubs import Clock, await_event, hub, spoke
from slow_proxy import SlowProxy
from tcp_proxy import TcpProxy
from waiting import HOST, LONG, until

from thinwire.links.hub.hub import Hub
from thinwire.links.hub.spoke import Spoke
from thinwire.links.hub.station import LIMIT_NBYTES, Event, EventKind
from thinwire.links.inbox import ASLEEP
from thinwire.links.tcp import info as tcp_info


def test_a_spoke_that_falls_silent_is_reported_and_may_come_back(clock: Clock) -> None:
    with hub(silence=1e3) as h, TcpProxy(h.port) as proxy, spoke(proxy.port, silence=1e6):
        peer = await_event(h, EventKind.JOINED).peer
        for _ in range(3):  # more than the limit altogether, but it was heard in between
            heard = h.traffic(peer)[1].messages
            clock.by += 600.0
            until(lambda heard=heard: h.traffic(peer)[1].messages > heard)
        assert h.peers == (peer,) and h.recv(0.0) is None
        proxy.stall()
        clock.by += 1001.0
        assert await_event(h, EventKind.LOST) == Event(
            EventKind.LOST, peer, b"it gave no sign of life for 1000 s"
        )
        assert not h.send(peer, b"x") and h.peers == ()
        proxy.resume()
        assert await_event(h, EventKind.JOINED).peer == peer


def test_who_was_stopped_takes_nobody_for_lost(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.links.hub.station.ASLEEP", ASLEEP)
    with hub() as h, TcpProxy(h.port) as proxy, spoke(proxy.port) as s:
        await_event(h, EventKind.JOINED)
        await_event(s, EventKind.JOINED)
        proxy.stall()  # what the other end said meanwhile is still on its way
        clock.by += 600.0
        assert h.recv(0.6) is s.recv(0.0) is None
        proxy.resume()
        s.send(b"still here")
        assert await_event(h, EventKind.DATA).data == b"still here" and proxy.connections == 1


def test_a_cut_connection_is_made_again_under_the_same_name() -> None:
    with hub() as h, TcpProxy(h.port) as proxy, spoke(proxy.port) as s:
        await_event(s, EventKind.JOINED)
        s.send(b"one")
        peer = await_event(h, EventKind.DATA).peer
        proxy.cut()
        assert await_event(s, EventKind.LOST).data == b"the connection broke" and not s.joined
        assert not s.send(b"into the void")
        proxy.restore()
        await_event(s, EventKind.JOINED)
        s.send(b"two")
        assert await_event(h, EventKind.DATA)[:3] == (EventKind.DATA, peer, b"two")
        assert h.send(peer, b"three")
        assert await_event(s, EventKind.DATA).data == b"three"


@pytest.mark.parametrize(("token", "after"), [(None, 0), (b"t", 0), (b"t", 9), (b"t", 30)])
def test_a_damaged_stream_is_dropped_and_dialled_again(clock: Clock, token: bytes | None, after: int) -> None:
    """A frame's flags, the name of its kind, and what is in the encrypted box: there the hub falls silent."""
    with hub(token=token) as h, TcpProxy(h.port) as proxy, spoke(proxy.port, token, silence=1e3) as s:
        await_event(s, EventKind.JOINED)
        s.send(b"w" * 40)
        assert await_event(h, EventKind.DATA).data == b"w" * 40
        proxy.corrupt("up", after)
        s.send(b"x" * 40)
        until(lambda: not proxy._flips["up"])
        for _ in range(2 if after else 0):
            sent = proxy.counts["up"]
            clock.by += 600.0
            until(lambda sent=sent: proxy.counts["up"] > sent or not s.joined)
            sleep(0.1)  # a hub that still hears would have answered
        why = b"it gave no sign of life for 1000 s" if after else b"the connection broke"
        assert await_event(s, EventKind.LOST).data == why
        await_event(s, EventKind.JOINED)
        s.send(b"again")
        assert await_event(h, EventKind.DATA).data == b"again" and proxy.connections >= 2


def test_a_silent_hub_is_dialled_again(clock: Clock) -> None:
    with hub(silence=1e6) as h, TcpProxy(h.port) as proxy, spoke(proxy.port, silence=1e3) as s:
        await_event(s, EventKind.JOINED)
        for _ in range(3):  # more than the limit altogether, but it was heard in between
            heard = s.traffic[1].messages
            clock.by += 600.0
            until(lambda heard=heard: s.traffic[1].messages > heard)
        assert s.recv(0.0) is None and proxy.connections == 1
        proxy.stall()
        clock.by += 1001.0
        assert await_event(s, EventKind.LOST).data == b"it gave no sign of life for 1000 s"
        proxy.resume()
        await_event(s, EventKind.JOINED)
        assert proxy.connections >= 2 and h.peers


@pytest.mark.skipif(not tcp_info.supported(), reason="the kernel's counts are Linux's")
def test_a_message_that_takes_longer_than_the_silence_is_waited_for() -> None:
    message = bytes(60_000)  # 1.5 s of line time
    with hub() as h, SlowProxy(h.port, 40e3) as proxy, spoke(proxy.port, silence=0.8) as s:
        peer = await_event(h, EventKind.JOINED).peer
        assert h.send(peer, message)
        assert await_event(s, EventKind.JOINED).kind is EventKind.JOINED
        event = s.recv(LONG)
        assert event is not None and event.data == message
        assert proxy.connections == 1 and s.joined


def test_pongs_that_a_damaged_message_swallows_are_no_signs_of_life() -> None:
    with hub() as h, TcpProxy(h.port) as proxy, spoke(proxy.port, silence=0.8) as s:
        await_event(s, EventKind.JOINED)
        proxy.corrupt("down", 1)  # the length of a pong: 238 bytes, in place of 17
        assert await_event(s, EventKind.LOST).data == b"it gave no sign of life for 0.8 s"
        await_event(s, EventKind.JOINED)
        assert proxy.connections == 2


def test_who_does_not_read_holds_up_nobody_and_its_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    most, chunk = 1 << 20, bytes(1 << 16)
    monkeypatch.setattr("thinwire.links.hub.hub.MAX_QUEUE", most)
    with hub() as h, TcpProxy(h.port) as proxy, spoke(proxy.port) as slow, spoke(h.port) as quick:
        names = {}
        for s, word in ((slow, b"slow"), (quick, b"quick")):
            await_event(s, EventKind.JOINED)
            s.send(word)
            names[word] = await_event(h, EventKind.DATA).peer
        proxy.stall()
        taken = refused = 0
        while refused < 20:  # in a row: sockets and ZeroMQ take no more either
            if h.send(names[b"slow"], chunk):
                taken, refused = taken + 1, 0
                assert taken < 1000, "64 MiB were taken for who reads nothing"
            else:
                refused += 1
                sleep(0.005)
            assert h._peers[names[b"slow"]].queued <= most
        for i in range(50):
            assert h.send(names[b"quick"], b"%d" % i)
            assert await_event(quick, EventKind.DATA).data == b"%d" % i
        proxy.resume()
        for _ in range(taken):
            assert await_event(slow, EventKind.DATA).data == chunk


def test_a_spoke_that_is_busy_keeps_little_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a hub sends meanwhile stays with the hub, and the connection is not held for silent."""
    chunk, n, clock = bytes(1 << 18), 400, Clock()
    monkeypatch.setattr("thinwire.links.hub.spoke.monotonic", clock)
    with hub() as h, spoke(h.port) as s:
        await_event(s, EventKind.JOINED)
        s.send(b"here")
        peer = await_event(h, EventKind.DATA).peer
        sent, ends = 0, monotonic() + 2.0
        while sent < n and monotonic() < ends:
            taken = h.send(peer, chunk)
            sent += taken
            sleep(0.0 if taken else 0.002)
        assert s._events._nbytes <= LIMIT_NBYTES + len(chunk) and s._events.full
        clock.by += 100.0  # far beyond the silence
        sleep(0.6)
        assert s.joined
        for _ in range(sent):
            assert await_event(s, EventKind.DATA).data == chunk


def test_a_hub_that_is_busy_is_not_held_for_silent_and_loses_nothing() -> None:
    sent = [b"%d" % i for i in range(200)]
    with hub(silence=0.8) as h, spoke(h.port, silence=0.8) as s:
        h._events._limit = 10
        await_event(s, EventKind.JOINED)
        for message in sent:
            assert s.send(message)
        assert s.recv(2.0) is None  # neither lost nor joined again
        kept = [event for _ in range(1 + len(sent)) if (event := h.recv(LONG)) is not None]
        assert kept[0].kind is EventKind.JOINED and [event.data for event in kept[1:]] == sent


def test_ends_that_lose_patience_soon_ping_often_enough() -> None:
    hub = Hub.bind(silence=0.8)  # below the heartbeat there is otherwise
    spoke = Spoke.connect(HOST, hub.port, silence=0.8)
    try:
        until(lambda: len(hub.peers) == 1)
        peers, end = hub.peers, monotonic() + 2.5
        while (left := end - monotonic()) > 0:
            event = hub.recv(left)
            assert event is None or event.kind is not EventKind.LOST
        assert spoke.joined and hub.peers == peers
    finally:
        spoke.close(0.0)
        hub.close(0.0)
