"""Ranks that only dial out, through a real relay on loopback: what passes, what is refused, what heals."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from launchers import cold, free_port, listening, metrics, reached, record, sentence, until, warm
from tcp_proxy import DOWN, UP, TcpProxy
from texts import write_text
from thinwire.lab.config import TrainConfig
from thinwire.links import Peer, ZmqLink, connect_mesh, handshake
from thinwire.links.address import Route
from thinwire.links.handshake import Request, Role, Verdict, relay_pass
from thinwire.links.relay import Relay
from thinwire.links.tunnel import Tunnel
from thinwire.types import AuthError, InputError, LinkError, PayloadError

TOKEN = b"a shared secret, long and random"
MARK = b"the words that nobody between the ranks may read " * 20
LONG = 60.0


class Running:
    """A relay in a thread of this process."""

    def __init__(self, secret: bytes = TOKEN, port: int = 0, **options: Any) -> None:
        self.lines: list[str] = []
        self.relay = Relay(secret, say=self.lines.append, **options)
        self._loop, self._stop, self._up = asyncio.new_event_loop(), asyncio.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(port,))
        self._thread.start()
        assert self._up.wait(LONG)

    def _run(self, port: int) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self.relay.serve("127.0.0.1", port, self._stop, self._started))

    def _started(self, port: int) -> None:
        self.port = port
        self._up.set()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(LONG)
        assert not self._thread.is_alive()

    stop = __exit__


@contextmanager
def mesh(where: Any, world: int = 2, token: bytes = TOKEN, **options: Any) -> Iterator[list[dict[int, Peer]]]:
    options = {"connect_timeout": LONG, "deadline": 30.0} | options
    at = where if isinstance(where, str) else f"127.0.0.1:{where.port}"
    with ThreadPoolExecutor(8) as pool:
        made = [
            pool.submit(connect_mesh, r, world, None, token=token, relay=at, **options) for r in range(world)
        ]
        ranks = [m.result(2 * LONG) for m in made]
        try:
            yield ranks
        finally:
            for peer in [p for r in ranks for p in r.values()]:
                pool.submit(peer.close)


def exchange(ranks: list[dict[int, Peer]], n: int = 3, size: int = 300_000, tag: bytes = b"x") -> None:
    """Send ``n`` messages each way between ranks 0 and 1 and check what arrives."""
    a, b = ranks[0][1].mailbox, ranks[1][0].mailbox
    for i in range(n):
        a.send(tag, bytes([i]) * size, "forward")
        b.send(tag, bytes([100 + i]) * size, "backward")
    for i in range(n):
        assert b.get(tag, LONG, "forward") == bytes([i]) * size
        assert a.get(tag, LONG, "backward") == bytes([100 + i]) * size


class Tapped(TcpProxy):
    """A proxy that keeps what passes."""

    def __init__(self, target: int) -> None:
        self.seen = {UP: bytearray(), DOWN: bytearray()}
        super().__init__(target)

    def _counted(self, data: bytes, way: str) -> bytes:
        self.seen[way] += data
        return super()._counted(data, way)


def test_three_ranks_meet_without_a_store_and_nothing_is_left() -> None:
    before = threading.active_count()
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
    assert threading.active_count() == before


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
            victim = pool.submit(connect_mesh, 0, 2, None, token=TOKEN, relay=at, connect_timeout=4.0)
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
            s.sendall(bytes([Verdict.WAITING]) + bytes(handshake.PROOF))

    thread = threading.Thread(target=pretend)
    thread.start()
    with listener, pytest.raises(AuthError, match="same token"):
        connect_mesh(0, 2, None, token=TOKEN, relay=f"127.0.0.1:{listener.getsockname()[1]}")
    thread.join(LONG)


def test_a_relay_that_is_not_there_and_a_rank_that_does_not_come_are_told_apart() -> None:
    nobody = free_port()
    with pytest.raises(LinkError, match=rf"relay 127\.0\.0\.1:{nobody} cannot be reached: .*refused"):
        connect_mesh(0, 2, None, token=TOKEN, relay=f"127.0.0.1:{nobody}", connect_timeout=1.0)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(LinkError, match="no thinwire relay"),
    ):
        at = f"127.0.0.1:{silent.getsockname()[1]}"
        connect_mesh(1, 2, None, token=TOKEN, relay=at, connect_timeout=1.0)
    with Running() as relay:
        for rank in range(2):
            with pytest.raises(
                LinkError,
                match=rf"rank {1 - rank} \(relay 127\.0\.0\.1:{relay.port}\) did not .* within 1\.5 s",
            ):
                connect_mesh(rank, 2, None, token=TOKEN, relay=f"127.0.0.1:{relay.port}", connect_timeout=1.5)


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


# -- faults


def test_a_cut_and_a_stall_on_the_way_to_the_relay_heal() -> None:
    """Both ranks lose the relay for a while, then only hear nothing; no message is lost or doubled."""
    with Running() as relay, TcpProxy(relay.port) as proxy, mesh(proxy) as ranks:
        exchange(ranks)
        first = proxy.connections
        proxy.cut()
        a, b = ranks[0][1].mailbox, ranks[1][0].mailbox
        a.send(b"during", b"1" * 100_000, "forward")
        b.send(b"during", b"2" * 100_000, "backward")
        time.sleep(1.0)
        proxy.restore()
        assert b.get(b"during", LONG, "during") == b"1" * 100_000
        assert a.get(b"during", LONG, "during") == b"2" * 100_000
        assert proxy.connections > first
        proxy.stall()
        time.sleep(2.0)
        proxy.resume()
        exchange(ranks, tag=b"after")


def test_a_relay_that_comes_back_at_its_address_heals() -> None:
    with Running() as relay, mesh(relay) as ranks:
        exchange(ranks)
        relay.stop()
        time.sleep(1.0)
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
    monkeypatch.setattr("thinwire.links.tunnel.MATCH", 0.0)
    monkeypatch.setattr("thinwire.links.tunnel.CONNECT", 0.0)
    monkeypatch.setattr(Tunnel, "_run", lambda self: (stuck.wait(LONG), self._loop.close()))
    request = Request(Role.DIAL, b"n" * handshake.NAME, b"i" * handshake.INSTANCE)
    tunnel = Tunnel(
        Route.parse("127.0.0.1:7000"), b"k", request, "rank 1 (relay 127.0.0.1:7000)", timeout=0.2
    )
    threading.Timer(1.0, stuck.set).start()
    with pytest.raises(LinkError, match=r"rank 1 \(relay 127.0.0.1:7000\) did not open within 0.2 s"):
        tunnel.wait()


def test_a_relay_that_is_gone_is_named_within_the_deadline() -> None:
    with Running() as relay, mesh(relay, deadline=3.0) as ranks:
        exchange(ranks)
        relay.stop()
        start = time.monotonic()
        for peer in (ranks[0][1], ranks[1][0]):
            with pytest.raises(
                LinkError, match=rf"relay 127\.0\.0\.1:{relay.port}\) has not answered for 3 s"
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
                connect_mesh(rank, 2, None, token=TOKEN, relay=f"127.0.0.1:{relay.port}", connect_timeout=1.5)
        exchange(ranks)
        assert ranks[0][1].reliable.resent == 0


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
    monkeypatch.setattr("thinwire.links.relay.KNOCKING", 8)
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
    monkeypatch.setattr("thinwire.links.relay.KNOCKING", 8)
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
        assert handshake.answered(handshake.access_key(TOKEN), hello, asking, said) is Verdict.WAITING
        for s in crowd:
            s.close()


def test_one_address_has_a_share_of_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.links.relay.KNOCKING_EACH", 4)
    with Running() as relay:
        crowd = [socket.create_connection(("127.0.0.1", relay.port)) for _ in range(10)]
        until(lambda: relay.relay.counts.strangers == 6, "the oldest to be dropped", LONG)
        for s in crowd:
            s.close()


def test_silence_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.links.relay.HANDSHAKE", 0.3)
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
    answer = handshake.answer(key, hello, asking, Verdict.MATCHED)
    assert handshake.answered(key, hello, asking, answer) is Verdict.MATCHED
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


# -- the command, and a run


def relay_process(place: Path, *arguments: Any, **more: Any) -> tuple[Any, int]:
    """Start ``thinwire relay`` and return it and its port."""
    command = cold(
        place, sys.executable, "-m", "thinwire", "relay", "--host", "127.0.0.1", *arguments, **more
    )
    until(lambda: "relay listens at" in command.err or command.poll() is not None, "the relay", LONG)
    assert command.poll() is None, command.err
    line = next(line for line in command.err.splitlines() if "listens at" in line)
    return command, int(line.rpartition(":")[2])


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_told_to_end(tmp_path: Path, how: signal.Signals) -> None:
    command, port = relay_process(tmp_path, "--port", 0, THINWIRE_TOKEN=TOKEN.decode())
    try:
        with mesh(f"127.0.0.1:{port}") as ranks:
            exchange(ranks)
            command.signal(how)
            assert command.wait(LONG) == 0
    finally:
        if command.poll() is None:
            command.signal(signal.SIGKILL)
    assert "relay ended: 3 connections, 1 passed on" in command.err
    assert command.out == ""


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        ((), {}, "THINWIRE_TOKEN"),
        (("--port", 70000), {"THINWIRE_TOKEN": "x"}, "--port is 70000"),
        (("--max-connections", 1), {"THINWIRE_TOKEN": "x"}, "--max-connections is 1"),
        (("--host", "192.0.2.1"), {"THINWIRE_TOKEN": relay_pass(b"x")}, "cannot listen at 192.0.2.1:7000"),
        (("--show-pass",), {"THINWIRE_TOKEN": relay_pass(b"x")}, "a pass already"),
    ],
)
def test_bad_input_is_one_sentence(
    tmp_path: Path, arguments: tuple[Any, ...], environment: dict[str, str], words: str
) -> None:
    command = warm().run(tmp_path, "relay", *arguments, **environment)
    assert command.code == 2
    assert words in sentence(command)


def test_show_pass_prints_the_pass_alone(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(TOKEN + b"\n")
    command = warm().run(tmp_path, "relay", "--show-pass", "--token-file", file)
    assert (command.code, command.out, command.err) == (0, relay_pass(TOKEN) + "\n", "")


def test_a_rank_number_that_is_none(tmp_path: Path) -> None:
    job = (
        "train",
        "--relay",
        "127.0.0.1:7000",
        "--model",
        "gpt2-lab",
        "--data",
        write_text(tmp_path / "text"),
    )
    command = warm().run(tmp_path, *job, RANK="first", WORLD_SIZE=2, THINWIRE_TOKEN=TOKEN.decode())
    assert command.code == 2
    assert "RANK is 'first'" in sentence(command)


@pytest.mark.slow
def test_a_run_through_a_relay_needs_no_address_of_any_rank(tmp_path: Path) -> None:
    """Two ranks with RANK and WORLD_SIZE alone; the losses are those of a run on one machine."""
    text = write_text(tmp_path / "text.txt")
    job = ["train", "--model", "gpt2-lab", "--data", text, "--batch", 4, "--microbatches", 2, "--seq", 32]
    job += ["--steps", 4, "--epochs", 2, "--eval-samples", 4, "--threads", 1, "--dtype", "fp32"]
    job += ["--no-save-model", "--quiet", "--no-tensorboard"]
    plain = warm().run(tmp_path / "plain", *job, "--out", tmp_path / "plain" / "out")
    assert plain.code == 0, plain.err
    relay, port = relay_process(tmp_path / "relay", "--port", 0, THINWIRE_TOKEN=relay_pass(TOKEN))
    try:
        ranks = [
            warm().start(
                tmp_path / f"rank-{rank}",
                *(*job, "--relay", f"127.0.0.1:{port}", "--out", tmp_path / f"out-{rank}"),
                RANK=rank,
                WORLD_SIZE=2,
                THINWIRE_TOKEN=TOKEN.decode(),
            )
            for rank in range(2)
        ]
        reached(tmp_path / "out-0", 1, *ranks)
        for r in ranks:
            assert r.poll() is not None or set(listening(r.pid)) <= {"0100007F"}, (
                "a rank listens off loopback"
            )
        assert [r.wait() for r in ranks] == [0, 0], ranks[0].err + ranks[1].err
    finally:
        relay.signal(signal.SIGTERM)
    assert relay.wait(LONG) == 0
    assert "1 passed on" in relay.err
    out = tmp_path / "out-0"
    assert len(metrics(out)) == 4
    assert record(out)["loss"] == record(tmp_path / "plain" / "out")["loss"]


# -- networks that have no way to each other

RANK = """
import os, socket, sys
from thinwire.links import connect_mesh, read_token
rank, relay, other = int(sys.argv[1]), sys.argv[2], sys.argv[3]
try:
    socket.create_connection((other, 7000), timeout=2)
    print("reached", end=" ")
