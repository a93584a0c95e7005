"""Ranks that meet at a relay: who gets in, what passes it, and what it costs."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from launchers import free_port, until
from relayed import LONG, TOKEN, Running, exchange, mesh
from tcp_proxy import DOWN, UP, TcpProxy
from waiting import threads

from thinwire.links import ZmqLink, connect_mesh
from thinwire.links.address import Route
from thinwire.links.relay import handshake
from thinwire.links.relay.handshake import Request, Role, Verdict, relay_pass
from thinwire.links.relay.tunnel import Tunnel
from thinwire.types import AuthError, InputError, LinkError
from thinwire.uses.training.run.options import TrainConfig

MARK = b"the words that nobody between the ranks may read " * 20


class Tapped(TcpProxy):
    """A proxy that keeps what passes."""

    def __init__(self, target: int) -> None:
        self.seen = {UP: bytearray(), DOWN: bytearray()}
        super().__init__(target)

    def _counted(self, data: bytes, way: str) -> bytes:
        self.seen[way] += data
        return super()._counted(data, way)


def test_three_ranks_meet_without_a_store_and_nothing_is_left() -> None:
    before = threads()
    with Running() as relay:
        with mesh(relay, world=3) as ranks:
            for me, peers in enumerate(ranks):
                assert sorted(peers) == [r for r in range(3) if r != me]
                for other, peer in peers.items():
                    assert peer.name == f"rank {other} (relay 127.0.0.1:{relay.port})"
                    peer.mailbox.send(b"hello", b"%d to %d" % (me, other), "forward")
            for me, peers in enumerate(ranks):
                for other, peer in peers.items():
                    assert peer.mailbox.get(b"hello", LONG, "hello") == b"%d to %d" % (other, me)
            exchange(ranks)
        until(lambda: len(relay.lines) == 3, "a line for each pair", LONG)
        counts = relay.relay.counts
        assert (counts.pairs, counts.refused, counts.strangers) == (3, 0, 0)
        assert counts.nbytes > 6 * 300_000
    assert all(line.startswith("pair ") and "127.0.0.1 sent " in line for line in relay.lines)
    assert threads() <= before


def test_only_ciphertext_passes_the_relay_and_little_else() -> None:
    with Running() as relay, Tapped(relay.port) as tap:
        with mesh(tap) as ranks:
            ranks[0][1].mailbox.send(b"m", MARK, "forward")
            ranks[1][0].mailbox.send(b"m", MARK, "backward")
            assert ranks[1][0].mailbox.get(b"m", LONG, "m") == MARK
            assert ranks[0][1].mailbox.get(b"m", LONG, "m") == MARK
            meters = [ranks[0][1].meter.snapshot(), ranks[1][0].meter.snapshot()]
        passed = sum(map(len, tap.seen.values()))
    metered = sum(m.sent_bytes for m in meters)
    assert metered > 2 * len(MARK)
    for seen in tap.seen.values():
        assert MARK[:49] not in seen
        assert TOKEN not in seen
        assert relay_pass(TOKEN).encode() not in seen
    # each byte passes the tap twice; the rest is handshakes, heartbeats and farewells since
    assert 2 * metered < passed < 2 * metered + 20_000


def test_the_kernel_s_counters_are_those_of_the_way_to_the_relay() -> None:
    with Running() as relay, mesh(relay) as ranks:
        counted = ranks[0][1].kernel.read()
        if counted is None:
            pytest.skip("this system has no TCP_INFO")
        exchange(ranks, n=4)
        counted, metered = ranks[0][1].kernel.read(), ranks[0][1].meter.snapshot()
        assert counted is not None and counted.connections == 1
        assert counted.received == pytest.approx(metered.received_bytes, rel=0.05)
        assert counted.sent - counted.retransmitted == pytest.approx(metered.sent_bytes, rel=0.05)


def test_an_operator_with_the_pass_admits_the_ranks_and_cannot_stand_in_for_one() -> None:
    """All that an operator has: the pass, and the names that the ranks have asked for."""
    secret = relay_pass(TOKEN).encode()
    with Running(secret) as relay:
        at = f"127.0.0.1:{relay.port}"
        with mesh(relay) as ranks:
            exchange(ranks)
        with pytest.raises(InputError, match="pass of a relay, not the token"):
            connect_mesh(0, 2, None, token=secret, relay=at)
        with ThreadPoolExecutor(1) as pool:
            victim = pool.submit(connect_mesh, 0, 2, None, token=TOKEN, relay=at, connect_timeout=2.5)
            name = handshake.pair_name(TOKEN, "", 0, 1)
            request = Request(Role.DIAL, name, bytes(handshake.INSTANCE))
            tunnel = Tunnel(Route.parse(at), handshake.access_key(secret), request, "the victim")
            tunnel.wait()  # the relay puts it through: the pass is for that
            link = ZmqLink.connect(name.hex().encode(), "127.0.0.1", tunnel.port, token=secret)
            link.send(b"let me in")
            with pytest.raises(AuthError, match="token"):
                victim.result(LONG)
            assert not link.connected
            link.close(0.0)
            tunnel.close(0.0)


def test_a_wrong_token_at_the_relay_is_an_auth_error_at_once() -> None:
    with Running(b"another secret") as relay:
        for rank in range(2):
            start = time.monotonic()
            with pytest.raises(AuthError, match=rf"relay 127\.0\.0\.1:{relay.port} .*same token"):
                connect_mesh(rank, 2, None, token=TOKEN, relay=f"127.0.0.1:{relay.port}")
            assert time.monotonic() - start < 20
        assert relay.relay.counts.refused == 2


def test_an_impostor_of_a_relay_is_an_auth_error() -> None:
    """Somebody who listens at the relay's address and says yes to everyone, without the key."""
    listener = socket.create_server(("127.0.0.1", 0))

    def pretend() -> None:
        with listener.accept()[0] as s:
            s.sendall(handshake.MAGIC + bytes(handshake.NONCE))
            s.recv(handshake.ASKING, socket.MSG_WAITALL)
            s.sendall(bytes([Verdict.WAITING]) + bytes(handshake.ANSWER - 1))

    thread = threading.Thread(target=pretend)
    thread.start()
    with listener, pytest.raises(AuthError, match="same token"):
        connect_mesh(0, 2, None, token=TOKEN, relay=f"127.0.0.1:{listener.getsockname()[1]}")
    thread.join(LONG)


