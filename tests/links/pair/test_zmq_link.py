"""The ZeroMQ link: order, authentication, strangers at the port, and nothing left after close."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
from strangers import GREETING, READY, descriptors, throw
from waiting import until

from thinwire.links import ZmqLink, read_token, sockets
from thinwire.links.pair.zmq_link import UNREAD
from thinwire.types import AuthError, InputError, LinkError

LONG = 30.0  # seconds; a limit, not an expectation


@contextmanager
def pair(
    token: bytes | None = None, other: bytes | None = None, timeout: float = LONG
) -> Iterator[tuple[ZmqLink, ZmqLink]]:
    a = ZmqLink.bind(b"n", token=token, peer="rank 1", connect_timeout=timeout)
    b = ZmqLink.connect(b"n", a.host, a.port, token=other, peer="rank 0", connect_timeout=timeout)
    try:
        yield a, b
    finally:
        b.close(0.5)
        a.close(0.5)


@pytest.mark.parametrize("token", [None, b"a shared secret"])
def test_messages_arrive_in_order_both_ways(token: bytes | None) -> None:
    with pair(token, token) as (a, b):
        for sender, receiver in ((a, b), (b, a)):
            sent = [sender.send(bytes([i % 251]) * (i * 37)) for i in range(300)]
            for i in range(300):
                assert receiver.recv().result(LONG) == bytes([i % 251]) * (i * 37)
            assert not wait(sent, LONG).not_done
        assert a.peer == f"rank 1 (127.0.0.1:{a.port})"


def test_what_nobody_asks_for_stays_with_its_sender_but_for_a_little() -> None:
    body = bytes(1 << 20)
    with pair() as (a, b):
        first = a.recv()
        sent = [b.send(body) for _ in range(200)]
        first.result(LONG)
        until(lambda: a._inbox.nbytes >= UNREAD)
        assert not wait(sent, 0.5).done >= set(sent)
        assert a._inbox.nbytes < UNREAD + 2 * len(body)
        came = 1
        while came < len(sent):
            assert a.recv().result(LONG) == body
            came += 1 + len(a.more())
        assert came == len(sent) and not wait(sent, LONG).not_done


@pytest.mark.parametrize(
    ("token", "other", "timeout"),
    [(b"right", b"wrong", 3.0), (b"right", None, 3.0), (None, b"token", 3.0)],
    ids=["wrong", "none", "extra"],
)
def test_without_the_right_token_nothing_is_read_and_both_sides_say_so(
    token: bytes | None, other: bytes | None, timeout: float
) -> None:
    with pair(token, other, timeout) as (a, b):
        got = a.recv()
        refused = b.send(b"secret")
        with pytest.raises(AuthError, match=r"rank 0 .*refused this rank's token: set THINWIRE_TOKEN") as e:
            b.recv().result(LONG)
        assert "\n" not in str(e.value)
        with pytest.raises(LinkError, match=r"rank 1 .*THINWIRE_TOKEN") as lost:
            got.result(LONG)
        # who has none breaks off by itself, and may do so before this end sees more of it than a connection
        assert isinstance(lost.value, AuthError) or None in (token, other)
        assert refused.done()  # taken by the queue or failed, never left open


def test_nobody_there_is_a_link_error_that_names_the_peer() -> None:
    link = ZmqLink.bind(b"n", peer="rank 3", connect_timeout=0.3)
    with pytest.raises(LinkError, match=r"rank 3 \(127.0.0.1:\d+\) did not connect within 0.3 s") as e:
        link.recv().result(LONG)
    assert not isinstance(e.value, AuthError)
    with pytest.raises(LinkError):
        link.send(b"late").result(LONG)
    link.close()


def test_who_only_connects_and_closes_is_no_matter_of_tokens() -> None:
    link = ZmqLink.bind(b"n", peer="rank 3", token=b"t", connect_timeout=0.5)
    for _ in range(3):
        socket.create_connection(("127.0.0.1", link.port)).close()
    with pytest.raises(
        LinkError, match=r"rank 3 .* 0.5 s, and \d connections broke off without a token; if that was it, set"
    ) as e:
        link.recv().result(LONG)
    assert not isinstance(e.value, AuthError)
    link.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "example.org"])
def test_off_loopback_needs_a_token(host: str) -> None:
    with pytest.raises(InputError, match=r"THINWIRE_TOKEN.*--token-file") as e:
        ZmqLink.bind(b"n", host)
    assert host in str(e.value)
    with pytest.raises(InputError, match="THINWIRE_TOKEN"):
        ZmqLink.connect(b"n", host, 4567)


def test_off_loopback_with_a_token_works() -> None:
    token = b"8 or so!"
    with pytest.raises(InputError, match="a token of 7 bytes can be guessed; take 8 or more"):
        ZmqLink.bind(b"n", "0.0.0.0", token=token[1:])
    a = ZmqLink.bind(b"n", "0.0.0.0", token=token, connect_timeout=LONG)
    b = ZmqLink.connect(b"n", "127.0.0.1", a.port, token=token, connect_timeout=LONG)
    b.send(b"hello")
    assert a.recv().result(LONG) == b"hello"
    b.close()
    a.close()


def test_a_port_in_use_is_an_input_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"cannot listen at 127.0.0.1:{port}"):
            ZmqLink.bind(b"n", port=port)


@pytest.mark.parametrize("token", [None, b"t"])
def test_hostile_bytes_at_the_port_do_not_disturb_the_link(token: bytes | None) -> None:
    with pair(token, token) as (a, b):
        b.send(b"before")
        assert a.recv().result(LONG) == b"before"
        noise = random.Random(0).randbytes(500)
        throw(a.port, 10, GREETING + noise, GREETING + READY + b"\x00\x03abc")
        a.send(b"down")
        b.send(b"after")
        assert b.recv().result(LONG) == b"down"
        assert a.recv().result(LONG) == b"after"


@pytest.mark.parametrize("token", [None, b"t"])
def test_a_stranger_who_says_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch, token: bytes | None) -> None:
    assert sockets.HANDSHAKE <= 10.0
    monkeypatch.setattr(sockets, "HANDSHAKE", 0.1)
    with pair(token, token) as (a, _), socket.create_connection(("127.0.0.1", a.port), timeout=3.0) as s:
        while s.recv(64):  # the greeting, then the end
            pass


def test_who_listens_may_have_as_many_descriptors_as_the_system_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resource = pytest.importorskip("resource", reason="no limits on descriptors here")
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 512 if soft == resource.RLIM_INFINITY else soft // 2
    try:
        for most, expected in ((few + 10, few + 10), (few - 10, few)):  # never fewer than there were
            monkeypatch.setattr(sockets, "DESCRIPTORS", most)
            resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
            ZmqLink.bind(b"n").close(0.0)
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (expected, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_stranger_with_another_name_is_not_heard() -> None:
    with pair() as (a, b), zmq.Context() as context:
        b.send(b"one")
        assert a.recv().result(LONG) == b"one"
        with context.socket(zmq.DEALER) as stranger:
            stranger.linger = 1000
            stranger.routing_id = b"stranger"
            stranger.connect(f"tcp://127.0.0.1:{a.port}")
            stranger.send(b"forged")
            stranger.send_multipart([b"for", b"ged"])
        b.send(b"two")
        assert a.recv().result(LONG) == b"two"


def test_a_message_over_the_limit_is_refused_by_the_sender_and_a_frame_by_the_receiver() -> None:
    a = ZmqLink.bind(b"n", connect_timeout=LONG, max_message=1000)
    b = ZmqLink.connect(b"n", a.host, a.port, connect_timeout=LONG)
    with pytest.raises(InputError, match="1001 bytes"):
        a.send(bytes(1001))
    b.send(bytes(2000))
    b.send(b"fits")  # queued; it goes out on the next connection, or was lost with the first
    for _ in range(600):
        b.send(b"again")
        got = a.recv()
        wait([got], 0.1)
        if got.done():
            break
        got.cancel()
    assert got.result(0) in (b"fits", b"again")
    b.close()
    a.close()


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts descriptors in /proc")
@pytest.mark.parametrize("token", [None, b"t"])
def test_close_leaves_no_thread_and_no_descriptor(token: bytes | None) -> None:
    with pair(token, token) as (a, b):  # whatever is made once and kept
        b.send(b"x")
        a.recv().result(LONG)
    threads, before = threading.active_count(), descriptors()
    for _ in range(3):
        with pair(token, token) as (a, b):
            b.send(b"x")
            a.recv().result(LONG)
            waiting = a.recv()
        with pytest.raises(LinkError, match="this end closed"):
            waiting.result(0)
        a.close()  # twice is safe
    assert threading.active_count() <= threads
    assert descriptors() < before + 3  # one a round at least would be left; others open some of their own


def test_token_from_file_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THINWIRE_TOKEN", raising=False)
    assert read_token() is None
    file = tmp_path / "token"
    file.write_bytes(b"from a file\r\n")
    monkeypatch.setenv("THINWIRE_TOKEN", "from the environment\n")
    assert read_token() == b"from the environment"
    assert read_token(file) == b"from a file"
    file.write_bytes(b" \n")
    with pytest.raises(InputError, match="is empty"):
        read_token(file)
    monkeypatch.setenv("THINWIRE_TOKEN", "")
    with pytest.raises(InputError, match="THINWIRE_TOKEN is empty"):
        read_token()
    with pytest.raises(InputError, match="nowhere"):
        read_token(tmp_path / "nowhere")
    file.write_bytes(bytes(100_000))
    with pytest.raises(InputError, match=r"larger than"):
        read_token(file)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_link_that_fails_inside_says_why_and_not_that_this_end_closed_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pair() as (a, b):
        b.send(b"x")
        assert a.recv().result(LONG) == b"x"
        monkeypatch.setattr(a, "_check", lambda: 1 // 0)
        with pytest.raises(
            LinkError, match=r"^the link to rank 1 \(127.0.0.1:\d+\) failed: ZeroDivisionError"
        ):
            a.recv().result(LONG)
        with pytest.raises(LinkError, match="ZeroDivisionError"):
            a.send(b"late").result(LONG)