except ConnectionRefusedError:
    print("refused by the other rank itself", end=" ")
except OSError:
    pass
peers = connect_mesh(rank, 2, None, token=read_token(), relay=relay)
box = peers[1 - rank].mailbox
box.send(b"x", bytes([rank]) * 300_000, "forward")
got = box.get(b"x", 60.0, "the body")
peers[1 - rank].close()
print(len(got), got[0])
"""


def inside(space: str, *command: Any) -> list[str]:
    return ["ip", "netns", "exec", space, *map(str, command)]


@pytest.fixture
def islands() -> Iterator[tuple[str, list[str]]]:
    """Yield a network namespace for the relay, and two that reach it and not each other."""
    middle, *ends = spaces = [f"thinwire-test-{os.getpid()}-{i}" for i in range(3)]
    try:
        for space in spaces:
            ip("netns", "add", space)
        forwarding = "/proc/sys/net/ipv4/ip_forward"  # the host's setting is inherited
        subprocess.run(inside(middle, "sh", "-c", f"echo 0 > {forwarding}"), check=True, capture_output=True)
        for i, end in enumerate(ends):
            ip("link", "add", f"r{i}", "netns", middle, "type", "veth", "peer", "name", "e", "netns", end)
            ip("-n", middle, "addr", "add", f"10.77.{i}.1/24", "dev", f"r{i}")
            ip("-n", middle, "link", "set", f"r{i}", "up")
            ip("-n", end, "addr", "add", f"10.77.{i}.2/24", "dev", "e")
            ip("-n", end, "link", "set", "e", "up")
            ip("-n", end, "link", "set", "lo", "up")
            ip("-n", end, "route", "add", "default", "via", f"10.77.{i}.1")
        yield middle, ends
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"network namespaces are not to be had here: {e}")
    finally:
        for space in spaces:
            with suppress(OSError):
                subprocess.run(["ip", "netns", "del", space], capture_output=True)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def test_ranks_in_networks_without_a_way_to_each_other(
    islands: tuple[str, list[str]], tmp_path: Path
) -> None:
    """The middle machine does not forward packets, so only connections to the relay itself can be made."""
    middle, ends = islands
    secret = {"THINWIRE_TOKEN": TOKEN.decode()}
    relay = cold(tmp_path, *inside(middle, sys.executable, "-m", "thinwire", "relay"), **secret)
    try:
        until(
            lambda: "relay listens at 0.0.0.0:7000" in relay.err or relay.poll() is not None,
            "the relay",
            LONG,
        )
        ranks = []
        for i, end in enumerate(ends):
            program = (sys.executable, "-c", RANK, i, f"10.77.{i}.1:7000", f"10.77.{1 - i}.2")
            ranks.append(cold(tmp_path / str(i), *inside(end, *program), **secret))
        assert [r.wait(2 * LONG) for r in ranks] == [0, 0], ranks[0].err + ranks[1].err
        assert [r.out for r in ranks] == ["300000 1\n", "300000 0\n"]
    finally:
        relay.signal(signal.SIGTERM)
        relay.wait(LONG)
