"""The mailbox: tags, handlers, deadlines, failures."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from thinwire.links import Link, Mailbox, loopback_pair
from thinwire.types import InputError, LinkError, PayloadError

LONG = 30.0


@pytest.fixture
def boxes() -> Iterator[tuple[Mailbox, Mailbox]]:
    before = threading.active_count()
    x, y = loopback_pair()
    a, b = Mailbox(x), Mailbox(y)
    yield a, b
    a.close()
    b.close()
    assert threading.active_count() <= before


def test_messages_are_filed_by_tag_in_order(boxes: tuple[Mailbox, Mailbox]) -> None:
    a, b = boxes
    for body in (b"1", b"2"):
        a.send(b"x", body, "forward")
        a.send(b"y", bytearray(body + body), "backward")
    a.send(b"\x00" * 255, b"")
    assert b.get(b"\x00" * 255, LONG, "nothing") == b""
    assert [b.get(b"y", LONG, "y") for _ in range(2)] == [b"11", b"22"]
    assert [b.get(b"x", LONG, "x") for _ in range(2)] == [b"1", b"2"]


def test_a_deadline_says_what_was_awaited_and_from_whom(boxes: tuple[Mailbox, Mailbox]) -> None:
    with pytest.raises(LinkError, match=r"^waited 0.05 s for activations of micro-batch 3 from rank 1$"):
        boxes[0].get(b"x", 0.05, "activations of micro-batch 3")


def test_handlers_get_their_prefix_also_what_came_before(boxes: tuple[Mailbox, Mailbox]) -> None:
    a, b = boxes
    seen: list[tuple[str, bytes, bytes]] = []
    done = threading.Event()
    a.send(b"c/early", b"0")
    a.send(b"sync", b"")
    b.get(b"sync", LONG, "sync")
    b.on(b"c/", lambda tag, body: seen.append(("c", tag, body)))
    b.on(b"c/stop", lambda tag, body: (seen.append(("stop", tag, body)), done.set()))
    a.send(b"c/x", b"1")
    a.send(b"d", b"filed")
    a.send(b"c/stop", b"2")
    assert done.wait(LONG)
    assert seen == [("c", b"c/early", b"0"), ("c", b"c/x", b"1"), ("stop", b"c/stop", b"2")]
    assert b.get(b"d", LONG, "d") == b"filed"


def test_messages_are_opened_before_somebody_wants_them(boxes: tuple[Mailbox, Mailbox]) -> None:
    """On the thread that reads; what cannot be opened is told to whoever wants it, and to nobody else."""
    a, b = boxes
    threads = set[threading.Thread]()

    def opener(body: bytes) -> int:
        threads.add(threading.current_thread())
        return int(body)

    def sent(*messages: tuple[bytes, bytes]) -> None:
        for tag, body in (*messages, (b"sync", b"")):
            a.send(tag, body)
        b.get(b"sync", LONG, "sync")

    sent((b"n/1", b"7"))
    b.opens(b"n/", opener)
    sent((b"n/1", b"8"), (b"n/2", b"x"), (b"n/1", b"9"), (b"m", b"x"))
    assert [b.look(b"n/1") for _ in range(3)] == [b"7", 8, 9]
    assert threading.current_thread() not in threads
    assert len(threads) == 1
    with pytest.raises(ValueError, match="invalid literal"):
        b.look(b"n/2")
    assert (b.look(b"n/2"), b.look(b"m"), b.error) == (None, b"x", None)
    b.opens(b"n/", None)
    sent((b"n/1", b"10"))
    assert b.look(b"n/1") == b"10"


@pytest.mark.parametrize("tag", [b"", b"x" * 256])
def test_a_tag_has_a_length(boxes: tuple[Mailbox, Mailbox], tag: bytes) -> None:
    with pytest.raises(InputError, match=f"not {len(tag)}"):
        boxes[0].send(tag, b"")


def _waiters(box: Mailbox, count: int) -> tuple[list[threading.Thread], list[Exception]]:
    errors: list[Exception] = []

    def wait(i: int) -> None:
        try:
            box.get(b"%d" % i, LONG, "what never comes")
        except LinkError as e:
            errors.append(e)

    threads = [threading.Thread(target=wait, args=(i,)) for i in range(count)]
    for t in threads:
        t.start()
    return threads, errors


def test_a_failing_link_wakes_every_waiter_at_once(boxes: tuple[Mailbox, Mailbox]) -> None:
    a, b = boxes
    a.send(b"kept", b"still here")
    a.send(b"sync", b"")
    b.get(b"sync", LONG, "sync")
    threads, errors = _waiters(b, 4)
    a.close()
    for t in threads:
        t.join(LONG / 2)  # well before their own deadline
        assert not t.is_alive()
    assert [str(e) for e in errors] == ["rank 0 closed the link"] * 4
    assert len({id(e) for e in errors}) == 4
    assert b.get(b"kept", LONG, "kept") == b"still here"
    with pytest.raises(LinkError, match="closed the link"):
        b.get(b"more", LONG, "more")
    assert isinstance(b.error, LinkError)


def test_close_wakes_the_waiters_of_this_end(boxes: tuple[Mailbox, Mailbox]) -> None:
    threads, errors = _waiters(boxes[0], 2)
    boxes[0].close()
    boxes[0].close()
    for t in threads:
        t.join(LONG / 2)
    assert [str(e) for e in errors] == ["this end closed the link to rank 1"] * 2


@pytest.mark.parametrize("raw", [b"", b"\x00body", b"\x05abc"])
def test_a_message_without_a_tag_fails_the_mailbox(raw: bytes) -> None:
    ends: tuple[Link, Link] = loopback_pair()
    box = Mailbox(ends[1])
    ends[0].send(raw)
    with pytest.raises(PayloadError, match="rank 0 has no tag"):
        box.get(b"x", LONG, "x")
    box.close()


def test_a_handler_that_raises_fails_the_mailbox(boxes: tuple[Mailbox, Mailbox]) -> None:
    a, b = boxes

    def broken(tag: bytes, body: bytes) -> None:
        raise ValueError(f"cannot read {body!r}")

    b.on(b"c", broken)
    a.send(b"c", b"this")
    with pytest.raises(LinkError, match=r"handler of b'c' .*rank 0.*cannot read b'this'"):
        b.get(b"x", LONG, "x")


def _filed(a: Mailbox, b: Mailbox, *messages: tuple[bytes, bytes]) -> None:
    for tag, body in (*messages, (b"sync", b"")):
        a.send(tag, body)
    b.get(b"sync", LONG, "sync")


def test_a_handler_that_raises_at_what_came_before_fails_the_mailbox_too(
    boxes: tuple[Mailbox, Mailbox],
) -> None:
    a, b = boxes
    seen: list[bytes] = []

    def broken(tag: bytes, body: bytes) -> None:
        seen.append(body)
        raise KeyError(body)

    _filed(a, b, (b"c", b"1"), (b"c", b"2"))
    b.on(b"c", broken)
    with pytest.raises(LinkError, match=r"handler of b'c' from rank 0 failed: b'1'"):
        b.get(b"x", LONG, "x")
    a.send(b"c", b"3")
    b.close()
    assert seen == [b"1"]  # as on the reader thread, which ends at the first


def test_what_comes_while_earlier_messages_are_handled_waits_for_its_turn(
    boxes: tuple[Mailbox, Mailbox],
) -> None:
    a, b = boxes
    seen: list[bytes] = []
    done = threading.Event()

    def slow(tag: bytes, body: bytes) -> None:
        seen.append(body)
        if body == b"1":
            a.send(b"c", b"3")
            threads, errors = _waiters(b, 1)  # others get what is theirs meanwhile
            threads[0].join(LONG / 2)
            assert not threads[0].is_alive() and not errors
        if body == b"3":
            done.set()

    _filed(a, b, (b"c", b"1"), (b"c", b"2"), (b"0", b"filed"))
    b.on(b"c", slow)
    assert done.wait(LONG)
    assert seen == [b"1", b"2", b"3"]
