"""``doctor --listen`` and ``--peer``: what they measure over loopback, and what they say if nothing comes."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Queue

import pytest
from typer.testing import CliRunner

from thinwire.cli.app import app
from thinwire.lab import linktest, network
from thinwire.lab.emulator.profile import profiles
from thinwire.lab.link_advice import advice
from thinwire.lab.linktest import LinkTest, Machine, Way, dial, listen
from thinwire.lab.machines_file import read_machines
from thinwire.links import LinkShape, Peer, ZmqLink
from thinwire.links.shape import MTU, SEGMENT
from thinwire.types import AuthError, InputError, LinkError, PayloadError

LONG = 60.0
TOKEN = b"a token of the tests"
HERE = "127.0.0.1"
COMMAND = [sys.executable, "-m", "thinwire", "doctor"]


@contextmanager
def _listening(
    token: bytes | None = TOKEN, shape: LinkShape | None = None
) -> Iterator[tuple[int, Queue[str], Future[None]]]:
    said: Queue[str] = Queue()
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(listen, HERE, 0, token, True, shape, said.put)
        port = int(said.get(timeout=LONG).rpartition(":")[2])
        try:
            yield port, said, served
        finally:
            if not served.done():  # nobody came through; who did waits for ``served``
                peer = _knocking(port, token)
                peer.mailbox.send(linktest.HELLO, b'{"name": "end", "settings": {}}')
                peer.mailbox.send(linktest.DO, b'{"end": 0}').result(LONG)
                peer.close()


def _knocking(port: int, token: bytes | None, shape: LinkShape | None = None) -> Peer:
    link = ZmqLink.connect(linktest.NAME, HERE, port, token=token, max_message=1 << 18)
    peer = linktest.stack(0, link, shape or LinkShape(), 0, LONG, LONG)
    peer.reliable.wait_alive(LONG)
    return peer


@contextmanager
def _listening_process() -> Iterator[tuple[int, Iterator[str], subprocess.Popen[str]]]:
    process = subprocess.Popen(
        [*COMMAND, "--listen", "--host", HERE, "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(),
    )
    try:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        port = next(line for line in lines if line.startswith("listening at")).rpartition(":")[2].strip()
        yield int(port), lines, process
    finally:
        process.kill()
        process.communicate()


def _environment() -> dict[str, str]:
    return os.environ | {"THINWIRE_TOKEN": TOKEN.decode()}


def _refused_port() -> int:
    with socket.create_server((HERE, 0)) as s:
        return int(s.getsockname()[1])


def test_the_rates_and_the_round_trip_of_a_shaped_link_are_measured() -> None:
    out, back = LinkShape.parse("20mbit,20ms"), LinkShape.parse("4mbit,10ms")
    with _listening(shape=back) as (port, _, served):
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


def test_a_listener_serves_one_peer_after_another_and_survives_bad_ones() -> None:
    with _listening_process() as (port, lines, process):
        dial(HERE, port, TOKEN, seconds=0.5)
        assert next(line for line in lines if line.startswith("measured"))  # perhaps at the second try
        assert next(line for line in lines if line.startswith("listening")).endswith(f":{port}\n")
        with socket.create_connection((HERE, port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        bad = _knocking(port, TOKEN)
        bad.mailbox.send(linktest.HELLO, b"not JSON")
        assert next(line for line in lines if "failed" in line).endswith(
            "sent something else than the greeting\n"
        )
        bad.close()
        assert next(line for line in lines if line.startswith("listening"))
        assert dial(HERE, port, TOKEN, seconds=0.5).out.rate > 0
        process.send_signal(signal.SIGINT)
        assert process.wait(LONG) == 0
        assert "stopped listening" in "".join(lines)


def test_a_second_peer_is_told_and_does_not_disturb_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linktest, "ALIVE", 1.0)
    with _listening() as (port, _, served):
        first = _knocking(port, TOKEN)
        first.mailbox.send(linktest.HELLO, b'{"name": "first", "settings": {}}')
        first.mailbox.get(linktest.HELLO, LONG, "the greeting")
        with pytest.raises(LinkError, match="busy with another peer"):
            dial(HERE, port, TOKEN, 0.5)
        first.mailbox.send(linktest.ECHO, b"")
        first.mailbox.get(linktest.ECHO, LONG, "an echo")
        first.mailbox.send(linktest.DO, b'{"end": 0}').result(LONG)
        served.result(LONG)
        first.close()


def test_a_line_too_slow_for_the_test_ends_it_with_the_peer_s_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with _listening() as (port, _, served):
        peer = _knocking(
            port, TOKEN, LinkShape(rate=2e3)
        )  # bytes/s: the first train alone takes four seconds
        monkeypatch.setattr(linktest, "DEADLINE", 2.0)
        with pytest.raises(LinkError, match=rf"^waited 2 s for the acknowledgement .* from .*{port}"):
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
    with pytest.raises(
        LinkError, match=r"^the name 'no\.such\.invalid' cannot be resolved to an IPv4 address; check"
    ):
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
    greeting = network.SIGNATURE + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
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


def test_a_silent_listener_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "GREET", 0.2)
    with socket.create_server((HERE, 0)) as s, pytest.raises(LinkError, match="no answer from"):
        dial(HERE, s.getsockname()[1], TOKEN)


def test_a_wrong_token_and_none_at_one_end() -> None:
    with _listening() as (port, _, _):
        with pytest.raises(AuthError, match="token"):
            dial(HERE, port, b"another token")
        with pytest.raises(AuthError, match="the listener has a token and this end has none"):
            dial(HERE, port, None)
    with _listening(token=None) as (port, _, _), pytest.raises(AuthError, match="this end has a token"):
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
        (["--peer", HERE, "--seconds", "99"], 2, "--seconds is 99"),
        (["--listen"], 2, "needs a shared token"),
        (["--peer", "no.such.invalid"], 2, "needs a shared token"),
        (["--peer", "no.such.invalid", "--token-file", "TOKEN"], 3, "cannot be resolved"),
    ],
)
def test_one_sentence_and_the_exit_code(
    options: list[str], code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("THINWIRE_TOKEN", raising=False)
    (tmp_path / "TOKEN").write_bytes(TOKEN)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["doctor", *options])
    last = result.stderr.strip().splitlines()[-1]
    assert result.exit_code == code
    assert words in last and last.startswith("thinwire: ")


@pytest.mark.parametrize("as_json", [True, False])
def test_the_findings_as_words_and_as_json(as_json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINWIRE_TOKEN", TOKEN.decode())
    with _listening() as (port, _, served):
        options = ["--peer", f"{HERE}:{port}", "--seconds", "0.5", *(["--json"] if as_json else [])]
        result = CliRunner().invoke(app, ["doctor", *options])
        assert result.exit_code == 0, result.stderr
        served.result(LONG)
    if as_json:
        found = json.loads(result.stdout)
        assert found["out"]["rate"] > 0 and found["links"].keys() == found["lines"].keys() == {"out", "back"}
        assert tomllib.loads(found["toml"])["link"][0]["link"] == found["links"]["out"]
    else:
        assert all(word in result.stdout for word in ("Mbit/s", "[[link]]", "round trip", "sent again"))
        assert "as --link to emulate" in result.stdout


def test_this_machines_addresses_and_the_way_out() -> None:
    assert all(i.name and not i.address.startswith("127.") for i in network.interfaces())
    out = network.way_out(HERE, 1)
    assert out is not None and out.address == HERE
    assert network.way_out("no.such.invalid", 1) is None


def _test(way: Way, rtt: float = 0.05, **settings: str) -> LinkTest:
    quiet = Way(1e6, 1000, 1.0, 0.0, "bbr", rtt)
    return LinkTest(Machine("a", settings), Machine("b", {}), rtt, rtt, 0.0, way, quiet)


def test_a_fragment_says_where_tcp_keeps_its_window(tmp_path: Path) -> None:
    def said(congestion: str | None, **settings: str) -> list[bool | None]:
        test = _test(Way(1e6, 1000, 1.0, 0.0, congestion), **settings)
        file = tmp_path / "machines.toml"
        file.write_text('[[machine]]\nname = "a"\n[[machine]]\nname = "b"\n' + test.fragment())
        ways = read_machines(file).ways
        return [ways["a", "b"].restarts, ways["b", "a"].restarts]

    assert said("cubic", tcp_slow_start_after_idle="1") == [True, False]  # the way back has bbr
    assert said("cubic", tcp_slow_start_after_idle="0") == said("bbr") == [False, False]
    assert said(None) == said("cubic") == [True, False]  # not known: as most systems do


def test_a_link_to_be_emulated_is_told_with_its_headers() -> None:
    test = _test(Way(1e6, 1000, 1.0))
    assert (str(test.shape(test.out)), str(test.line(test.out))) == ("8mbit,25ms", "8.29mbit,25ms")
    assert _network_rate(test) == pytest.approx(1e6, rel=1e-3)


def _network_rate(test: LinkTest) -> float:
    """Return what TCP carries [bytes/s] on the emulated line that is printed."""
    (profile, _) = profiles([str(test.line(test.out))], 2)
    assert profile.up is not None
    return profile.up * SEGMENT / MTU


def test_advice_is_given_where_there_is_a_reason() -> None:
    fine = Way(1e6, 1000, 1.0, 0.0, "cubic", 0.06)
    assert advice(_test(fine, tcp_slow_start_after_idle="0", tcp_wmem="4096 16384 4194304")) == []
    assert "slow_start_after_idle=0" in advice(_test(fine, tcp_slow_start_after_idle="1"))[0]
    near = advice(_test(fine, rtt=0.001, tcp_slow_start_after_idle="1"))
    assert not any("slow_start_after_idle" in words for words in near)
    fast = Way(100e6, 1000, 1.0, 0.05, "bbr", 0.5)
    wmem, lossy, bloated = advice(_test(fast, tcp_wmem="4096 16384 4194304"))
    assert wmem.startswith("a: tcp_wmem allows 4.19 MB") and "20000000" in wmem
    assert "5.0% of the bytes were sent again" in lossy and "under load" in bloated
    assert advice(_test(Way(1e6, 1000, 1.0))) == []  # nothing is known without TCP_INFO


DEEP = b"[" * 100_000
HELLO = b'{"name": "odd", "settings": {}}'


def test_no_message_ends_the_listener() -> None:
    deep_name = b'{"name": %s%s, "settings": {}}' % (b"[" * 900, b"]" * 900)
    odd: list[tuple[bytes, ...]] = [(DEEP,), (b"\xff",), (b"[]",), (b'{"name": 1}',), (deep_name, DEEP)]
    odd += [(HELLO, task) for task in (DEEP, b"0", b"{}", b'{"send": NaN}', b'{"receive": -1}')]
    odd += [(HELLO, b'{"receive": %s}' % many) for many in (b"1" + b"0" * 400, b"1e999", b"9" * 5000)]
    odd += [(HELLO, b'{"receive": 1e12}', said) for said in (DEEP, b"{}")]
    with _listening_process() as (port, lines, process):
        for hello, *rest in odd:
            peer = _knocking(port, TOKEN)
            said = zip((linktest.DO, linktest.SENT), rest, strict=False)
            for tag, body in ((linktest.HELLO, hello), *said):
                peer.mailbox.send(tag, body)
            assert next((line for line in lines if "failed" in line), ""), (hello[:60], rest)
            peer.close()
            assert next(line for line in lines if line.startswith("listening"))
        assert process.poll() is None


def test_no_peer_holds_the_listener_for_as_long_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert linktest._task({"receive": 1e9}) == ("receive", linktest.DEADLINE)
    assert linktest._task({"send": 1e9}) == ("send", linktest.DEADLINE)
    monkeypatch.setattr(linktest, "DEADLINE", 3.0)
    with _listening() as (port, _, served):
        silent = _knocking(port, TOKEN)
        with pytest.raises(LinkError, match=r"^waited 3 s for the greeting from the measuring peer"):
            served.result(LONG)
        silent.close()


def test_no_peer_asks_for_tasks_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linktest, "MAX_TASKS", 2)
    with _listening() as (port, _, served):
        peer = _knocking(port, TOKEN)
        peer.mailbox.send(linktest.HELLO, HELLO)
        for _ in range(3):
            peer.mailbox.send(linktest.DO, b'{"send": 0}')
        with pytest.raises(PayloadError, match=r"the measuring peer \(.*\) asks for more than a measurement"):
            served.result(LONG)
        peer.close()


def test_no_peer_fills_the_memory_with_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linktest, "MAX_PIECES", 4)
    with _listening() as (port, _, served):
        peer = _knocking(port, TOKEN)
        sink = linktest._Sink(peer)
        for _ in range(6):
            sink._take(linktest.LOAD, bytes(10))
        assert len(sink._arrivals) == 4
        with pytest.raises(PayloadError, match="sent 4 pieces or more in one transfer"):
            sink.counted()
        peer.mailbox.send(linktest.HELLO, HELLO)
        peer.mailbox.send(linktest.DO, b'{"end": 0}').result(LONG)
        served.result(LONG)
        peer.close()


@pytest.mark.parametrize("got", [(1e15, 5e-324), (10**400, 1), (1, 10**400), (0.5, 1), (1, True), (None, 1)])
def test_a_count_that_cannot_be_is_refused(got: tuple[object, object]) -> None:
    with pytest.raises(PayloadError):
        linktest._way(dict(zip(("bytes", "seconds"), got, strict=True)), {})


@pytest.mark.parametrize("seconds", [1e15, 1.0, 1e-14])
def test_any_count_that_is_taken_can_be_told(seconds: float) -> None:
    way = linktest._way({"bytes": 1, "seconds": seconds}, {"congestion": "bbr\x1b[2J" + "r" * 1000})
    assert way.congestion is not None and way.congestion.isprintable() and len(way.congestion) < 65
    assert tomllib.loads(_test(way).fragment())["link"]


def test_a_message_too_large_for_a_measurement_is_not_kept() -> None:
    with _listening() as (port, _, served):
        peer = _knocking(port, TOKEN)
        peer.mailbox.send(linktest.HELLO, bytes(linktest.MAX_MESSAGE + 1))
        with pytest.raises(LinkError, match="larger than the limit of 1048576 bytes"):
            served.result(LONG)
        peer.close()
