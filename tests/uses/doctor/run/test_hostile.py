"""Peers that send a doctor listener nonsense: none ends it, holds it or fills its memory."""

from __future__ import annotations

import tomllib

import pytest
from listeners import LONG, TOKEN, knocking, link_test, listening, listening_process

from thinwire.types import LinkError, PayloadError
from thinwire.uses.doctor.run import linktest

DEEP = b"[" * 100_000


HELLO = b'{"name": "odd", "settings": {}}'


def test_no_message_ends_the_listener() -> None:
    deep_name = b'{"name": %s%s, "settings": {}}' % (b"[" * 900, b"]" * 900)
    odd: list[tuple[bytes, ...]] = [(DEEP,), (b"\xff",), (b"[]",), (b'{"name": 1}',), (deep_name, DEEP)]
    odd += [(HELLO, task) for task in (DEEP, b"0", b"{}", b'{"send": NaN}', b'{"receive": -1}')]
    odd += [(HELLO, b'{"receive": %s}' % many) for many in (b"1" + b"0" * 400, b"1e999", b"9" * 5000)]
    odd += [(HELLO, b'{"receive": 1e12}', said) for said in (DEEP, b"{}")]
    with listening_process() as (port, lines, process):
        for hello, *rest in odd:
            peer = knocking(port, TOKEN)
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
    monkeypatch.setattr(linktest, "DEADLINE", 1.0)
    with listening() as (port, _, served):
        silent = knocking(port, TOKEN)
        with pytest.raises(LinkError, match=r"^waited 1 s for the greeting from the measuring peer"):
            served.result(LONG)
        silent.close()


def test_no_peer_asks_for_tasks_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linktest, "MAX_TASKS", 2)
    with listening() as (port, _, served):
        peer = knocking(port, TOKEN)
        peer.mailbox.send(linktest.HELLO, HELLO)
        for _ in range(3):
            peer.mailbox.send(linktest.DO, b'{"send": 0}')
        with pytest.raises(PayloadError, match=r"the measuring peer \(.*\) asks for more than a measurement"):
            served.result(LONG)
        peer.close()


def test_no_peer_fills_the_memory_with_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linktest, "MAX_PIECES", 4)
    with listening() as (port, _, served):
        peer = knocking(port, TOKEN)
        sink = linktest._TransferSink(peer)
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
    assert tomllib.loads(link_test(way).fragment())["link"]


def test_a_message_too_large_for_a_measurement_is_not_kept() -> None:
    with listening() as (port, _, served):
        peer = knocking(port, TOKEN)
        peer.mailbox.send(linktest.HELLO, bytes(linktest.MAX_MESSAGE + 1))
        with pytest.raises(LinkError, match="larger than the limit of 4194304 bytes"):
            served.result(LONG)
        peer.close(0.0)
