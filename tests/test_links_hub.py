"""Hub and spokes: many peers, tokens, joins and losses, slow readers, strangers, nothing left after close."""

from __future__ import annotations

import math
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from slow_proxy import SlowProxy
from tcp_proxy import TcpProxy
from thinwire.links import tcp_info
from thinwire.links.clock import PeerClock
from thinwire.links.events import LIMIT_NBYTES, Event, Events, Kind
from thinwire.links.greeting import GREETING, asks_for_token
from thinwire.links.hub import Hub, _Peer
from thinwire.links.reliable import ASLEEP
from thinwire.links.sockets import PROBES, STALL
from thinwire.links.spoke import MAX_MESSAGE, Spoke
from thinwire.links.station import Station
from thinwire.links.zmq_thread import REFUSALS
from thinwire.types import AuthError, InputError, LinkError

LONG = 60.0  # seconds; a limit, not an expectation


def await_event(station: Station, kind: Kind, timeout: float = LONG) -> Event:
    """Return the next event of a kind; those of other kinds are passed over."""
    end = monotonic() + timeout
    while monotonic() < end:
        event = station.recv(end - monotonic())
        if event is not None and event.kind is kind:
            return event
    raise AssertionError(f"no {kind} within {timeout} s")


def until(done: Callable[[], object]) -> None:
    end = monotonic() + LONG
    while not done():
        assert monotonic() < end, "in vain"
        sleep(0.01)


class Clock:
    """What hubs and spokes take for the time: it runs, and a test sets it forward."""

    by = 0.0  # seconds

    def __call__(self) -> float:
        return monotonic() + self.by


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("thinwire.links.station.ASLEEP", math.inf)  # a leap is no pause of this process
    for module in ("hub", "spoke", "station"):
        monkeypatch.setattr(f"thinwire.links.{module}.monotonic", found)
    return found


