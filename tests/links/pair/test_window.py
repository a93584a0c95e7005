"""Segments and windows: the repair protocol without threads, over a simulated line that loses and repeats."""

from __future__ import annotations

import random
from concurrent.futures import Future

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.links.pair.segment import HEADER, LABELS, NACK, RANGE, TICKS, Kind, label_of, pack, parse, ticks
from thinwire.links.pair.window import MAX_AHEAD, Acked, ReceiveWindow, SendWindow
from thinwire.types import PayloadError


def _pack(body: bytes = b"body", label: str = "forward", arrived: int = 9) -> bytes:
    return pack(Kind.DATA, label, body, session=7, number=3, ack=2, repair=1, arrived=arrived)


def test_a_segment_reads_back() -> None:
    s = parse(_pack(arrived=ticks(0.01)))
    assert (s.kind, s.label, bytes(s.body)) == (Kind.DATA, "forward", b"body")
    assert (s.session, s.number, s.ack, s.repair, s.arrived) == (7, 3, 2, 1, 10_000)
    assert ticks(TICKS * 1e-6 + 3e-6) == 3  # clocks begin again
    assert len(_pack(b"")) == HEADER == 26


def test_the_label_is_readable_below() -> None:
    for label in LABELS:
        assert label_of(_pack(label=label)) == label == parse(_pack(label=label)).label
    assert label_of(_pack(label="something new")) == "other"
    assert label_of(b"short") == label_of(b"\xff" * HEADER) == "other"


@given(st.integers(0, 29), st.integers(1, 255))
def test_any_changed_byte_is_noticed(at: int, flip: int) -> None:
    data = bytearray(_pack())
    data[at] ^= flip
    with pytest.raises(PayloadError):
        parse(bytes(data))


@given(st.binary(max_size=80))
def test_random_bytes_are_a_payload_error(data: bytes) -> None:
    with pytest.raises(PayloadError):
        parse(data)


def _view(data: bytes) -> memoryview:
    return memoryview(data)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.floats(0, 0.4), st.floats(0, 0.3), st.integers(1, 60))
def test_a_lossy_line_in_order_is_repaired_without_a_needless_resend(
    seed: int, loss: float, twice: float, count: int
) -> None:
    rng = random.Random(seed)
    out, into = SendWindow(1 << 30), ReceiveWindow(1 << 30)
    line: list[tuple[int, Kind, bytes, int]] = []  # number, kind, body, repair
    dropped, resends, got = 0, 0, []

    def put(number: int, kind: Kind, body: bytes) -> None:
        nonlocal dropped
        if rng.random() < loss:
            dropped += kind != Kind.PING
            return
        line.extend([(number, kind, body, out.repair)] * (2 if rng.random() < twice else 1))

    for i in range(count):
        kind = Kind.DATA if rng.random() < 0.7 or i == count - 1 else Kind.MORE
        body = bytes([i])
        put(out.add(kind, "forward", _view(body), 0.0), kind, body)
    for _ in range(2000):
        put(out.top, Kind.PING, b"")  # heartbeat: reveals the loss of the last one
        while line:
            number, kind, body, repair = line.pop(0)
            if kind != Kind.PING:
                got += into.accept(number, kind, _view(body))
            into.note(number, repair)
            ask = into.nack(0.0, 1e9)  # never by time
            if ask is not None:
                repair, lost = out.again(_view(ask))
                for n, sent in lost:
                    resends += 1
                    put(n, sent.kind, bytes(sent.body))
                out.repair = repair
        out.acknowledge(into.got)
        if not out:
            break
    assert b"".join(map(bytes, got)) == bytes(range(count))
    assert resends == dropped  # exactly the lost ones, however slow they are
    assert into.complete


