"""What a follower is sent next: chunks, patches given up for smaller ones, what is sent again."""

from __future__ import annotations

import pytest
import states
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from states import draft

from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.types import PayloadError
from thinwire.uses.following.push.draft_maker import DraftMaker
from thinwire.uses.following.push.protocol import Abandon, Begin, Chunk, End, Message
from thinwire.uses.following.push.send_schedule import MIN_CHUNK, Order, SendSchedule, useless


def test_what_is_sent_of_a_patch_is_the_patch_and_the_history_s_own_bytes() -> None:
    pytest.importorskip("zstandard")
    history = History(Layout.of({"w": torch.zeros(5000)}))
    history.publish({"w": torch.randn(5000)})
    patch, making = history.patch(), DraftMaker(history, lambda: None)
    made = making.start(Order(0, 1)).result(60.0)
    making.close()
    assert made.body is patch.body and made.whole and made.head + made.body == patch.pack()
    assert bytes(made.cut(0, made.nbytes)) == patch.body


def test_a_follower_that_acknowledges_nothing_gets_two_chunks() -> None:
    serving = SendSchedule()
    serving.hello(0, None, 0.0)
    order = serving.order(1, 0.0, 0.0)
    assert order == Order(0, 1)
    serving.made(order, draft(0, 1, 1 << 20), 0.0)
    sent = serving.messages(0.0)
    assert [type(m) for m in sent] == [Begin, Chunk, Chunk]
    assert all(not serving.messages(float(t)) for t in range(1000))
    assert serving.pace.flight == 2 * MIN_CHUNK


def started(base: int = 5, version: int = 6, nbytes: int = 2_000_000) -> tuple[SendSchedule, Begin]:
    """A serving in the middle of a transfer, with a window that is known."""
    serving = SendSchedule()
    serving.hello(base, None, 0.0)
    order = serving.order(version, 0.0, 0.0)
    assert order is not None and order.base == base
    serving.made(order, draft(base, version, nbytes), 0.0)
    now, total, begin = 0.0, 0, None
    for _ in range(4):
        for m in serving.messages(now):
            begin = m if isinstance(m, Begin) else begin
            total += len(m.data) if isinstance(m, Chunk) else 0
        now += 0.1
        serving.pace.acked(total, now)
    assert begin is not None
    return serving, begin


def test_a_transfer_is_given_up_where_a_fresh_patch_is_smaller_than_what_is_left() -> None:
    serving, begin = started()
    order = serving.order(7, 1.0, 0.001)  # only to compare: from the same base
    assert order is not None and order.base == 5
    serving.made(order, draft(5, 7, 20_000), 1.1)
    told = serving.messages(1.1)
    assert told[0] == Abandon(begin.transfer, 7)
    assert isinstance(told[1], Begin) and (told[1].base, told[1].version) == (5, 7)
    assert serving.abandoned == 1 and isinstance(told[2], Chunk) and told[2].at == 0


def test_a_transfer_goes_on_where_a_fresh_patch_is_larger() -> None:
    serving, begin = started()
    order = serving.order(7, 1.0, 0.001)
    assert order is not None
    at = serving.sending.at if serving.sending else 0
    serving.made(order, draft(5, 7, 2_400_000), 1.1)
    told = serving.messages(1.1)
    assert all(isinstance(m, Chunk) and m.transfer == begin.transfer for m in told)
    assert isinstance(told[0], Chunk) and told[0].at == at and not serving.abandoned
    assert serving.order(7, 1.2, 0.001) is None  # the same version is not compared twice


def test_comparing_takes_a_tenth_of_the_time_at_most_and_keyframes_are_not_compared() -> None:
    serving, _ = started()
    assert serving.order(7, 0.5, 0.1) is None  # 0.1 s of work after 0.5 s of sending
    assert serving.order(7, 1.1, 0.1) is not None
    keyframe, _ = started(base=0)
    assert keyframe.order(7, 5.0, 0.001) is None


@settings(deadline=None)
@given(left=st.integers(0, 10**9), fresh=st.integers(1, 10**9))
def test_giving_up_never_costs_bytes(left: int, fresh: int) -> None:
    assert min(left, fresh) == (fresh if useless(left, fresh) else left)