def test_a_relay_that_is_not_there_and_a_rank_that_does_not_come_are_told_apart() -> None:
    nobody = free_port()
    with pytest.raises(LinkError, match=rf"relay 127\.0\.0\.1:{nobody} cannot be reached: .*refused"):
        connect_mesh(0, 2, None, token=TOKEN, relay=f"127.0.0.1:{nobody}", connect_timeout=0.5)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(LinkError, match="no thinwire relay"),
    ):
        at = f"127.0.0.1:{silent.getsockname()[1]}"
        connect_mesh(1, 2, None, token=TOKEN, relay=at, connect_timeout=0.5)
    with Running() as relay:
        for rank in range(2):
            with pytest.raises(
                LinkError,
                match=rf"rank {1 - rank} \(relay 127\.0\.0\.1:{relay.port}\) did not .* within 0\.8 s",
            ):
                connect_mesh(rank, 2, None, token=TOKEN, relay=f"127.0.0.1:{relay.port}", connect_timeout=0.8)


@pytest.mark.parametrize("relay", ["", "host:x", "host:70000", ":7000", "a b:7000", "/run"])
def test_a_relay_s_address_that_cannot_be_read(relay: str) -> None:
    with pytest.raises(InputError, match=r"write it like 192\.0\.2\."):
        connect_mesh(0, 2, None, token=TOKEN, relay=relay)


def test_a_link_through_a_relay_needs_a_token() -> None:
    with pytest.raises(InputError, match="THINWIRE_TOKEN"):
        connect_mesh(0, 2, None, relay="127.0.0.1:7000")
    with pytest.raises(InputError, match="pass one to connect_mesh"):
        connect_mesh(0, 2, None)


def test_options_are_checked_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THINWIRE_TOKEN", raising=False)
    with pytest.raises(InputError, match="THINWIRE_TOKEN"):
        TrainConfig(relay="127.0.0.1:7000")
    monkeypatch.setenv("THINWIRE_TOKEN", TOKEN.decode())
    assert TrainConfig(relay="127.0.0.1:7000/second", host="0.0.0.0").relay is not None
    with pytest.raises(InputError, match="write it like"):
        TrainConfig(relay="127.0.0.1:none")


def test_addresses() -> None:
    assert Route.parse("[::1]:7001/a") == Route("::1", 7001, "a")
    assert str(Route.parse("[::1]:7001/a")) == "relay [::1]:7001"
    assert Route.parse("relay.example.org") == Route("relay.example.org", 7000, "")