def test_a_nack_is_not_repeated_while_its_answer_is_due() -> None:
    into = ReceiveWindow(1 << 20)
    into.accept(3, Kind.DATA, _view(b"c"))
    ask = into.nack(0.0, 2.0)
    assert ask == NACK.pack(1, 0) + RANGE.pack(1, 2)
    assert into.nack(1.9, 2.0) is None  # it may just be slow
    assert into.nack(2.1, 2.0) == NACK.pack(2, 0) + RANGE.pack(1, 2)  # or lost itself
    assert into.nack(5.9, 2.0) is None  # twice the patience now
    into.note(3, 2)
    assert into.nack(6.0, 2.0) == NACK.pack(3, 2) + RANGE.pack(1, 2)  # the answer came without them
    assert into.accept(1, Kind.DATA, _view(b"a")) == [b"a"]
    assert into.accept(2, Kind.DATA, _view(b"b")) == [b"b", b"c"]
    assert into.nack(99.0, 2.0) is None


def test_the_sender_does_not_send_again_what_is_on_its_way() -> None:
    out = SendWindow(1 << 20)
    out.add(Kind.DATA, "forward", _view(b"a"), 0.0)
    assert [n for n, _ in out.again(_view(NACK.pack(1, 0) + RANGE.pack(1, 1)))[1]] == [1]
    out.repair = 1
    assert out.again(_view(NACK.pack(2, 0) + RANGE.pack(1, 1)))[1] == []  # asked before it could arrive
    assert [n for n, _ in out.again(_view(NACK.pack(3, 1) + RANGE.pack(1, 1)))[1]] == [1]  # lost again


def test_hostile_numbers_cost_neither_time_nor_memory() -> None:
    out, into = SendWindow(1 << 20), ReceiveWindow(1 << 20)
    out.add(Kind.DATA, "forward", _view(b"a"), 0.0)
    ranges = RANGE.pack(0, 0xFFFFFFFF) * 64
    assert len(out.again(_view(NACK.pack(1, 0) + ranges))[1]) <= 64
    for bad in (b"", b"123", NACK.pack(1, 0) + b"x"):
        with pytest.raises(PayloadError):
            out.again(_view(bad))
    with pytest.raises(PayloadError, match="an acknowledgement of"):
        out.acknowledge(2)
    into.note(0xFFFFFFFF, 0)
    assert len(into.nack(0.0, 1.0) or b"") == NACK.size + RANGE.size
    assert into.accept(MAX_AHEAD + 1, Kind.DATA, _view(b"far")) == []
    small = ReceiveWindow(3)
    small.accept(1, Kind.MORE, _view(b"12"))
    with pytest.raises(PayloadError, match="limit of 3"):
        small.accept(2, Kind.DATA, _view(b"34"))


def test_acknowledgements_complete_sends_and_say_what_arrived() -> None:
    out = SendWindow(1 << 30)
    first: Future[None] = Future()
    second: Future[None] = Future()
    out.add(Kind.DATA, "forward", _view(bytes(10_000)), 1.0, first)
    out.add(Kind.MORE, "forward", _view(bytes(20_000)), 1.5)
    out.add(Kind.DATA, "forward", _view(bytes(30_000)), 2.0, second)
    assert (out.flight, out.oldest()) == (60_000, (HEADER + 10_000, 1.0))
    assert out.acknowledge(1) == ([first], Acked(HEADER + 10_000, 1.0, 1.0))
    assert out.acknowledge(1) == ([], None)
    assert out.acknowledge(3) == ([second], Acked(2 * HEADER + 50_000, 1.5, 2.0))
    assert (len(out), out.flight, out.oldest()) == (0, 0, None)
    out.add(Kind.DATA, "forward", _view(bytes(10)), None)
    assert out.oldest() is None  # sent before there was a peer: its time says nothing
    out.add(Kind.DATA, "forward", _view(bytes(10)), 3.0)
    assert out.acknowledge(5) == ([], Acked(2 * HEADER + 20, clean=False))
    out.add(Kind.DATA, "forward", _view(bytes(10)), 4.0, first)
    out.again(_view(NACK.pack(1, 0) + RANGE.pack(6, 1)))
    assert out.drain() == [first]


def test_what_was_sent_again_is_no_measurement() -> None:
    out = SendWindow(1 << 30)
    out.add(Kind.DATA, "forward", _view(bytes(10)), 1.0)
    out.again(_view(NACK.pack(1, 0) + RANGE.pack(1, 1)))
    assert out.acknowledge(1) == ([], Acked(HEADER + 10, clean=False))