def test_again_starts_from_what_is_held_and_counts_once() -> None:
    serving, begin = started()
    serving.again(begin.transfer, 0)
    assert serving.messages(1.0) == [Abandon(begin.transfer, 0)]
    order = serving.order(6, 1.0, 0.0)
    assert order is not None and order.base == 0
    serving.again(begin.transfer, 5)  # about the same transfer: known already
    serving.made(order, draft(0, 6, 5000), 1.0)
    assert isinstance(serving.messages(1.0)[0], Begin)


def test_a_late_patch_for_a_follower_that_began_anew_is_dropped() -> None:
    serving = SendSchedule()
    serving.hello(3, None, 0.0)
    order = serving.order(6, 0.0, 0.0)
    serving.hello(5, None, 1.0)
    assert order is not None
    serving.made(order, draft(3, 6, 100), 1.0)
    assert serving.messages(1.0) == []
    again = serving.order(6, 1.0, 0.0)
    assert again is not None and again.base == 5


def test_after_again_nothing_older_than_what_was_held_will_do() -> None:
    serving = SendSchedule()
    serving.hello(1, None, 0.0)
    order = serving.order(2, 0.0, 0.0)
    assert order is not None
    serving.made(order, draft(1, 2, 10), 0.0)
    (begin, _, end) = serving.messages(0.0)
    assert isinstance(begin, Begin) and isinstance(end, End) and serving.done(begin.transfer, 2, 1002)
    serving.pace.acked(10, 0.5)
    serving.again(begin.transfer, 0)
    order = serving.order(3, 1.0, 0.0)
    assert order == Order(0, order.number if order else 0, above=2)
    serving.made(order, draft(0, 2, 10), 1.0)  # of somebody else's job
    assert not [m for m in serving.messages(1.0) if isinstance(m, Begin)]
    again = serving.order(3, 1.0, 0.0)
    assert again is not None and again.above == 2


def test_a_follower_is_never_sent_what_looks_older_to_it() -> None:
    serving = SendSchedule()
    serving.hello(1, None, 0.0, floor=57)  # it calls version 1 number 57: an earlier life's
    assert serving.order(57, 0.0, 0.0) is None
    assert serving.order(58, 0.0, 0.0) == Order(1, 1, above=57)


def test_a_part_goes_on_where_it_broke_off() -> None:
    serving, kept = SendSchedule(), draft(0, 6, 100_000)
    serving.hello(0, (kept, 60_000), 0.0)
    begin, chunk, *_ = serving.messages(0.0)
    assert isinstance(begin, Begin) and begin.start == 60_000
    assert isinstance(chunk, Chunk) and chunk.at == 60_000


def test_done_for_another_version_is_an_error_and_for_an_unknown_transfer_nothing() -> None:
    serving, begin = started(nbytes=20_000)
    assert not serving.done(99, 6, 1006)
    with pytest.raises(PayloadError, match="version 7 is held where 6 was sent"):
        serving.done(begin.transfer, 7, 1007)


def test_what_the_link_does_not_take_is_sent_again() -> None:
    serving = SendSchedule()
    serving.hello(0, None, 0.0)
    order = serving.order(1, 0.0, 0.0)
    assert order is not None
    serving.made(order, states.draft(0, 1, 20_000), 0.0)
    asked, total = list[Message](), 0

    def send(message: Message) -> bool:
        asked.append(message)
        return len(asked) % 2 == 0  # each message twice

    sent = list[Message]()
    for i in range(20):
        found = serving.messages(float(i), send)
        total += sum(len(m.data) for m in found if isinstance(m, Chunk))
        serving.pace.acked(total, i + 0.5)
        sent += found
    chunks = [m for m in sent if isinstance(m, Chunk)]
    assert isinstance(sent[0], Begin) and sent[1:-1] == chunks and isinstance(sent[-1], End)
    assert [c.at for c in chunks] == [sum(len(c.data) for c in chunks[:i]) for i in range(len(chunks))]
    assert total == 20_000 and not serving.sending and len(serving.unproved) == 1
