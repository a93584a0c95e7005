"""Hub and spokes: many peers, joins and losses, bounds, strangers, nothing left after close."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from time import monotonic, sleep

import pytest
import zmq
from hubs import await_event, hub, spoke
from strangers import descriptors, throw
from waiting import HOST, LONG, until

from thinwire.links.hub.hub import Hub, _SpokeState
from thinwire.links.hub.spoke import MAX_MESSAGE, Spoke
from thinwire.links.hub.station import Event, EventKind, Events
from thinwire.links.inbox import renewed
from thinwire.links.sockets import PROBES, STALL
from thinwire.links.tcp import info as tcp_info
from thinwire.types import InputError, LinkError


@pytest.mark.parametrize("token", [None, b"a shared secret"])
def test_each_spoke_is_heard_and_answered_by_name_in_order(token: bytes | None) -> None:
    with hub(token=token) as h, spoke(h.port, token) as a, spoke(h.port, token) as b:
        names = {}
        for s, word in ((a, b"a"), (b, b"b")):
            await_event(s, EventKind.JOINED)
            assert s.send(word)
            event = await_event(h, EventKind.DATA)
            names[event.data] = event.peer
        assert sorted(names) == [b"a", b"b"] and sorted(h.peers) == sorted(names.values())
        for i in range(300):
            assert h.send(names[b"a"], b"%d" % i) and h.send(names[b"b"], b"%d" % -i)
        assert [await_event(a, EventKind.DATA).data for _ in range(300)] == [b"%d" % i for i in range(300)]
        assert [await_event(b, EventKind.DATA).data for _ in range(300)] == [b"%d" % -i for i in range(300)]
        sent, received = h.traffic(names[b"a"])
        assert sent.messages >= 300 and received.messages >= 2 and "127.0.0.1" in h.describe(names[b"a"])
        assert a.clock.trip is not None and a.clock.trip < LONG


def test_bytes_are_counted_alike_at_both_ends() -> None:
    with hub() as h, spoke(h.port) as s:
        await_event(s, EventKind.JOINED)
        s.send(b"x" * 1000)
        peer = await_event(h, EventKind.DATA).peer
        h.send(peer, b"y" * 5000)
        await_event(s, EventKind.DATA)
        end = monotonic() + LONG  # pings go on, and a message may arrive before its sender has counted it
        while monotonic() < end:
            sent, received = h.traffic()
            if (sent, received) == s.traffic[::-1] and min(sent.nbytes - 5000, received.nbytes - 1000) >= 10:
                break
        else:
            pytest.fail(f"{h.traffic()} at the hub, {s.traffic} at the spoke")


def test_a_spoke_that_leaves_is_reported_and_the_others_stay() -> None:
    with hub() as h, spoke(h.port) as a, spoke(h.port):
        both = {await_event(h, EventKind.JOINED).peer, await_event(h, EventKind.JOINED).peer}
        await_event(a, EventKind.JOINED)
        a.close(0.5)
        left = await_event(h, EventKind.LOST)
        assert left.data == b"it left" and {left.peer, *h.peers} == both and not h.send(left.peer, b"x")


def test_a_spoke_may_be_there_before_its_hub_and_after_it() -> None:
    with hub() as h:
        port = h.port
    with spoke(port) as s:
        assert s.recv(0.2) is None
        with hub(port=port) as h:
            await_event(s, EventKind.JOINED)
        await_event(s, EventKind.LOST)
        with hub(port=port) as h:
            await_event(s, EventKind.JOINED)
            s.send(b"back")
            assert await_event(h, EventKind.DATA).data == b"back"


def test_events_are_bounded_in_bytes_and_in_number() -> None:
    few = Events(limit=2, limit_nbytes=10)
    few.put(Event(EventKind.DATA, b"", bytes(9)))
    assert not few.full
    few.put(Event(EventKind.JOINED, b""))
    assert few.full
    large = Events(limit_nbytes=10)
    for n in (4, 8):
        assert not large.full
        large.put(Event(EventKind.DATA, b"", bytes(n)))
    assert large.full and large.get(0.0) is not None and not large.full


def test_a_reader_who_came_before_the_events_were_full_wakes_the_hub_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with hub(silence=LONG) as h, spoke(h.port) as s:
        await_event(s, EventKind.JOINED)
        await_event(h, EventKind.JOINED)
        h._events._limit, h._idle = 1, int(1000 * LONG)  # the bell alone wakes it
        get = h._events.get

        def late(timeout: float) -> Event | None:
            until(lambda: h._events.full)
            sleep(0.05)  # by then the thread reads no more
            return get(timeout)

        monkeypatch.setattr(h._events, "get", late)
        began = monotonic()
        for i in range(3):
            s.send(b"%d" % i)
        assert [await_event(h, EventKind.DATA).data for _ in range(3)] == [b"0", b"1", b"2"]
        assert monotonic() - began < LONG / 3


@pytest.mark.skipif(not tcp_info.supported(), reason="looks at this process's sockets as Linux shows them")
def test_tcp_gives_up_a_peer_that_is_gone_and_waits_for_one_that_does_not_read() -> None:
    with hub() as h, spoke(h.port) as s:
        await_event(s, EventKind.JOINED)
        ends = 0
        for place in tcp_info.sockets():
            info = tcp_info.read_at(place)
            if info is None or h.port not in (info.local[1], info.remote[1]):
                continue
            with tcp_info.borrowed(place) as sock:
                assert sock is not None
                # long: it also ends a connection whose other end lives and has no room for so long
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == STALL * 1e3
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                options = socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT
                assert tuple(sock.getsockopt(socket.IPPROTO_TCP, o) for o in options) == PROBES
                ends += 1
        assert ends == 2


def test_a_message_that_is_too_large_for_a_spoke_is_not_taken() -> None:
    with hub() as h, spoke(h.port) as s:
        await_event(s, EventKind.JOINED)
        s.send(b"here")
        peer = await_event(h, EventKind.DATA).peer
        assert h.send(peer, bytes(MAX_MESSAGE + 1000))
        assert await_event(s, EventKind.LOST).data == b"the connection broke"


def test_all_that_do_not_read_have_a_bound_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.links.hub.hub.MAX_QUEUED", 1 << 20)
    monkeypatch.setattr("thinwire.links.hub.hub.FAIR", 1 << 17)
    chunk, peers = bytes(1 << 16), [bytes([i]) * 16 for i in range(1, 5)]
    with hub() as h:
        for peer in peers:
            h._peers[peer] = _SpokeState(peer.hex(), monotonic())
            monkeypatch.setattr(h, "_put", lambda name, data: False)
        for peer in peers:
            for _ in range(100):
                h.send(peer, chunk)
        queued = [h._peers[peer].queued for peer in peers]
        assert queued[0] >= 1 << 20 and h._queued == sum(queued) < (1 << 20) + 4 * (1 << 17)
        assert min(queued) >= len(chunk)  # nobody is left out for others
        for peer in peers:
            h.forget(peer)
        assert h._queued == 0


def test_two_hubs_on_one_port_and_addresses_off_loopback() -> None:
    with hub() as h, pytest.raises(InputError, match=rf"cannot listen at 127\.0\.0\.1:{h.port}: [^:(]*; "):
        Hub.bind(port=h.port)
    with pytest.raises(InputError, match="THINWIRE_TOKEN"):
        Hub.bind("0.0.0.0")
    with pytest.raises(InputError, match="THINWIRE_TOKEN"):
        Spoke.connect("192.0.2.1", 4567)


def test_strangers_and_hostile_bytes_do_not_disturb_the_hub() -> None:
    with hub() as h, spoke(h.port) as s, zmq.Context() as context:
        await_event(s, EventKind.JOINED)
        s.send(b"before")
        assert await_event(h, EventKind.DATA).data == b"before"
        throw(h.port, 5)
        with context.socket(zmq.DEALER) as stranger:
            stranger.linger = 1000
            stranger.connect(f"tcp://127.0.0.1:{h.port}")  # a name of ZeroMQ's making: not 16 bytes
            stranger.send(b"\2forged")
            stranger.send_multipart([b"\2for", b"ged"])
        with context.socket(zmq.DEALER) as odd:
            odd.linger, odd.routing_id = 1000, b"o" * 16
            odd.connect(f"tcp://127.0.0.1:{h.port}")
            for message in (b"", b"\0", b"\0short", b"\xff" * 30, b"\1" + bytes(16)):
                odd.send(message)
        until(lambda: b"o" * 16 in h.peers)
        s.send(b"after")
        assert await_event(h, EventKind.DATA).data == b"after"
        with pytest.raises(AssertionError):
            await_event(h, EventKind.DATA, 0.1)


def test_a_message_that_is_too_large_for_the_hub_costs_the_sender_its_connection() -> None:
    with hub() as h, spoke(h.port) as s:
        await_event(s, EventKind.JOINED)
        s.send(bytes(100_000))
        await_event(s, EventKind.LOST)
        await_event(s, EventKind.JOINED)
        s.send(b"fits")
        assert await_event(h, EventKind.DATA).data == b"fits"


def test_recv_ends_by_wake_by_deadline_and_by_close() -> None:
    with hub() as h:
        timer = threading.Timer(0.05, h.wake)
        timer.start()
        began = monotonic()
        assert h.recv(LONG) is None and monotonic() - began < LONG
        h.wake()
        assert h.recv(LONG) is None and h.recv(0.01) is None
        h.close()
        with pytest.raises(LinkError, match="this end closed the hub at"):
            h.recv(LONG)
        assert not h.send(b"s" * 16, b"late")


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts descriptors in /proc")
def test_close_leaves_no_thread_and_no_descriptor() -> None:
    def once() -> None:
        with hub(token=b"t") as h, spoke(h.port, b"t") as s:
            await_event(s, EventKind.JOINED)

    once()  # whatever is made once and kept
    threads, before = set(threading.enumerate()), descriptors()
    for _ in range(3):
        once()
    until(lambda: set(threading.enumerate()) <= threads)
    until(lambda: descriptors() <= before)


@pytest.mark.parametrize("silence", [0.0, -1.0, float("nan")])
def test_a_silence_of_nothing_is_refused(silence: float) -> None:
    for make in (lambda: Hub.bind(silence=silence), lambda: Spoke.connect(HOST, 1, silence=silence)):
        with pytest.raises(InputError, match="silence"):
            make()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_link_that_fails_inside_does_not_say_that_this_end_closed_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub = Hub.bind()
    monkeypatch.setattr(hub, "_check_silence", lambda now, excused: 1 // 0)
    with pytest.raises(LinkError, match="failed: ZeroDivisionError"):
        hub.recv(LONG)
        hub.recv(LONG)
    hub.close(0.0)


class Odd(Exception):
    """Cannot be made from what it keeps."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def test_errors_of_any_kind_are_told_again() -> None:
    many = UnicodeDecodeError("utf-8", b"x", 0, 1, "odd")
    for error in (LinkError("away"), many, FileNotFoundError(2, "gone", "a"), Odd(1, 2)):
        again = renewed(error)
        assert again is not error and again.__traceback__ is None and str(error) in str(again)
        assert type(again) in (type(error), RuntimeError)
    assert isinstance(renewed(many), UnicodeDecodeError)
