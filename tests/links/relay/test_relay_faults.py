"""Relays and ranks that are cut off, come back, stand in for others, or crowd the door."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from launchers import until
from relayed import LONG, TOKEN, Running, exchange, mesh
from tcp_proxy import TcpProxy

from thinwire.links import connect_mesh
from thinwire.links.address import Route
from thinwire.links.relay import handshake
from thinwire.links.relay.handshake import Answer, Request, Role, Verdict
from thinwire.links.relay.tunnel import Tunnel
from thinwire.types import AuthError, LinkError, PayloadError


def test_a_cut_and_a_stall_on_the_way_to_the_relay_heal() -> None:
    """Both ranks lose the relay for a while, then only hear nothing; no message is lost or doubled."""
    with Running() as relay, TcpProxy(relay.port) as proxy, mesh(proxy) as ranks:
        exchange(ranks)
        first = proxy.connections
        proxy.cut()
        a, b = ranks[0][1].mailbox, ranks[1][0].mailbox
        a.send(b"during", b"1" * 100_000, "forward")
        b.send(b"during", b"2" * 100_000, "backward")
        time.sleep(0.5)
        proxy.restore()
        assert b.get(b"during", LONG, "during") == b"1" * 100_000
        assert a.get(b"during", LONG, "during") == b"2" * 100_000
        assert proxy.connections > first
        proxy.stall()
        time.sleep(1.0)
        proxy.resume()
        exchange(ranks, tag=b"after")


def test_a_relay_that_comes_back_at_its_address_heals() -> None:
    with Running() as relay, mesh(relay) as ranks:
        exchange(ranks)
        relay.stop()
        time.sleep(0.5)
        with Running(port=relay.port):
            exchange(ranks, tag=b"after")
            for peer in (ranks[0][1], ranks[1][0]):
                peer.close()


def test_a_relay_that_comes_back_with_another_token_is_named_by_both_ends() -> None:
    relay = Running()
    with mesh(relay, deadline=120.0) as ranks:
        exchange(ranks)
        relay.stop()
        with Running(b"another secret, just as long and random", port=relay.port):
            for me, other in ((0, 1), (1, 0)):  # long before the links' silence would end them
                with pytest.raises(AuthError, match=rf"127.0.0.1:{relay.port} .*do not hold the same token"):
                    ranks[me][other].mailbox.get(b"never sent", LONG, "a word")


def test_a_tunnel_whose_thread_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = threading.Event()
    monkeypatch.setattr("thinwire.links.relay.tunnel.MATCH", 0.0)
    monkeypatch.setattr("thinwire.links.relay.tunnel.CONNECT", 0.0)
    monkeypatch.setattr(Tunnel, "_run", lambda self: (stuck.wait(LONG), self._loop.close()))
    request = Request(Role.DIAL, b"n" * handshake.NAME, b"i" * handshake.INSTANCE)
    tunnel = Tunnel(
        Route.parse("127.0.0.1:7000"), b"k", request, "rank 1 (relay 127.0.0.1:7000)", timeout=0.2
    )
    threading.Timer(1.0, stuck.set).start()
    with pytest.raises(LinkError, match=r"rank 1 \(relay 127.0.0.1:7000\) did not open within 0.2 s"):
        tunnel.wait()


def test_a_relay_that_is_gone_is_named_within_the_deadline() -> None:
    with Running() as relay, mesh(relay, deadline=2.0) as ranks:
        exchange(ranks)
        relay.stop()
        start = time.monotonic()
        for peer in (ranks[0][1], ranks[1][0]):
            with pytest.raises(
                LinkError, match=rf"relay 127\.0\.0\.1:{relay.port}\) has not answered for 2 s"
            ):
                peer.mailbox.get(b"never", LONG, "never")
        assert time.monotonic() - start < 20


def test_two_runs_at_once_do_not_mix() -> None:
    with Running() as relay:
        one, two = (f"127.0.0.1:{relay.port}/{name}" for name in ("one", "two"))
        with mesh(one) as first, mesh(two) as second:
            for ranks, text in ((first, b"first"), (second, b"second")):
                ranks[0][1].mailbox.send(b"run", text, "forward")
            assert first[1][0].mailbox.get(b"run", LONG, "run") == b"first"
            assert second[1][0].mailbox.get(b"run", LONG, "run") == b"second"


def test_a_second_run_of_the_same_name_is_refused_and_the_first_goes_on() -> None:
    with Running() as relay, mesh(relay) as ranks:
        for rank in range(2):
            with pytest.raises(
                LinkError, match=r"another process has this rank's place .*--relay HOST:PORT/NAME"
            ):
                connect_mesh(rank, 2, None, token=TOKEN, relay=f"127.0.0.1:{relay.port}", connect_timeout=0.8)
        exchange(ranks)
        assert ranks[0][1].reliable.resent == 0


@contextmanager
def one_end(relay: Running, role: Role, instance: bytes, port: int = 0) -> Iterator[Tunnel]:
    request = Request(role, b"n" * handshake.NAME, instance * handshake.INSTANCE)
    route = Route.parse(f"127.0.0.1:{relay.port}")
    tunnel = Tunnel(route, handshake.access_key(TOKEN), request, "the other end", port, LONG)
    try:
        tunnel.wait()
        yield tunnel
    finally:
        tunnel.close(0.0)


@contextmanager
def hearing() -> Iterator[tuple[int, list[bytes]]]:
    """Listen on loopback; yield the port, and what each connection has said first."""
    heard: list[bytes] = []

    def hear(near: socket.socket) -> None:
        with near, contextlib.suppress(OSError):
            heard.append(near.recv(100))

    def listen() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=hear, args=(server.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=listen, daemon=True).start()
        yield server.getsockname()[1], heard
        server.shutdown(socket.SHUT_RDWR)  # wakes who accepts


def test_a_rank_that_outlived_its_run_does_not_get_into_the_next_one() -> None:
    """Its links need up to twenty seconds to see that the run broke off, and dial meanwhile."""
    with Running() as relay, hearing() as (port, heard), ExitStack() as first:
        first.enter_context(one_end(relay, Role.LISTEN, b"a", port))
        with one_end(relay, Role.DIAL, b"b") as left_over:
            with socket.create_connection(("127.0.0.1", left_over.port)) as link:
                link.sendall(b"of the run")
                until(lambda: b"of the run" in heard, "what the first run says", LONG)
            first.close()
            with one_end(relay, Role.LISTEN, b"c", port):
                before = relay.relay.counts.connections
                with socket.create_connection(("127.0.0.1", left_over.port)) as link:
                    link.sendall(b"left over")
                    until(lambda: relay.relay.counts.connections > before + 1, "it to dial twice", LONG)
                    with (
                        one_end(relay, Role.DIAL, b"d") as dialling,
                        socket.create_connection(("127.0.0.1", dialling.port)) as far,
                    ):
                        far.sendall(b"of the next run")
                        until(lambda: b"of the next run" in heard, "what the next run says", LONG)
    assert b"left over" not in heard


def test_a_run_may_follow_another_at_once() -> None:
    with Running() as relay:
        for i in range(3):
            with mesh(relay) as ranks:
                exchange(ranks, n=1, tag=b"%d" % i)


# -- strangers at the relay's port


def knock(port: int, data: bytes, wait: bool = True) -> bytes:
    """Send bytes to the relay and return all that it says until it closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=LONG) as s:
        s.sendall(data)
        if not wait:
            return b""
        s.shutdown(socket.SHUT_WR)
        said = b""
        try:
            while more := s.recv(4096):
                said += more
        except ConnectionResetError:
            pass
        return said


