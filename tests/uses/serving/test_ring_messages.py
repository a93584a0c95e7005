"""What stages say to each other comes out as it went in, and nonsense is refused."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.types import PayloadError
from thinwire.uses.serving.choosing.draft_tree import DraftTree
from thinwire.uses.serving.ring_messages import (
    Open,
    Picked,
    Portion,
    pack_pass,
    pack_picked,
    unpack_pass,
    unpack_picked,
)
from thinwire.uses.serving.row_pool import RowAllocator, RowCopy, TextRows, TextSegment
from thinwire.uses.serving.token_picking import Picking, agreed

ROWS = {1: TextRows(0, 40), 9: TextRows(40, 60)}
PASS = [
    Portion(TextSegment(1, ROWS[1], 3, 5), 3, (7, 8), DraftTree((-1, 0, 0), (0, 0, 1)), (2, 2), b"abc"),
    Portion(TextSegment(9, ROWS[9], 0, 20)),
    Portion(TextSegment(9, ROWS[9], 20, 4, (-1, 0, -1)), 4, (7, 8, 9)),
]


def test_messages_come_out_as_they_went_in() -> None:
    found = unpack_pass(pack_pass(PASS), ROWS, 100)
    assert [replace(p, packet=bytes(p.packet)) for p in found] == PASS
    picked = [Picked(1, 8, (5, 6), (4, 3, 2), 900), Picked(9, 20, (1,))]
    assert unpack_picked(pack_picked(picked)) == picked
    picking = Picking(0.7, 0.9, 40, 3)
    opened = Open.unpack(Open.of(4, ROWS[9], picking, copy=RowCopy(7, 30)).pack())
    assert opened.read() == (ROWS[9], picking) and opened.copy == (7, 30)


def test_nonsense_is_refused_and_nothing_else_happens() -> None:
    draw, whole = random.Random(0), [pack_pass(PASS), pack_picked([Picked(1, 8, (5, 6))])]
    for _ in range(4000):
        data = bytearray(draw.choice(whole))
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        cut = bytes(data[: draw.randint(0, len(data))])
        with suppress(PayloadError):
            for p in unpack_pass(cut, ROWS, 100):
                assert p.segment.rows.first + p.segment.at + p.segment.many <= 100
        with suppress(PayloadError):
            unpack_picked(cut)
    with pytest.raises(PayloadError, match="request 2 is not open"):
        unpack_pass(pack_pass([Portion(TextSegment(2, ROWS[1], 0, 1))]), ROWS, 100)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5)), max_size=40))
def test_rows_are_never_given_twice(asked: list[tuple[int, int]]) -> None:
    rows, held = RowAllocator(100), list[TextRows]()
    for many, back in asked:
        found = rows.take(many)
        if found is not None:
            held.append(found)
        if held and back < len(held):
            rows.give_back(held.pop(back))
        taken = [r for one in held for r in range(one.first, one.end)]
        assert len(taken) == len(set(taken)) == 100 - rows.free and all(r < 100 for r in taken)


def test_a_draw_depends_on_seed_and_position_and_has_the_model_s_shares() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    drawn = torch.tensor([Picking(1.0, seed=5).pick(logits, at) for at in range(4000)])
    shares = drawn.bincount(minlength=4) / 4000
    assert torch.allclose(shares, logits.softmax(0), atol=0.03)
    assert [Picking(1.0, seed=5).pick(logits, at) for at in range(50)] == drawn[:50].tolist()
    assert {Picking(5.0, top_k=2, seed=1).pick(logits, at) for at in range(200)} == {0, 1}
    assert {Picking(5.0, top_p=0.3, seed=1).pick(logits, at) for at in range(200)} == {0}
    assert agreed(logits.expand(4, 4), [0, 0, 3], 0, Picking()) == ([0, 0, 0], [0, 1])
    # A tree: behind the token 1 and 0, behind 0 again 2 and 0; the likeliest are 0, 0 and 0.
    assert agreed(logits.expand(5, 4), [1, 0, 2, 0], 0, Picking(), (-1, -1, 1, 1)) == ([0, 0, 0], [1, 3])
