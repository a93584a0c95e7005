"""Followers and publishers that lie: nothing false is held, nobody else is disturbed."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from time import monotonic, sleep

import pytest
import states
import torch
from following import Liar, answer, hello, publisher, same, small, stranger, train, used, weights
from tcp_proxy import TcpProxy
from waiting import HOST, LONG

from thinwire.links.hub.hub import Hub
from thinwire.links.hub.station import EventKind
from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.state.patches import body
from thinwire.state.patches.body import most
from thinwire.state.patches.moves import Reading
from thinwire.state.patches.patch import MAX_VERSION
from thinwire.types import InputError, PayloadError
from thinwire.uses.following.push import reception
from thinwire.uses.following.push.feed import HIGHEST
from thinwire.uses.following.push.follower import Follower
from thinwire.uses.following.push.protocol import (
    MAGIC,
    MAX_NAME,
    NOTHING,
    PROTOCOL,
    UP,
    Ack,
    Again,
    Ask,
    Begin,
    Chunk,
    Done,
    End,
    Hello,
    LayoutIs,
    Same,
    unpack,
)
from thinwire.uses.following.push.publisher import Publisher
from thinwire.uses.following.push.state_relay import StateRelay


def test_hostile_followers_do_not_disturb_the_publisher() -> None:
    rng, w = random.Random(1), weights()
    with publisher(w) as p, Follower(HOST, p.port) as good, stranger(p.port) as spoke:
        p.publish()
        good.wait(1)
        digest = bytes.fromhex(p.history.layout.digest)
        greeting = Hello(MAGIC, PROTOCOL, 1, NOTHING, digest, 0, 0, 0, 0, 0, 0, 0)
        odd = [
            Hello(b"odd!", PROTOCOL, 1, NOTHING, digest, 0, 0, 0, 0, 0, 0, 0),
            Hello(MAGIC, PROTOCOL, 1, NOTHING, digest, 2**64 - 1, 7, 2**64 - 1, 0, 0, 0, 0),
            Hello(MAGIC, PROTOCOL, 1, NOTHING, digest, 0, 0, 0, 0, 1, p.newest.hash, 2**64 - 1),
            Ack(1, 2**64 - 1),
            Done(1, 1, 99, 99),
            Again(1, 2**32 - 1, 5, 5),
            Ask(PROTOCOL),
        ]
        for message in odd:
            spoke.send(greeting.pack())
            spoke.send(message.pack())
            spoke.send(rng.randbytes(rng.randrange(1, 200)))
        for _ in range(200):
            spoke.send(bytes([rng.choice([1, 2, 3, 4])]) + rng.randbytes(rng.randrange(0, 120)))
        for _ in range(3):
            train(w)
            good.wait(p.publish().number)
        assert same(good.tensors(), used(w)) and p.newest.number == 4


@pytest.fixture
def liar() -> Iterator[Liar]:
    made = Liar()
    yield made
    made.hub.close(0.5)


def test_hostile_publishers_change_nothing_and_end_in_a_payload_error(liar: Liar) -> None:
    amid = Begin(1, 0, 0, 1, 2, 500)  # goes on with what never began
    begin = Begin(1, 0, 0, 1, 2, 0)
    nothing = begin, End(1, 0, b"head")
    longer = begin, Chunk(1, 0, b"body"), End(1, 5, b"head")
    more = begin, Chunk(1, 0, b"body"), End(1, 4, bytes(1 << 20))  # than any head has
    far = begin, Chunk(1, 5, b"body")
    with Follower(HOST, liar.hub.port) as f:
        hello = liar.greet()
        for message in (Chunk(5, 0, b"of no transfer"), End(5, 14, b"head"), Same(9, 1234, 0.0)):
            liar.hub.send(liar.peer, message.pack())
        assert isinstance(liar.hear(), Ack)
        for messages in (nothing, longer, more, far):
            for message in messages:
                liar.hub.send(liar.peer, message.pack())
            again = liar.hear()
            while isinstance(again, Ack):
                again = liar.hear()
            assert isinstance(again, Hello) and again.version == 0 and f.status.error is None
            liar.answer(again.session, b"")
        liar.hub.send(liar.peer, amid.pack())  # one too many
        with pytest.raises(PayloadError):
            f.wait(1, LONG)
        assert f.held.number == 0 and hello.version == 0


def test_a_patch_longer_than_the_state_can_need_is_refused_as_it_grows(liar: Liar) -> None:
    with Follower(HOST, liar.hub.port) as f:
        liar.greet()
        liar.hub.send(liar.peer, Begin(1, 0, 0, 1, 2, 0).pack())
        limit, at, answer = most(liar.layout), 0, None
        while not isinstance(answer, Hello):
            assert at <= limit + (1 << 20)
            liar.hub.send(liar.peer, Chunk(1, at, bytes(1 << 20)).pack())
            at, answer = at + (1 << 20), liar.hear()
        assert at > limit and f.held.number == 0 and f.status.error is None


def test_a_patch_of_garbage_or_with_a_wrong_hash_is_never_held(liar: Liar) -> None:
    w = used(weights())
    history = History(liar.layout)
    history.publish(w)
    head, data = history.patch(None).head(), history.patch(None).body
    newest = history.newest
    with Follower(HOST, liar.hub.port) as f:
        liar.greet()
        wrong = bytearray(data)
        wrong[len(data) // 2] ^= 1
        for number, payload in enumerate((bytes(wrong), random.Random(3).randbytes(500)), start=1):
            liar.transfer(Begin(number, 0, 0, 1, newest.hash, 0), head, payload)
            again = liar.hear()
            assert isinstance(again, Again) and again.transfer == number and again.version == 0
            assert f.held.number == 0
        liar.transfer(Begin(3, 0, 0, 1, newest.hash, 0), head, data)
        assert f.wait(1).hash == newest.hash and same(f.tensors(), w)


def test_a_patch_that_goes_wrong_while_it_is_read_is_never_held(
    liar: Liar, monkeypatch: pytest.MonkeyPatch
) -> None:
    states.in_sections(monkeypatch)
    base, w = used(weights()), used(weights(1))
    history = History(liar.layout)
    first = history.publish(base)
    newest = history.publish(w)
    head, data = history.patch(first.number).head(), history.patch(first.number).body
    ends = (first.number, first.hash, newest.number, newest.hash)
    with Follower(HOST, liar.hub.port, base=base) as f:
        liar.greet()
        wrong, feed, noticed = bytearray(data), Reading.feed, threading.Event()
        wrong[body.HEAD.size] = 9  # bytes of a word

        def noting(reading: Reading, came: bytearray) -> None:
            try:
                feed(reading, came)
            except PayloadError:
                noticed.set()
                raise

        monkeypatch.setattr(Reading, "feed", noting)
        for number in (1, 2):
            begin = Begin(number, *ends, 0)
            liar.transfer(begin, head, wrong, lambda: noticed.wait(LONG))  # before all is said to be here
            assert noticed.is_set()
            noticed.clear()
            again = liar.hear()
            assert isinstance(again, Again) and again.transfer == number and f.held.number == 0
        liar.transfer(Begin(3, *ends, 0), head, data)
        assert f.wait(newest.number).hash == newest.hash and same(f.tensors(), w)
        assert not noticed.is_set()


def test_a_layout_that_comes_later_than_a_follower_waits_is_taken(
    liar: Liar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each of its answers would be too late over a slow line, and it would never be sent a patch."""
    monkeypatch.setattr(reception, "TURN", 0.05)
    monkeypatch.setattr(reception, "ANSWER", 0.5)
    with Follower(HOST, liar.hub.port) as f:
        first, second = liar.hear(), liar.hear()
        assert isinstance(first, Hello) and isinstance(second, Hello)
        assert second.session == first.session + 1 and second.layout == NOTHING
        f._reception._patience = LONG
        liar.answer(first.session)
        heard = [liar.hear()]
        while heard[-1].layout == NOTHING and len(heard) < 4:  # type: ignore[attr-defined]
            heard.append(liar.hear())
        third = heard[-1]
        assert isinstance(third, Hello) and third.layout.hex() == liar.layout.digest
        liar.answer(second.session)  # is on its way still
        liar.hub.send(liar.peer, Begin(1, 0, 0, 1, 2, 0).pack())  # and this is of no session
        liar.answer(third.session, b"")
        liar.hub.send(liar.peer, Begin(2, 0, 0, 1, 2, 0).pack())
        liar.hub.send(liar.peer, Chunk(2, 0, b"body").pack())
        assert liar.hear() == Ack(third.session, 4) and not f._reception.failures
        assert f._reception._patience == 0.5


