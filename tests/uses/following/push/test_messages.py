"""The messages between publishers and followers: round trips, hostile bytes, partials."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.state.patches import draft
from thinwire.state.patches.draft import Draft
from thinwire.types import PayloadError
from thinwire.uses.following.push.protocol import (
    DOWN,
    MAGIC,
    UP,
    Ack,
    Again,
    Begin,
    Chunk,
    Done,
    End,
    Hello,
    Message,
    unpack,
)
from thinwire.uses.following.push.reception import PartialPatch


@settings(deadline=None)
@given(st.lists(st.binary(max_size=9), max_size=9), st.integers(0, 60), st.integers(1, 60))
def test_a_draft_is_cut_as_if_its_parts_were_one(parts: list[bytes], start: int, n: int) -> None:
    cut, body = Draft(0, 0, 1, 1), b"".join(parts)
    cut.add(parts[:2])
    cut.add(parts[2:])
    assert cut.nbytes == len(body) and bytes(cut.cut(start, n)) == body[start : start + n] and not cut.whole
    assert cut.crc == zlib.crc32(body)
    for large in (draft.LARGE, 0):  # joined by numpy from there on
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(draft, "LARGE", large)
            assert cut.body == body


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_hostile_messages_are_payload_errors_or_messages(data: bytes) -> None:
    for kinds in (UP, DOWN):
        try:
            found = unpack(data, kinds)
        except PayloadError:
            continue
        assert found.pack() == data


def test_messages_read_back() -> None:
    messages: list[Message] = [
        Hello(MAGIC, 1, 7, bytes(16), b"d" * 16, 1, 2, 3, 4, 5, 6, 7),
        Ack(1, 2),
        Done(1, 2, 3, 4),
        Again(1, 2, 3, 4),
    ]
    for m in messages:
        assert unpack(m.pack(), UP) == m
    assert bytes(unpack(Chunk(1, 2, b"abc").pack(), DOWN).data) == b"abc"
    with pytest.raises(PayloadError):
        unpack(Ack(1, 2).pack() + b"x", UP)
    with pytest.raises(PayloadError):
        unpack(b"", UP)


def test_a_landing_takes_only_the_next_bytes() -> None:
    begin = Begin(1, 0, 0, 1, 2, 0)
    partial = PartialPatch(begin, 10)
    with pytest.raises(PayloadError, match="the end of a patch of 0 bytes"):
        partial.end(End(1, 0, b"head"))
    partial.add(Chunk(1, 0, b"12345"))
    for at, data, why in ((0, b"1", "expected at 5"), (6, b"1", "expected at 5"), (5, b"", "0 bytes"),
                          (5, b"123456", "over 10 bytes")):  # fmt: skip
        with pytest.raises(PayloadError, match=why):
            partial.add(Chunk(1, at, data))
    assert partial.continued_by(Begin(9, 0, 0, 1, 2, 5))
    assert not partial.continued_by(Begin(9, 0, 0, 1, 2, 4))
    assert not partial.continued_by(Begin(9, 0, 0, 2, 2, 5))
    partial.add(Chunk(1, 5, b"67890"))
    assert not partial.whole and bytes(partial.data[:]) == b"1234567890"
    for end in (End(1, 9, b"head"), End(1, 11, b"head"), End(1, 10, b"")):
        with pytest.raises(PayloadError, match="of which 10 are here"):
            partial.end(end)
    partial.end(End(1, 10, b"head"))
    assert partial.whole and partial.ended
    with pytest.raises(PayloadError, match="begins at byte 4"):
        PartialPatch(Begin(1, 0, 0, 1, 2, 4), 100)