def test_garbage_ends_in_a_counter_and_others_are_served() -> None:
    r = random.Random(0)
    with Running() as relay, mesh(relay) as ranks:
        before = relay.relay.counts.pairs
        for i in range(120):
            garbage = r.randbytes(r.choice([0, 1, 30, handshake.ASKING, 5000]))
            if i % 3 == 0:
                garbage = handshake.MAGIC + garbage
            said = knock(relay.port, garbage)
            assert said[: len(handshake.MAGIC)] in (handshake.MAGIC, b"")
            assert len(said) <= handshake.HELLO + handshake.ANSWER
        exchange(ranks)
        counts = relay.relay.counts
        assert counts.strangers + counts.refused == 120
        assert counts.refused > 0
        assert counts.pairs == before


def test_a_crowd_that_says_nothing_does_not_keep_ranks_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.links.relay.server.KNOCKING", 8)
    with Running() as relay:
        crowd = [socket.create_connection(("127.0.0.1", relay.port)) for _ in range(30)]
        try:
            with mesh(relay) as ranks:
                exchange(ranks)
            until(lambda: relay.relay.counts.strangers >= 22, "the oldest to be dropped", LONG)
        finally:
            for s in crowd:
                s.close()


def test_a_crowd_from_one_address_drops_only_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.links.relay.server.KNOCKING", 8)
    try:
        with socket.create_server(("127.0.0.2", 0)):
            pass
    except OSError:
        pytest.skip("this system has one loopback address")
    request = Request(Role.LISTEN, b"n" * handshake.NAME, b"i" * handshake.INSTANCE)
    with Running() as relay, socket.create_connection(("127.0.0.1", relay.port), timeout=LONG) as slow:
        hello = slow.recv(handshake.HELLO, socket.MSG_WAITALL)
        crowd = [
            socket.create_connection(("127.0.0.1", relay.port), LONG, ("127.0.0.2", 0)) for _ in range(30)
        ]
        until(lambda: relay.relay.counts.strangers >= 23, "the crowd's oldest to be dropped", LONG)
        asking = handshake.ask(handshake.access_key(TOKEN), hello, b"x" * handshake.NONCE, request)
        slow.sendall(asking)
        said = slow.recv(handshake.ANSWER, socket.MSG_WAITALL)
        assert handshake.answered(handshake.access_key(TOKEN), hello, asking, said) == Answer(Verdict.WAITING)
        for s in crowd:
            s.close()