def test_a_layout_from_before_this_connection_is_not_taken(liar: Liar) -> None:
    with TcpProxy(liar.hub.port) as line, Follower(HOST, line.port) as f:
        first = liar.hear()
        line.cut()
        line.restore()
        second = liar.hear()
        assert isinstance(first, Hello) and isinstance(second, Hello)
        other = Layout.of({"other": torch.zeros(3)})
        for session in (first.session, second.session + 1):  # nor one that nobody asked for
            liar.answer(session, other.to_json(), bytes.fromhex(other.digest))
        liar.answer(second.session)
        third = liar.hear()
        assert isinstance(third, Hello) and third.session == second.session + 1
        assert third.layout.hex() == liar.layout.digest and f._reception._layout is not None


def test_hello_is_said_again_less_and_less_often(liar: Liar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "TURN", 0.01)
    monkeypatch.setattr(reception, "ANSWER", 0.1)
    monkeypatch.setattr(reception, "LONGEST", 0.4)
    began = monotonic()
    with Follower(HOST, liar.hub.port) as f:
        for _ in range(6):
            hello = liar.hear()
        assert isinstance(hello, Hello)
        assert f._reception._asked_at - began >= 0.1 + 0.2 + 3 * 0.4 and f._reception._patience == 0.4


def test_another_protocol_is_told(liar: Liar) -> None:
    with Follower(HOST, liar.hub.port) as f:
        liar.hear()
        liar.hub.send(liar.peer, Ask(PROTOCOL + 1).pack())
        with pytest.raises(InputError, match=f"speaks protocol {PROTOCOL + 1}, this end {PROTOCOL}"):
            f.wait(1, LONG)