@contextmanager
def hub(**options: object) -> Iterator[Hub]:
    made = Hub.bind(**options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close(0.5)


@contextmanager
def spoke(port: int, token: bytes | None = None, **options: object) -> Iterator[Spoke]:
    made = Spoke.connect("127.0.0.1", port, token=token, **options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close(0.5)


@pytest.mark.parametrize("token", [None, b"a shared secret"])
def test_each_spoke_is_heard_and_answered_by_name_in_order(token: bytes | None) -> None:
    with hub(token=token) as h, spoke(h.port, token) as a, spoke(h.port, token) as b:
        names = {}
        for s, word in ((a, b"a"), (b, b"b")):
            await_event(s, Kind.JOINED)
            assert s.send(word)
            event = await_event(h, Kind.DATA)
            names[event.data] = event.peer
        assert sorted(names) == [b"a", b"b"] and sorted(h.peers) == sorted(names.values())
        for i in range(300):
            assert h.send(names[b"a"], b"%d" % i) and h.send(names[b"b"], b"%d" % -i)
        assert [await_event(a, Kind.DATA).data for _ in range(300)] == [b"%d" % i for i in range(300)]
        assert [await_event(b, Kind.DATA).data for _ in range(300)] == [b"%d" % -i for i in range(300)]
        sent, received = h.traffic(names[b"a"])
        assert sent.messages >= 300 and received.messages >= 2 and "127.0.0.1" in h.describe(names[b"a"])
        assert a.clock.trip is not None and a.clock.trip < LONG


def test_bytes_are_counted_alike_at_both_ends() -> None:
    with hub() as h, spoke(h.port) as s:
        await_event(s, Kind.JOINED)
        s.send(b"x" * 1000)
        peer = await_event(h, Kind.DATA).peer
        h.send(peer, b"y" * 5000)
        await_event(s, Kind.DATA)
        end = monotonic() + LONG  # pings go on, and a message may arrive before its sender has counted it
        while monotonic() < end:
            sent, received = h.traffic()
            if (sent, received) == s.traffic[::-1] and min(sent.nbytes - 5000, received.nbytes - 1000) >= 10:
                break
        else:
            pytest.fail(f"{h.traffic()} at the hub, {s.traffic} at the spoke")


@pytest.mark.parametrize(("token", "other"), [(b"right", b"wrong"), (b"right", None)], ids=["wrong", "none"])
def test_without_the_right_token_nothing_is_heard_and_the_spoke_says_so(
    token: bytes | None, other: bytes | None
) -> None:
    with hub(token=token) as h, spoke(h.port, other) as s:
        with pytest.raises(AuthError, match=rf"127.0.0.1:{h.port} refused this token: set THINWIRE_TOKEN"):
            await_event(s, Kind.JOINED)
        until(lambda: h.refused)
        assert not s.send(b"secret") and h.recv(0.05) is None and h.peers == ()


def test_who_is_let_in_and_cut_off_before_any_greeting_blames_no_token() -> None:
    """A tunnel or a load balancer accepts and closes while the server behind it starts again."""
    token = b"a shared secret"
    with hub(token=token) as h, TcpProxy(h.port) as proxy:
        proxy.cut()
        with spoke(proxy.port, token) as s:
            for _ in range(2):  # before the hub was ever there, and after it was
                before, end = proxy.turned_away, monotonic() + LONG
                while proxy.turned_away < before + 2 * REFUSALS + 2 and monotonic() < end:
                    assert (event := s.recv(0.05)) is None or event.kind is Kind.LOST
                assert proxy.turned_away >= before + 2 * REFUSALS + 2
                proxy.restore()
                await_event(s, Kind.JOINED)
                proxy.cut()


def test_a_token_that_was_taken_once_is_never_blamed_later() -> None:
    with hub(token=b"first") as h:
        port = h.port
        with spoke(port, b"first") as s:
            await_event(s, Kind.JOINED)
            h.close(0.5)
            await_event(s, Kind.LOST)
            with hub(port=port, token=b"second") as other:
                end = monotonic() + LONG
                while other.refused < REFUSALS + 1 and monotonic() < end:
                    assert s.recv(0.05) is None
                assert other.refused > REFUSALS
            with hub(port=port, token=b"first"):
                await_event(s, Kind.JOINED)


def test_who_greets_with_anything_else_asks_for_no_token() -> None:
    for said in (
        b"",
        b"HTTP/1.1 400 Bad Request\r\n" * 4,
        GREETING[:30],
        GREETING.replace(b"CURVE", b"NULL\0"),
    ):
        with socket.create_server(("127.0.0.1", 0)) as server:

            def answer(server: socket.socket = server, said: bytes = said) -> None:
                with server.accept()[0] as peer:
                    peer.sendall(said)

            thread = threading.Thread(target=answer)
            thread.start()
            assert not asks_for_token("127.0.0.1", server.getsockname()[1], 0.5)
            thread.join(LONG)
    with hub(token=b"t") as h:
        assert asks_for_token("127.0.0.1", h.port, LONG)


def test_a_spoke_that_leaves_is_reported_and_the_others_stay() -> None:
    with hub() as h, spoke(h.port) as a, spoke(h.port):
        both = {await_event(h, Kind.JOINED).peer, await_event(h, Kind.JOINED).peer}
        await_event(a, Kind.JOINED)
        a.close(0.5)
        left = await_event(h, Kind.LOST)
        assert left.data == b"it left" and {left.peer, *h.peers} == both and not h.send(left.peer, b"x")


def test_a_spoke_that_falls_silent_is_reported_and_may_come_back(clock: Clock) -> None:
    with hub(silence=1e3) as h, TcpProxy(h.port) as proxy, spoke(proxy.port, silence=1e6):
        peer = await_event(h, Kind.JOINED).peer
        for _ in range(3):  # more than the limit altogether, but it was heard in between
            heard = h.traffic(peer)[1].messages
            clock.by += 600.0
            until(lambda heard=heard: h.traffic(peer)[1].messages > heard)
        assert h.peers == (peer,) and h.recv(0.0) is None
        proxy.stall()
        clock.by += 1001.0
        assert await_event(h, Kind.LOST) == Event(Kind.LOST, peer, b"it gave no sign of life for 1000 s")
        assert not h.send(peer, b"x") and h.peers == ()
        proxy.resume()
        assert await_event(h, Kind.JOINED).peer == peer


def test_who_was_stopped_takes_nobody_for_lost(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.links.station.ASLEEP", ASLEEP)
    with hub() as h, TcpProxy(h.port) as proxy, spoke(proxy.port) as s:
        await_event(h, Kind.JOINED)
        await_event(s, Kind.JOINED)
        proxy.stall()  # what the other end said meanwhile is still on its way
        clock.by += 600.0
        assert h.recv(0.6) is s.recv(0.0) is None
        proxy.resume()
        s.send(b"still here")
        assert await_event(h, Kind.DATA).data == b"still here" and proxy.connections == 1


def test_a_cut_connection_is_made_again_under_the_same_name() -> None:
    with hub() as h, TcpProxy(h.port) as proxy, spoke(proxy.port) as s:
        await_event(s, Kind.JOINED)
        s.send(b"one")
        peer = await_event(h, Kind.DATA).peer
        proxy.cut()
        assert await_event(s, Kind.LOST).data == b"the connection broke" and not s.joined
        assert not s.send(b"into the void")
        proxy.restore()
        await_event(s, Kind.JOINED)
        s.send(b"two")
        assert await_event(h, Kind.DATA) == Event(Kind.DATA, peer, b"two")
        assert h.send(peer, b"three")
        assert await_event(s, Kind.DATA).data == b"three"


@pytest.mark.parametrize(("token", "after"), [(None, 0), (b"t", 0), (b"t", 9), (b"t", 30)])
def test_a_damaged_stream_is_dropped_and_dialled_again(clock: Clock, token: bytes | None, after: int) -> None:
    """A frame's flags, the name of its kind, and what is in the encrypted box: there the hub falls silent."""
    with hub(token=token) as h, TcpProxy(h.port) as proxy, spoke(proxy.port, token, silence=1e3) as s:
        await_event(s, Kind.JOINED)
        s.send(b"w" * 40)
        assert await_event(h, Kind.DATA).data == b"w" * 40
        proxy.corrupt("up", after)
        s.send(b"x" * 40)
        until(lambda: not proxy._flips["up"])
        for _ in range(2 if after else 0):
            sent = proxy.counts["up"]
            clock.by += 600.0
            until(lambda sent=sent: proxy.counts["up"] > sent or not s.joined)
            sleep(0.1)  # a hub that still hears would have answered
        why = b"it gave no sign of life for 1000 s" if after else b"the connection broke"
        assert await_event(s, Kind.LOST).data == why
        await_event(s, Kind.JOINED)
        s.send(b"again")
        assert await_event(h, Kind.DATA).data == b"again" and proxy.connections >= 2


def test_a_silent_hub_is_dialled_again(clock: Clock) -> None:
    with hub(silence=1e6) as h, TcpProxy(h.port) as proxy, spoke(proxy.port, silence=1e3) as s:
        await_event(s, Kind.JOINED)
        for _ in range(3):  # more than the limit altogether, but it was heard in between
            heard = s.traffic[1].messages
            clock.by += 600.0
            until(lambda heard=heard: s.traffic[1].messages > heard)
        assert s.recv(0.0) is None and proxy.connections == 1
        proxy.stall()
        clock.by += 1001.0
        assert await_event(s, Kind.LOST).data == b"it gave no sign of life for 1000 s"
        proxy.resume()
        await_event(s, Kind.JOINED)
        assert proxy.connections >= 2 and h.peers


@pytest.mark.skipif(not tcp_info.supported(), reason="the kernel's counts are Linux's")
def test_a_message_that_takes_longer_than_the_silence_is_waited_for() -> None:
    message = bytes(60_000)  # 1.5 s of line time
    with hub() as h, SlowProxy(h.port, 40e3) as proxy, spoke(proxy.port, silence=0.8) as s:
        peer = await_event(h, Kind.JOINED).peer
        assert h.send(peer, message)
        assert await_event(s, Kind.JOINED).kind is Kind.JOINED
        event = s.recv(LONG)
        assert event is not None and event.data == message
        assert proxy.connections == 1 and s.joined


def test_pongs_that_a_damaged_message_swallows_are_no_signs_of_life() -> None:
    with hub() as h, TcpProxy(h.port) as proxy, spoke(proxy.port, silence=0.8) as s:
        await_event(s, Kind.JOINED)
        proxy.corrupt("down", 1)  # the length of a pong: 238 bytes, in place of 17
        assert await_event(s, Kind.LOST).data == b"it gave no sign of life for 0.8 s"
        await_event(s, Kind.JOINED)
        assert proxy.connections == 2


def test_a_spoke_may_be_there_before_its_hub_and_after_it() -> None:
    with hub() as h:
        port = h.port
    with spoke(port) as s:
        assert s.recv(0.2) is None
        with hub(port=port) as h:
            await_event(s, Kind.JOINED)
        await_event(s, Kind.LOST)
        with hub(port=port) as h:
            await_event(s, Kind.JOINED)
            s.send(b"back")
            assert await_event(h, Kind.DATA).data == b"back"


def test_who_does_not_read_holds_up_nobody_and_its_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    most, chunk = 1 << 20, bytes(1 << 16)
    monkeypatch.setattr("thinwire.links.hub.MAX_QUEUE", most)
    with hub() as h, TcpProxy(h.port) as proxy, spoke(proxy.port) as slow, spoke(h.port) as quick:
        names = {}
        for s, word in ((slow, b"slow"), (quick, b"quick")):
            await_event(s, Kind.JOINED)
            s.send(word)
            names[word] = await_event(h, Kind.DATA).peer
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
            assert await_event(quick, Kind.DATA).data == b"%d" % i
        proxy.resume()
        for _ in range(taken):
            assert await_event(slow, Kind.DATA).data == chunk


def test_events_are_bounded_in_bytes_and_in_number() -> None:
    few = Events(limit=2, limit_nbytes=10)
    few.put(Event(Kind.DATA, b"", bytes(9)))
    assert not few.full
    few.put(Event(Kind.JOINED, b""))
    assert few.full
    large = Events(limit_nbytes=10)
    for n in (4, 8):
        assert not large.full
        large.put(Event(Kind.DATA, b"", bytes(n)))
    assert large.full and large.get(0.0) is not None and not large.full


def test_a_reader_who_came_before_the_events_were_full_wakes_the_hub_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with hub(silence=LONG) as h, spoke(h.port) as s:
        await_event(s, Kind.JOINED)
        await_event(h, Kind.JOINED)
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
        assert [await_event(h, Kind.DATA).data for _ in range(3)] == [b"0", b"1", b"2"]
        assert monotonic() - began < LONG / 3


def test_a_spoke_that_is_busy_keeps_little_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a hub sends meanwhile stays with the hub, and the connection is not held for silent."""
    chunk, n, clock = bytes(1 << 18), 400, Clock()
    monkeypatch.setattr("thinwire.links.spoke.monotonic", clock)
    with hub() as h, spoke(h.port) as s:
        await_event(s, Kind.JOINED)
        s.send(b"here")
        peer = await_event(h, Kind.DATA).peer
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
            assert await_event(s, Kind.DATA).data == chunk


def test_a_hub_that_is_busy_is_not_held_for_silent_and_loses_nothing() -> None:
    sent = [b"%d" % i for i in range(200)]
    with hub(silence=0.8) as h, spoke(h.port, silence=0.8) as s:
        h._events._limit = 10
        await_event(s, Kind.JOINED)
        for message in sent:
            assert s.send(message)
        assert s.recv(2.0) is None  # neither lost nor joined again
        kept = [event for _ in range(1 + len(sent)) if (event := h.recv(LONG)) is not None]
        assert kept[0].kind is Kind.JOINED and [event.data for event in kept[1:]] == sent


@pytest.mark.skipif(not tcp_info.supported(), reason="looks at this process's sockets as Linux shows them")
def test_tcp_gives_up_a_peer_that_is_gone_and_waits_for_one_that_does_not_read() -> None:
    with hub() as h, spoke(h.port) as s:
        await_event(s, Kind.JOINED)
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
        await_event(s, Kind.JOINED)
        s.send(b"here")
        peer = await_event(h, Kind.DATA).peer
        assert h.send(peer, bytes(MAX_MESSAGE + 1000))
        assert await_event(s, Kind.LOST).data == b"the connection broke"


def test_all_that_do_not_read_have_a_bound_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.links.hub.MAX_QUEUED", 1 << 20)
    monkeypatch.setattr("thinwire.links.hub.FAIR", 1 << 17)
    chunk, peers = bytes(1 << 16), [bytes([i]) * 16 for i in range(1, 5)]
    with hub() as h:
        for peer in peers:
            h._peers[peer] = _Peer(peer.hex(), monotonic())
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


def _throw(port: int, blobs: list[bytes]) -> None:
    for blob in blobs:
        with socket.create_connection(("127.0.0.1", port), timeout=LONG) as s, suppress(OSError):
            s.sendall(blob)
            s.settimeout(0.05)
            s.recv(64)


def test_strangers_and_hostile_bytes_do_not_disturb_the_hub() -> None:
    rng = random.Random(0)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    huge = b"\x02" + (1 << 62).to_bytes(8, "big") + b"x" * 100
    blobs = [rng.randbytes(rng.randrange(1, 3000)) for _ in range(5)]
    with hub() as h, spoke(h.port) as s, zmq.Context() as context:
        await_event(s, Kind.JOINED)
        s.send(b"before")
        assert await_event(h, Kind.DATA).data == b"before"
        _throw(h.port, [*blobs, greeting, greeting + ready + huge])
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
        assert await_event(h, Kind.DATA).data == b"after"
        with pytest.raises(AssertionError):
            await_event(h, Kind.DATA, 0.1)


def test_a_message_that_is_too_large_for_the_hub_costs_the_sender_its_connection() -> None:
    with hub() as h, spoke(h.port) as s:
        await_event(s, Kind.JOINED)
        s.send(bytes(100_000))
        await_event(s, Kind.LOST)
        await_event(s, Kind.JOINED)
        s.send(b"fits")
        assert await_event(h, Kind.DATA).data == b"fits"


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


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts descriptors in /proc")
def test_close_leaves_no_thread_and_no_descriptor() -> None:
    def once() -> None:
        with hub(token=b"t") as h, spoke(h.port, b"t") as s:
            await_event(s, Kind.JOINED)

    once()  # whatever is made once and kept
    threads, before = set(threading.enumerate()), _descriptors()
    for _ in range(3):
        once()
    until(lambda: set(threading.enumerate()) <= threads)
    until(lambda: _descriptors() <= before)


@settings(deadline=None)
@given(
    st.floats(-1e9, 1e9),
    st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), min_size=1, max_size=30),
)
def test_the_peer_s_clock_is_within_half_the_least_round_trip(
    ahead: float, ways: list[tuple[float, float]]
) -> None:
    """Whatever the queues on either way: the error is bounded by ``doubt``."""
    clock, now = PeerClock(), 0.0
    for there, back in ways:
        clock.add(now, now + there + ahead, now + there + back)
        now += there + back
    assert abs(clock.ahead - ahead) <= clock.doubt + 1e-6
    assert clock.trip == pytest.approx(min(a + b for a, b in ways), abs=1e-6)


def _told(clock: PeerClock, start: float, ahead: float, trip: float, stamps: int) -> float:
    """Let so many stamps come, one a second, with all of the trip on the way back; return when it is then."""
    for second in range(stamps):
        clock.add(start + second, start + second + ahead, start + second + trip)
    return start + stamps


@pytest.mark.parametrize("step", [-3600.0, -0.3, 0.3, 3600.0])
def test_a_clock_that_was_set_is_believed_at_once_whatever_came_before(step: float) -> None:
    """Also where the trips were shorter before: by how much it was set is more than both may be wrong."""
    clock, ahead = PeerClock(), 1.7e9
    now = _told(clock, 0.0, ahead, 0.01, 70)
    assert abs(clock.ahead - ahead) <= clock.doubt + 1e-6 and clock.doubt < 0.02
    _told(clock, now, ahead + step, 0.2, 1)
    assert abs(clock.ahead - ahead - step) <= clock.doubt + 1e-6 and clock.doubt < 0.2


def test_one_stamp_that_is_far_off_costs_no_more_than_the_next_one() -> None:
    clock, ahead = PeerClock(), 1.7e9
    now = _told(clock, 0.0, ahead, 0.01, 10)
    now = _told(clock, now, ahead + 99.0, 0.01, 1)
    _told(clock, now, ahead, 0.01, 1)
    assert abs(clock.ahead - ahead) <= clock.doubt + 1e-6 and clock.doubt < 0.01


def test_clocks_that_only_drift_keep_their_best_sample() -> None:
    clock, ahead = PeerClock(), 1.7e9
    now = _told(clock, 0.0, ahead, 0.01, 1)
    for second in range(60):
        _told(clock, now + second, ahead + 0.9e-4 * second, 0.5, 1)
    assert clock.trip == pytest.approx(0.01)
    assert abs(clock.ahead - ahead - 0.9e-4 * 60) <= clock.doubt + 1e-6


def test_stamps_that_cannot_be_are_not_believed() -> None:
    clock = PeerClock()
    for sent, theirs, received in ((2.0, 0.0, 1.0), (0.0, float("nan"), 1.0), (float("-inf"), 0.0, 1.0)):
        clock.add(sent, theirs, received)
    assert clock.trip is None and clock.ahead == 0.0 and clock.doubt == float("inf")
