"""The link between two machines, measured by doctor from both ends, and what blocks it."""

from __future__ import annotations

import itertools
import signal
import socket
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from commanded import invoke
from listeners import HERE, LONG, TOKEN, knocking, listening, listening_process
from torch.distributed import HashStore

from thinwire.links import LinkShape, ZmqLink, sockets
from thinwire.links.mesh import connect_mesh
from thinwire.links.names import resolve
from thinwire.links.security import SIGNATURE
from thinwire.runs.machine import network
from thinwire.types import AuthError, InputError, LinkError
from thinwire.uses.doctor.run import linktest
from thinwire.uses.doctor.run.linktest import dial, listen


def _refused_port() -> int:
    with socket.create_server((HERE, 0)) as s:
        return int(s.getsockname()[1])


@pytest.mark.serial
def test_the_rates_and_the_round_trip_of_a_shaped_link_are_measured() -> None:
    out, back = LinkShape.parse("20mbit,20ms"), LinkShape.parse("4mbit,10ms")
    with listening(shape=back) as (port, _, served):
        seen = dial(HERE, port, TOKEN, seconds=2.0, shape=out)
        served.result(LONG)
    assert out.rate and back.rate
    assert seen.out.rate == pytest.approx(out.rate, rel=0.1)
    assert seen.back.rate == pytest.approx(back.rate, rel=0.1)
    assert 0.03 <= seen.rtt <= 0.04 and seen.rtt <= seen.median_rtt < 0.15
    assert seen.shape(seen.out).rate == pytest.approx(seen.out.rate, rel=0.01)
    links = tomllib.loads(seen.fragment())["link"]
    assert [(row["from"], row["to"]) for row in links] == [
        (links[1]["to"], links[0]["to"]),
        (links[0]["to"], links[1]["to"]),
    ]
    assert LinkShape.parse(links[1]["link"]) == seen.shape(seen.back)
    if sys.platform == "linux":
        assert seen.out.congestion and seen.back.congestion and seen.out.loaded_rtt is not None
        assert seen.out.retransmitted is not None and 0 <= seen.out.retransmitted < 0.5