@pytest.mark.parametrize("relayed", [False, True])
@pytest.mark.parametrize("above", [HIGHEST - 1, HIGHEST, 2**53, 2**64 - 1])
def test_a_number_that_cannot_be_costs_nobody_but_whoever_says_it(above: int, relayed: bool) -> None:
    w = small()
    with Publisher(w) as p:
        p.publish(1)
        relay = StateRelay(HOST, p.port) if relayed else None
        if relay is not None:
            relay.wait(1)
        port, digest = relay.port if relay else p.port, bytes.fromhex(p.history.layout.digest)
        with stranger(port) as spoke, Follower(HOST, port) as f:
            f.wait(1)
            for version in (0, p.newest.number):  # the second is a number that is taken, of other contents
                spoke.send(hello(1, digest, version, 77, above))
                sleep(0.1)
            w["w"] += 1
            newest = p.publish(2)
            assert f.wait(newest.number, LONG).meta["step"] == 2
            assert torch.equal(f.tensors()["w"], w["w"])
        if relay is not None:
            relay.check()
            relay.close()


@pytest.mark.parametrize(
    ("number", "meta"),
    [
        *(
            (1, meta)
            for meta in (b"[1]", b"{", b'{"a": [1]}', b"\xff", b'{"a": "' + b"x" * (1 << 16) + b'"}')
        ),
        (MAX_VERSION, b""),  # which no patch may lead to, and no file may have
    ],
)
def test_what_a_publisher_calls_what_is_held_is_checked(number: int, meta: bytes) -> None:
    layout = Layout.of(small())
    held = History(layout).publish(small())
    hub = Hub.bind()
    try:
        with Follower(HOST, hub.port, base=small()) as f, pytest.raises(PayloadError):
            end = monotonic() + LONG
            while monotonic() < end:
                event = hub.recv(0.05)
                if event is not None and event.kind is EventKind.DATA and event.data[0] == Hello.KIND:
                    session = unpack(event.data, UP).session
                    digest, json = bytes.fromhex(layout.digest), layout.to_json()
                    known = (PROTOCOL, session, b"i" * 16, digest, 1, bytes(MAX_NAME), json)
                    hub.send(event.peer, LayoutIs(*known).pack())  # type: ignore[arg-type]
                    hub.send(event.peer, Same(number, held.hash, 1.0, meta).pack())
                f.wait(0)
    finally:
        hub.close(0.0)


@pytest.mark.parametrize("reply", ["ask", "no layout"])
def test_a_feed_that_only_asks_is_not_greeted_as_fast_as_the_line_goes(reply: str) -> None:
    hub, greeted = Hub.bind(), 0
    try:
        with Follower(HOST, hub.port) as f:
            end = monotonic() + 1.5
            while (left := end - monotonic()) > 0:
                event = hub.recv(left)
                if event is None or event.kind is not EventKind.DATA or event.data[0] != Hello.KIND:
                    continue
                greeted += 1
                session = unpack(event.data, UP).session
                known = (PROTOCOL, session, b"i" * 16, b"d" * 16, 1, bytes(MAX_NAME), b"")
                hub.send(event.peer, (Ask(PROTOCOL) if reply == "ask" else LayoutIs(*known)).pack())  # type: ignore[arg-type]
            assert 2 <= greeted <= 6
            if reply == "no layout":
                with pytest.raises(PayloadError, match="left out"):
                    f.wait(1, LONG)
    finally:
        hub.close(0.0)


def test_a_follower_that_counts_up_does_not_fill_the_log() -> None:
    with Publisher(small()) as p, stranger(p.port) as spoke:
        p.publish(1)
        digest = bytes.fromhex(p.history.layout.digest)
        for i in range(300):
            spoke.send(hello(i, digest, above=2 * i + 10))
        spoke.send(hello(1000, NOTHING))  # is answered: it is still served otherwise
        while (found := answer(spoke, LayoutIs)) is not None and found.session != 1000:  # type: ignore[attr-defined]
            pass
        assert found is not None and 600 > p.newest.number > 100
        with Follower(HOST, p.port) as f:
            f.wait(p.publish(2).number)