def test_one_address_has_a_share_of_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.links.relay.server.KNOCKING_EACH", 4)
    with Running() as relay:
        crowd = [socket.create_connection(("127.0.0.1", relay.port)) for _ in range(10)]
        until(lambda: relay.relay.counts.strangers == 6, "the oldest to be dropped", LONG)
        for s in crowd:
            s.close()


def test_silence_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.links.relay.server.HANDSHAKE", 0.3)
    with Running() as relay, socket.create_connection(("127.0.0.1", relay.port), timeout=LONG) as s:
        s.sendall(handshake.MAGIC)
        while s.recv(4096):
            pass
        until(lambda: relay.relay.counts.strangers == 1, "the count", LONG)


def test_a_full_relay_says_so() -> None:
    with Running(max_connections=1) as relay:
        refused = pytest.raises(LinkError, match=r"no room .*--max-connections")
        with refused, mesh(relay, world=3, connect_timeout=1.5):
            pass
        assert relay.relay.counts.turned_away > 0


def test_the_handshake_proves_both_ends_and_every_bit_counts() -> None:
    key, hello = handshake.access_key(TOKEN), handshake.MAGIC + bytes(32)
    request = Request(Role.DIAL, bytes(32), bytes(16))
    asking = handshake.ask(key, hello, bytes(range(32)), request)
    assert handshake.asked(key, hello, asking) == request
    assert handshake.asked(key, handshake.MAGIC + bytes([1]) * 32, asking) is None  # replayed
    matched = Answer(Verdict.MATCHED, bytes(range(16)))
    answer = handshake.answer(key, hello, asking, matched)
    assert handshake.answered(key, hello, asking, answer) == matched
    for i in range(len(asking)):
        changed = bytes([*asking[:i], asking[i] ^ 1, *asking[i + 1 :]])
        if i < len(handshake.MAGIC):
            with pytest.raises(PayloadError):
                handshake.asked(key, hello, changed)
        else:
            assert handshake.asked(key, hello, changed) is None
    for i in range(1, len(answer)):
        changed = bytes([*answer[:i], answer[i] ^ 1, *answer[i + 1 :]])
        assert handshake.answered(key, hello, asking, changed) is None
    forged = bytes([Verdict.WAITING]) + answer[1:]
    assert handshake.answered(key, hello, asking, forged) is None
