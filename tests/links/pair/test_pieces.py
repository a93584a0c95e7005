"""How messages are cut and put together, what an end may find of it, and that nothing is copied."""

from __future__ import annotations

import os
import random
from collections import deque
from concurrent.futures import Future

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import until

from thinwire.links import Link, LinkShape, Mailbox, Reliable, ZmqLink
from thinwire.links.link import LinkEstimate
from thinwire.links.mesh import stack
from thinwire.links.message import Message, Parts, buffers_of
from thinwire.links.pair.pieces import LARGE, PieceQueue
from thinwire.links.pair.reliable import AHEAD, PIECE
from thinwire.links.pair.segment import FIRST, LENGTH, Kind, pack, parse
from thinwire.links.pair.window import ReceiveWindow
from thinwire.types import PayloadError

LONG = 30.0
FIELDS = {"session": 1, "number": 0, "ack": 0, "repair": 0, "arrived": 0}
SIZES = (0, 1, 300, 20_000, PIECE, LARGE - 1, LARGE, LARGE + 1, 2 * LARGE + 70_000)
NOISE = os.urandom(max(SIZES))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from(SIZES), min_size=1, max_size=12), st.integers(0, 10**6))
def test_messages_come_out_as_they_went_in_however_they_are_cut(sizes: list[int], seed: int) -> None:
    rng, queue, into = random.Random(seed), PieceQueue(), ReceiveWindow(1 << 31)
    sent: list[Message] = []
    for size in sizes:
        body = memoryview(NOISE)[:size]
        sent.append(Parts(b"\1t", body) if rng.random() < 0.5 else body)
        queue.add(sent[-1], rng.choice(("forward", "other")), None)
    got, done, number = [], 0, 0
    while queue:
        cut = queue.next(PIECE, rng.random() < 0.7)  # the line may be fast, and then no longer
        number, done = number + 1, done + len(cut.done)
        wire = pack(cut.kind, cut.label, cut.body, **FIELDS | {"number": number})
        found = parse(bytes(wire) if rng.random() < 0.3 else wire)  # links may join the parts
        got += into.accept(found.number, found.kind, *found.buffers)
    assert list(map(bytes, got)) == list(map(bytes, sent))
    assert done == len(sizes) and queue.nbytes == 0


def test_a_large_message_lies_where_it_lay_until_it_is_on_the_wire() -> None:
    queue, body = PieceQueue(), bytes(2 * LARGE)
    queue.add(Parts(b"\1t", body), "forward", None)
    while queue:
        cut = queue.next(PIECE, True)
        part = buffers_of(pack(cut.kind, cut.label, cut.body, **FIELDS))[-1]
        assert isinstance(part, memoryview) and part.obj is body


HOSTILE = {
    "no size": (Kind.FIRST, b"short"),
    "a head beyond it": (Kind.FIRST, FIRST.pack(1000, 900) + b"head"),
    "too large": (Kind.FIRST, FIRST.pack(1 << 40, 0) + b"x"),
    "more than it says": (Kind.FIRST, FIRST.pack(3, 0) + b"abcd"),
    "half a length": (Kind.MANY, b"\1\0"),
    "half a message": (Kind.MANY, LENGTH.pack(9) + b"x"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_no_sender_makes_is_a_payload_error(name: str) -> None:
    kind, body = HOSTILE[name]
    with pytest.raises(PayloadError):
        ReceiveWindow(1 << 20).accept(1, kind, memoryview(body))
    begun = ReceiveWindow(1 << 20)
    begun.accept(1, Kind.MORE, memoryview(b"begun"))
    with pytest.raises(PayloadError):
        begun.accept(2, kind, memoryview(body))
    short = ReceiveWindow(1 << 20)
    short.accept(1, Kind.FIRST, memoryview(FIRST.pack(9, 1) + b"head"))
    with pytest.raises(PayloadError, match="5 bytes of a message are missing"):
        short.accept(2, Kind.DATA, memoryview(b""))


class Watched:
    """Note the kinds of the segments that go by."""

    def __init__(self, link: Link) -> None:
        self.link, self.seen = link, list[tuple[Kind, int]]()

    @property
    def peer(self) -> str:
        return self.link.peer

    def send(self, data: Message, label: str = "control") -> Future[None]:
        self.seen.append((parse(data).kind, len(buffers_of(data))))
        return self.link.send(data, label)

    def recv(self) -> Future[Message]:
        return self.link.recv()

    def more(self) -> deque[Message]:
        return self.link.more()

    def estimate(self) -> LinkEstimate:
        return self.link.estimate()

    def close(self, timeout: float = 5.0) -> None:
        self.link.close(timeout)


class Fast(Reliable):
    """An end that takes its line for a fast one, however slow this machine is just now."""

    def _judge(self, now: float) -> None:
        self._fast = self._takes >= LARGE


class Older(Reliable):
    """An end of an earlier version, whose acknowledgements say nothing of pieces."""

    def _control(self, kind: Kind, body: bytes = b"") -> None:
        self._emit(kind, "control", body, self._out.top)


@pytest.mark.parametrize("token", [None, b"t"], ids=["plain", "curve"])
@pytest.mark.parametrize("older", [False, True], ids=["same version", "older end"])
def test_a_fast_line_has_large_pieces_and_an_older_end_none(older: bool, token: bytes | None) -> None:
    binder = ZmqLink.bind(b"n", token=token, connect_timeout=LONG)
    connector = ZmqLink.connect(b"n", "127.0.0.1", binder.port, token=token, connect_timeout=LONG)
    watched = Watched(connector)
    a, b = Fast(watched, LONG, ahead=AHEAD), (Older if older else Reliable)(binder, LONG)
    boxes = Mailbox(a), Mailbox(b)
    boxes[0].send(b"first", bytes(PIECE)).result(LONG)
    if not older:
        until(lambda: a._takes)
    bodies = [memoryview(NOISE)[: rng * 997] for rng in range(100)] + [NOISE[: SIZES[-1]], b"last"]
    sent = [boxes[0].send(b"t", body, "forward") for body in bodies]
    assert all(boxes[1].get(b"t", LONG, "a message") == body for body in bodies)
    assert all(done.result(LONG) is None for done in sent)
    kinds = {kind for kind, _ in watched.seen}
    assert {Kind.FIRST, Kind.MANY} & kinds == (set() if older else {Kind.FIRST, Kind.MANY})
    assert max(frames for _, frames in watched.seen) == (1 if older else 2)
    for box in boxes:
        box.close()


def test_a_shaped_line_keeps_its_timetable_and_what_it_carries() -> None:
    binder = ZmqLink.bind(b"n", connect_timeout=LONG)
    connector = ZmqLink.connect(b"n", "127.0.0.1", binder.port, connect_timeout=LONG)
    a = stack(1, binder, LinkShape(50e6), 0, LONG, LONG)
    b = stack(0, connector, LinkShape(), 0, LONG, LONG)
    body = NOISE[:LARGE]
    for _ in range(4):
        a.mailbox.send(b"x", body, "forward")
        assert b.get(b"x", LONG, "a message") == body
    assert a.meter.sent["forward"].messages == 4 * 9
    assert a.meter.sent["forward"].nbytes == 4 * a.wire_bytes(b"x", LARGE)
    a.close()
    b.close()