@pytest.mark.serial
def test_a_listener_serves_one_peer_after_another_and_survives_bad_ones() -> None:
    with listening_process() as (port, lines, process):
        dial(HERE, port, TOKEN, seconds=0.5)
        assert next(line for line in lines if line.startswith("measured"))  # perhaps at the second try
        assert next(line for line in lines if line.startswith("listening")).endswith(f":{port}\n")
        with socket.create_connection((HERE, port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        bad = knocking(port, TOKEN)
        bad.mailbox.send(linktest.HELLO, b"not JSON")
        assert next(line for line in lines if "failed" in line).endswith(
            "sent something else than the greeting\n"
        )
        bad.close()
        assert next(line for line in lines if line.startswith("listening"))
        assert dial(HERE, port, TOKEN, seconds=2.0).out.rate > 0  # in less, a busy one counts nothing
        process.send_signal(signal.SIGINT)
        assert process.wait(LONG) == 0
        assert "stopped listening" in "".join(lines)


def test_a_second_peer_is_told_and_does_not_disturb_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linktest, "ALIVE", 1.0)
    with listening() as (port, _, served):
        first = knocking(port, TOKEN)
        first.mailbox.send(linktest.HELLO, b'{"name": "first", "settings": {}}')
        first.mailbox.get(linktest.HELLO, LONG, "the greeting")
        with pytest.raises(LinkError, match="busy with another peer"):
            dial(HERE, port, TOKEN, 0.5)
        first.mailbox.send(linktest.ECHO, b"")
        first.mailbox.get(linktest.ECHO, LONG, "an echo")
        first.mailbox.send(linktest.DO, b'{"end": 0}').result(LONG)
        served.result(LONG)
        first.close()


@pytest.mark.serial
def test_a_line_too_slow_for_the_test_ends_it_with_the_peer_s_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as (port, _, served):
        peer = knocking(port, TOKEN, LinkShape(rate=4e3))  # bytes/s: the first train alone takes two seconds
        monkeypatch.setattr(linktest, "DEADLINE", 1.0)
        with pytest.raises(LinkError, match=rf"^waited 1 s for the acknowledgement .* from .*{port}"):
            linktest._measure(peer, 0.5)
        peer.close(LONG)
        with pytest.raises(LinkError):
            served.result(LONG)


def test_nothing_listens() -> None:
    port = _refused_port()
    with pytest.raises(
        LinkError, match=rf"^nothing listens at {HERE}:{port} .*doctor --listen there.*loopback"
    ):
        dial(HERE, port, TOKEN)


def test_the_name_is_unknown() -> None:
    with pytest.raises(LinkError, match=r"^the name 'no\.such\.invalid' cannot be resolved; check"):
        dial("no.such.invalid", 7100, TOKEN)


@contextmanager
def _stranger(*greetings: bytes) -> Iterator[int]:
    """Say one thing to each that comes, the last one to all others too."""
    with socket.create_server((HERE, 0)) as s:

        def serve() -> None:
            for greeting in itertools.chain(greetings, itertools.repeat(greetings[-1])):
                try:
                    taken, _ = s.accept()
                except OSError:
                    return
                with taken, suppress(OSError):
                    taken.sendall(greeting)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield s.getsockname()[1]
        finally:
            s.shutdown(socket.SHUT_RDWR)  # which wakes accept
            thread.join(LONG)


@pytest.mark.parametrize("greeting", [b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 400 Bad Request\r\n" * 9, b""])
def test_something_else_listens(greeting: bytes) -> None:
    with (
        _stranger(greeting) as port,
        pytest.raises(LinkError, match=rf"{HERE}:{port}.*(not thinwire|at once)"),
    ):
        dial(HERE, port, TOKEN)


def test_a_listener_that_opens_its_port_anew_is_asked_again() -> None:
    greeting = SIGNATURE + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    with _stranger(b"", greeting) as port:
        network.check_listener(HERE, port, has_token=True)
    with _stranger(b"", b"", greeting) as port, pytest.raises(LinkError, match=r"not thinwire|at once"):
        network.check_listener(HERE, port, has_token=True)


def test_a_host_to_listen_at_is_this_machine_s() -> None:
    for own in (HERE, "localhost", "0.0.0.0", "lo", f"[{HERE}]"):
        network.check_own(own)
    with pytest.raises(InputError, match=r"cannot listen at --host 192\.0\.2\.7 \(.*; give an address"):
        network.check_own("192.0.2.7")
    with pytest.raises(InputError, match=r"--host nosuch\.invalid: this name cannot be resolved"):
        network.check_own("nosuch.invalid")


@pytest.mark.parametrize("name", ["localhost", "box.lan"])
def test_a_name_of_this_machine_s_can_be_listened_at(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    known = {"localhost": HERE, "box.lan": "0.0.0.0"}
    monkeypatch.setattr(sockets, "resolve", lambda host: resolve(known[host]))
    link = ZmqLink.bind(b"a", name, token=TOKEN)
    with socket.create_connection((HERE, link.port), 2):
        link.close()


def test_a_name_that_leads_nowhere_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "resolve", lambda _: resolve("127.0.1.1"))  # as Debian has it
    with pytest.raises(InputError, match=r"^box is 127\.0\.1\.1 here, where no other machine comes; give"):
        ZmqLink.bind(b"a", "box", token=TOKEN)


def test_an_interface_is_no_address_for_others() -> None:
    with pytest.raises(InputError, match="others cannot reach lo; also say by which address"):
        connect_mesh(0, 2, HashStore(), host="lo", token=TOKEN)


def test_a_silent_listener_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "GREET", 0.2)
    monkeypatch.setattr(network, "CONNECT", 0.5)
    with socket.create_server((HERE, 0)) as s, pytest.raises(LinkError, match="no answer from"):
        dial(HERE, s.getsockname()[1], TOKEN)


def test_a_wrong_token_and_none_at_one_end() -> None:
    with listening() as (port, _, _):
        with pytest.raises(AuthError, match="token"):
            dial(HERE, port, b"another token")
        with pytest.raises(AuthError, match="the listener has a token and this end has none"):
            dial(HERE, port, None)
    with listening(token=None) as (port, _, _), pytest.raises(AuthError, match="this end has a token"):
        dial(HERE, port, TOKEN)


def test_a_rank_of_a_run_is_no_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linktest, "ALIVE", 1.0)
    link = ZmqLink.bind(b"another name", HERE, token=TOKEN)
    try:
        with pytest.raises(LinkError, match="does not answer as thinwire doctor --listen"):
            dial(HERE, link.port, TOKEN)
    finally:
        link.close()


def test_an_address_off_loopback_needs_a_token() -> None:
    with pytest.raises(InputError, match="needs a shared token"):
        dial("192.0.2.1", 7100, None)
    with pytest.raises(InputError, match="needs a shared token"):
        listen("0.0.0.0", 0, None, once=True)


@pytest.mark.parametrize(
    "options, code, words",
    [
        (["--listen", "--peer", "x"], 2, "give one of them"),
        (["--listen", "--port", "70000"], 2, "--port is 70000"),
        (["--peer", "host:0"], 2, "is not HOST or HOST:PORT"),
        (["--peer", "[::1"], 2, "is not HOST or HOST:PORT"),
        (["--peer", HERE, "--seconds", "99"], 2, "--seconds is 99"),
        (["--listen"], 2, "needs a shared token"),
        (["--peer", "no.such.invalid"], 2, "needs a shared token"),
        (["--peer", "no.such.invalid", "--token-file", "TOKEN"], 3, "cannot be resolved"),
    ],
)
def test_one_sentence_and_the_exit_code(
    options: list[str], code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "TOKEN").write_bytes(TOKEN)
    monkeypatch.chdir(tmp_path)
    result = invoke("doctor", *options)
    last = result.stderr.strip().splitlines()[-1]
    assert result.exit_code == code
    assert words in last and last.startswith("thinwire: ")
