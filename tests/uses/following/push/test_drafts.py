"""Patches that are sent while they are made: who shares them, and what goes wrong half-way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from time import sleep

import pytest
import states
import torch
from states import draft
from tcp_proxy import TcpProxy
from waiting import HOST, LONG, until

from thinwire.state.history import CACHED, History
from thinwire.state.layout import Layout
from thinwire.state.patches import body
from thinwire.state.patches.draft import Draft
from thinwire.state.patches.patch import FIELDS, HEAD, Patch
from thinwire.state.replica import Replica
from thinwire.types import LinkError
from thinwire.uses.following.push.draft_maker import DraftMaker
from thinwire.uses.following.push.follower import Follower
from thinwire.uses.following.push.protocol import Begin, Chunk, End
from thinwire.uses.following.push.publisher import Publisher
from thinwire.uses.following.push.send_schedule import Order, SendSchedule
from thinwire.uses.following.push.state_relay import StateRelay

pytest.importorskip("zstandard")
HEADS = HEAD.size + FIELDS.size + len("{}")  # bytes before a patch's body
WIDTH = 20_000  # elements of each of four tensors; one section a tensor, once all of it changed


@pytest.fixture
def w(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    states.in_sections(monkeypatch, WIDTH)
    monkeypatch.setattr(body, "PAGE", WIDTH)
    return {f"w{i}": torch.randn(WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(4)}


class Held:
    """Sections of patches (``body.changes``) or keyframes (``body.whole``): each waits, and the end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch, self.room, self.made = monkeypatch, threading.Semaphore(0), 0
        self.error: Exception | None = None

    def __call__(self, kind: str = "changes") -> Held:
        self._make = getattr(body, kind)
        self._monkeypatch.setattr(body, kind, self._slowly)
        return self

    def _slowly(self, *args: object) -> Iterator[list[bytes]]:
        for section in self._make(*args):
            assert self.room.acquire(timeout=LONG)
            if self.error is not None:
                raise self.error
            self.made += 1
            yield section
        assert self.room.acquire(timeout=LONG)

    def let(self, sections: int = 1000) -> None:
        self.room.release(sections)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    made = Held(monkeypatch)
    yield made
    made.let()


def come(f: Follower) -> int:
    """Return how many bytes of a patch are here."""
    partial = f._reception._partial
    return 0 if partial is None else len(partial.data)


def train(w: dict[str, torch.Tensor]) -> None:
    for x in w.values():
        x *= 1.01  # each element moves, so that each tensor is a section


def same(f: Follower, w: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(x, w[name]) for name, x in f.tensors().items())


@pytest.mark.parametrize("kind", ["changes", "whole"])
def test_what_is_made_of_a_patch_is_sent_and_read_before_the_rest_is(
    w: dict[str, torch.Tensor], kind: str, held: Held
) -> None:
    with Publisher(w) as p:
        held(kind)
        with Follower(HOST, p.port, base=w if kind == "changes" else None) as f:
            p.publish()
            if kind == "changes":
                f.wait(1)
                train(w)
                p.publish()
            for sections in range(1, 4):
                here = come(f)
                held.let(1)
                until(lambda n=here: come(f) > n + WIDTH)  # each takes over a byte an element
                assert held.made == sections and f.held.number == p.newest.number - 1
            held.let()
            assert f.wait(p.newest.number).hash == p.newest.hash and same(f, w)
            assert f.arrivals[-1].nbytes > 4 * WIDTH


def test_a_draft_is_shared_while_it_is_made_and_by_relays(w: dict[str, torch.Tensor], held: Held) -> None:
    held("whole")
    with Publisher(w) as p, StateRelay(HOST, p.port) as r, Follower(HOST, r.port) as below:
        p.publish()
        held.let(1)
        until(lambda: any(one.sent > WIDTH for one in p.followers))  # the relay may still be on its way in
        with Follower(HOST, p.port) as late:
            until(lambda: come(late) > WIDTH)
            held.let()
            late.wait(1)
            below.wait(1)
            assert same(late, w) and same(below, w)
            assert held.made == 8  # four for both of the publisher's followers, four by the relay


@pytest.mark.parametrize("made", [2, 4])
def test_a_draft_whose_link_breaks_goes_on_where_it_broke_off(
    w: dict[str, torch.Tensor], made: int, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with all of the body here, and only its end missing."""
    with Publisher(w) as p, TcpProxy(p.port) as line, Follower(HOST, line.port, base=w) as f:
        p.publish()
        f.wait(1)
        held()
        train(w)
        p.publish()
        for _ in range(made):
            here = come(f)
            held.let(1)
            until(lambda n=here: come(f) > n + WIDTH)
        begun = []
        hear = f._reception._hear
        monkeypatch.setattr(f._reception, "_hear", lambda m: (begun.append(m), hear(m)))
        line.cut()
        line.restore()
        until(lambda: any(isinstance(m, Begin) for m in begun))
        held.let()
        assert f.wait(2).number == 2 and same(f, w)
        begun = begun[next(i for i, m in enumerate(begun) if isinstance(m, Begin)) :]
        start = begun[0].start
        assert start > made * WIDTH and not f._reception.failures
        assert (
            sum(len(m.data) for m in begun if isinstance(m, Chunk)) == f.arrivals[-1].nbytes - start - HEADS
        )


def test_a_patch_that_cannot_be_made_to_its_end_ends_the_feed(w: dict[str, torch.Tensor], held: Held) -> None:
    p = Publisher(w)
    with Follower(HOST, p.port, base=w) as f:
        p.publish()
        f.wait(1)
        held()
        train(w)
        p.publish()
        held.let(1)
        until(lambda: come(f) > WIDTH)
        held.error = MemoryError("no room for the rest")
        held.let()
        with pytest.raises(MemoryError, match="no room for the rest"):
            p.flush(LONG)
        p.close()
        assert f.held.number == 1


@pytest.mark.parametrize("relayed", [False, True])
def test_close_leaves_what_is_being_made_at_its_next_section(
    w: dict[str, torch.Tensor], held: Held, relayed: bool
) -> None:
    with Publisher(w) as p:
        p.publish()
        relay = StateRelay(HOST, p.port) if relayed else None
        if relay is not None:
            relay.wait(1)
        closed = relay or p
        held("whole")
        with Follower(HOST, closed.port) as f:
            held.let(1)
            until(lambda: come(f) > WIDTH)
            feed = closed._feed
            assert feed is not None
            closing = threading.Thread(target=closed.close)
            closing.start()
            until(lambda: feed._maker._closing)
            held.let()
            closing.join(LONG)
            assert not closing.is_alive() and held.made == 2
            closed.check()  # and that is no failure
        if relay is not None:
            held.made = 0
            with Follower(HOST, p.port) as f:  # the publisher itself goes on
                assert f.wait(1).number == 1 and same(f, w)


def test_futures_of_what_is_left_on_close_end_with_an_error(w: dict[str, torch.Tensor], held: Held) -> None:
    """Of what was begun, and of what still waited for its turn."""
    history = History(Layout.of(w))
    history.publish(w)
    train(w)
    history.publish(w)
    train(w)
    history.publish(w)
    held()
    making = DraftMaker(history, lambda: None)
    begun, second = making.start(Order(1, 1)), making.start(Order(2, 2))
    held.let(1)
    growing, whole = begun.result(LONG), making.start(Order(1, 3, compare=True))
    closing = threading.Thread(target=making.close)
    closing.start()
    until(lambda: making._closing)
    held.let()
    for future in (second, whole):
        with pytest.raises(LinkError, match="closed"):
            future.result(LONG)
    closing.join(LONG)
    assert not closing.is_alive() and not growing.whole and held.made == 2
    making.check()


def test_the_next_patch_waits_until_this_one_is_made(w: dict[str, torch.Tensor]) -> None:
    serving, growing = SendSchedule(), draft(5, 6, 20_000, whole=False)
    serving.hello(5, None, 0.0)
    order = serving.order(6, 0.0, 1.0)
    assert order is not None
    serving.made(order, growing, 0.0)
    total, now, ended = 0, 0.0, []
    for _ in range(20):
        sent = serving.messages(now)
        total += sum(len(m.data) for m in sent if isinstance(m, Chunk))
        ended += [m for m in sent if isinstance(m, End)]
        now += 0.1
        serving.pace.acked(total, now)
        assert serving.order(7, now, 0.001) is None  # to compare neither: nobody knows what is left
        if total == 20_000:
            growing.add([bytes(30_000)])
    assert total == 50_000 and not ended and serving.expected == 6
    growing.head = b"head"
    (end,) = serving.messages(now)
    assert end == End(1, 50_000, b"head") and serving.sending is None and len(serving.unproved) == 1
    assert serving.order(7, now, 0.001) is not None


def test_who_needs_a_newer_version_than_the_one_being_made_waits_for_another(
    w: dict[str, torch.Tensor], held: Held
) -> None:
    """And does not ask for it all the time."""
    history = History(Layout.of(w))
    held("whole")
    history.publish(w)
    called = []
    making = DraftMaker(history, lambda: called.append(1))
    first = making.start(Order(0, 1))
    held.let(1)
    assert first.result(LONG).version == 1 and not first.result().whole
    train(w)
    history.publish(w)
    later, n = making.start(Order(0, 2, above=1)), len(called)
    assert not later.done() and len(called) == n
    assert making.start(Order(0, 3)).result(LONG) is first.result()
    held.let()
    assert later.result(LONG).version == 1  # too old, and made: the next order gets one of its own
    again = making.start(Order(0, 4, above=1)).result(LONG)
    until(lambda: again.whole)
    assert again.version == 2
    making.close()


def test_whoever_waits_is_told_of_each_section_of_the_end_and_of_an_error(
    w: dict[str, torch.Tensor], held: Held
) -> None:
    history = History(Layout.of(w))
    held("whole")
    history.publish(w)
    called = list[int]()
    making = DraftMaker(history, lambda: called.append(1))
    future = making.start(Order(0, 1))
    for _ in range(4):
        before = len(called)
        held.let(1)
        until(lambda n=before: len(called) > n)
        sleep(0.05)
    before, growing = len(called), future.result(LONG)
    assert not growing.whole
    held.let(1)
    until(lambda: len(called) > before)
    assert growing.whole
    making.check()
    train(w)
    history.publish(w)
    again = making.start(Order(0, 2, above=1))
    held.let(1)
    again.result(LONG)
    before, held.error = len(called), OSError("in the midst")
    held.let(1)
    until(lambda: len(called) > before)
    with pytest.raises(OSError, match="in the midst"):
        making.check()
    making.close()


def test_a_patch_made_again_is_in_memory_once(w: dict[str, torch.Tensor]) -> None:
    history = History(Layout.of(w), budget=1 << 30)
    for _ in range(CACHED + 2):
        history.publish(w)
        train(w)
    making = DraftMaker(history, lambda: None)
    first = making.start(Order(1, 1)).result(LONG)
    until(lambda: first.whole)
    others = [making.start(Order(base, base)).result(LONG) for base in range(2, CACHED + 2)]
    again = making.start(Order(1, 99)).result(LONG)
    assert again is first and first in making.drafts()[0] and len(making.drafts()[0]) == len(others) + 1
    making.close()


def test_where_a_patch_made_to_compare_leads_is_never_forgotten(
    w: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not between its making and its sending either: the next patch starts from there, or is a keyframe."""
    history = History(Layout.of(w), budget=1)
    making = DraftMaker(history, lambda: None)
    history.keep(lambda: [draft.version for drafts in making.drafts() for draft in drafts])
    history.publish(w)
    finish, known = Draft.finish, list[bool]()

    def meanwhile(draft: Draft, patch: Patch) -> None:
        for _ in range(5):
            train(w)
            history.publish(w)
        known.append(history.knows(draft.version))
        finish(draft, patch)

    monkeypatch.setattr(Draft, "finish", meanwhile)
    train(w)
    history.keep(lambda: [1])  # what the follower holds
    history.publish(w)
    made = making.start(Order(1, 1, compare=True)).result(LONG)
    assert made.version == 2 and known == [True] and making.drafts()[0] == [made]
    making.close()


def test_small_tensors_made_first_do_not_pass_for_the_lead(w: dict[str, torch.Tensor], held: Held) -> None:
    """Narrow words come first: a section of a few bytes is no reason to begin the next patch late."""
    state = {"mask": torch.rand(9) < 0.5, **w}
    history = History(Layout.of(state))
    history.publish(state)
    train(w)
    history.publish(state)
    held()
    making = DraftMaker(history, lambda: None)
    begun = making.start(Order(1, 1))
    held.let(1)
    assert begun.result(LONG).nbytes < 100
    sleep(0.5)
    held.let()
    until(lambda: making.seconds > 0)
    assert 0.2 < making.lead <= making.seconds  # half of the newest measurement
    making.close()


def test_a_keyframe_in_sections_is_read_as_in_one(w: dict[str, torch.Tensor]) -> None:
    state = w | {"n": torch.arange(9), "b": torch.rand(5) < 0.5, "half": torch.randn(50_000).half()}
    history = History(Layout.of(state))
    version = history.publish(state)
    sizes = list[int]()
    patch = history.patch(more=lambda growing: sizes.append(growing.nbytes))
    words = {layout.word.itemsize for layout in history.layout.slots}
    assert len(sizes) - 1 == patch.body[1] > len(words) + 1 and sizes[-1] == sizes[-2] == len(patch.body)
    replica = Replica(history.layout)
    assert replica.apply(states.over_the_wire(patch)).hash == version.hash
    replica.swap()
    assert states.same(replica.tensors(), state)
