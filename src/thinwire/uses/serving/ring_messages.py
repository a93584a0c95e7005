"""What stages say to each other: requests that begin and end, their tokens' hidden states, tokens picked.

On the link, behind a byte for the kind, little-endian: ``Open`` and ``Close`` as declared. A pass is a number
of portions u16, then for each: request u32, position u32, tokens u32, wanted u16, places kept u8, drafts
asked for u8, bytes u32; the tokens u32 of wanted - 1 drafts, then their parents u8, from 1; the places u32;
of each draft asked for its parent u8, from 1, and its rank u8. Then the packets. Tokens picked are a number
of requests u16, then for each: request u32, position u32, count u16, drafts u16, microseconds u32, tokens
u32, drafts u32.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from thinwire.heads import U32, Head, Rest
from thinwire.types import PayloadError, require
from thinwire.uses.serving.choosing.draft_tree import DraftTree
from thinwire.uses.serving.row_pool import NO_COPY, RowCopy, TextRows, TextSegment
from thinwire.uses.serving.stored_blocks import HASH
from thinwire.uses.serving.token_picking import Picking

NO_DRAFTS = DraftTree()
MOST_PORTIONS, MOST_TOKENS = 4096, 1 << 20
COUNT = struct.Struct("<H")
PORTION = struct.Struct("<IIIHBBI")
PICKED = struct.Struct("<IIHHI")


class RingKind(IntEnum):
    """What a message to the next stage says."""

    OPEN, PASS, CLOSE, STOP, SEEK, SAVE = 1, 2, 3, 4, 5, 6


class Open(Head, kind=RingKind.OPEN):
    """A request begins, in these rows of every cache; ``picking``: JSON.

    Its first ``copied`` tokens are copied from the rows that begin with ``source``, or those of its first
    ``stored`` blocks are put there that ``Seek`` asked for.
    ``tail``: bytes of the last tokens of its prompt, u32 each, which stand before it; ``tail_at``: the
    position of the first of them.
    """

    request: U32
    first: U32
    many: U32
    source: U32
    copied: U32
    stored: U32
    tail_at: U32
    tail: U32
    rest: Rest

    @classmethod
    def of(
        cls,
        request: int,
        rows: TextRows,
        picking: Picking,
        tail: Sequence[int] = (),
        tail_at: int = 0,
        copy: RowCopy = NO_COPY,
        stored: int = 0,
    ) -> Open:
        """Return the message for a request."""
        told = struct.pack(f"<{len(tail)}I", *tail)
        rest = told + json.dumps(picking.plain()).encode()
        return cls(request, *rows, *copy, stored, tail_at, len(told), rest)

    @property
    def copy(self) -> RowCopy:
        """What is copied to its rows."""
        return RowCopy(self.source, self.copied)

    def read(self) -> tuple[TextRows, Picking]:
        """Return its rows, and how its tokens are picked. Errors: ``PayloadError``."""
        try:
            values = json.loads(bytes(self.rest[self.tail :]))
        except ValueError as e:
            raise PayloadError(f"a request that is no JSON: {e}") from e
        require(isinstance(values, dict), PayloadError, "a request without fields")
        return TextRows(self.first, self.many), Picking.read(values)

    def read_tail(self) -> tuple[int, ...]:
        """Return the last tokens of its prompt. Errors: ``PayloadError``."""
        good = self.tail % 4 == 0 and self.tail <= len(self.rest)
        require(good, PayloadError, f"{self.tail} bytes of tokens in {len(self.rest)}")
        found: tuple[int, ...] = struct.unpack_from(f"<{self.tail // 4}I", self.rest)
        return found


class Seek(Head, kind=RingKind.SEEK):
    """A request will come: a stage reads its stored blocks of these names, and passes on those it found."""

    request: U32
    names: Rest

    def split(self) -> list[bytes]:
        """Return the names."""
        return _split(self.names)


class Save(Head, kind=RingKind.SAVE):
    """All tokens of these blocks, from number ``first`` of a request on, have gone by: they can be stored."""

    request: U32
    first: U32
    names: Rest

    def split(self) -> list[bytes]:
        """Return the names."""
        return _split(self.names)


class Sought(Head):
    """So many blocks of a request are stored at all stages: what the last one says to the first."""

    request: U32
    blocks: U32


def _split(names: bytes | memoryview) -> list[bytes]:
    require(len(names) % HASH == 0, PayloadError, f"names of blocks in {len(names)} bytes")
    return [bytes(names[i : i + HASH]) for i in range(0, len(names), HASH)]


class Close(Head, kind=RingKind.CLOSE):
    """A request is over."""

    request: U32


STOP = bytes([RingKind.STOP])  # the first stage ends


@dataclass
class Portion:
    """A segment on its way: its hidden states as a packet, and what is wanted of it.

    ``wanted``: of how many of its last tokens the next token is wanted. ``drafted``: the last ``wanted`` - 1
    tokens, which are drafts, and the segment says how they hang together. ``ahead``: the drafts that the last
    stage is to send with what it picks. ``kept``: where in the request's rows the drafts are that were right
    in the last round; they are moved to the places right before this segment first.
    """

    segment: TextSegment
    wanted: int = 0
    drafted: tuple[int, ...] = ()
    ahead: DraftTree = NO_DRAFTS
    kept: tuple[int, ...] = ()
    packet: bytes | memoryview = b""


def pack_pass(portions: Sequence[Portion]) -> bytes:
    """Return portions as a message."""
    heads = [bytes([RingKind.PASS]), COUNT.pack(len(portions))]
    for p in portions:
        s, parents = p.segment, p.segment.parents or range(-1, p.wanted - 2)
        counts = len(p.kept), len(p.ahead.ranks)
        heads.append(PORTION.pack(s.request, s.at, s.many, p.wanted, *counts, len(p.packet)))
        heads.append(struct.pack(f"<{len(p.drafted)}I", *p.drafted))
        heads.append(bytes(1 + parent for parent in parents[: len(p.drafted)]))
        heads.append(struct.pack(f"<{len(p.kept)}I", *p.kept))
        heads.append(bytes(b for pair in zip(*p.ahead, strict=True) for b in (1 + pair[0], pair[1])))
    return b"".join((*heads, *(p.packet for p in portions)))


def unpack_pass(data: bytes, rows: Mapping[int, TextRows], total: int) -> list[Portion]:
    """Return the portions in a message, for requests with these ``rows`` of ``total``.

    Errors: ``PayloadError`` for a request that is not open, or tokens that are not within its rows.
    """
    found, sizes = list[Portion](), list[int]()
    try:
        at, (many,) = 1 + COUNT.size, COUNT.unpack_from(data, 1)
        require(0 < many <= MOST_PORTIONS, PayloadError, f"a pass of {many} portions")
        for _ in range(many):
            request, start, tokens, wanted, places, ahead, nbytes = PORTION.unpack_from(data, at)
            require(request in rows, PayloadError, f"request {request} is not open")
            require(wanted <= tokens <= MOST_TOKENS, PayloadError, f"{wanted} of {tokens} tokens are wanted")
            drafts = max(0, wanted - 1)
            told = struct.unpack_from(f"<{drafts}I{drafts}B{places}I{2 * ahead}B", data, at + PORTION.size)
            at += PORTION.size + 5 * drafts + 4 * places + 2 * ahead
            drafted, told = told[:drafts], told[drafts:]
            parents, told = tuple(b - 1 for b in told[:drafts]), told[drafts:]
            kept, told = told[:places], told[places:]
            tree = DraftTree(tuple(b - 1 for b in told[::2]), told[1::2])
            segment = TextSegment(request, rows[request], start, tokens, _tree(parents))
            segment.check(total)
            _check(kept, start, rows[request], tree)
            found.append(Portion(segment, wanted, drafted, tree, kept))
            sizes.append(nbytes)
    except struct.error as e:
        raise PayloadError(f"a pass of {len(data)} bytes is cut off") from e
    require(
        at + sum(sizes) == len(data), PayloadError, f"a pass of {len(data)} bytes, expected {at + sum(sizes)}"
    )
    for portion, size in zip(found, sizes, strict=True):
        portion.packet = memoryview(data)[at : at + size]
        at += size
    return found


def _tree(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Return parents, none where each stands behind the one before."""
    return () if DraftTree(parents).is_chain else parents


def _check(kept: Sequence[int], at: int, rows: TextRows, ahead: DraftTree) -> None:
    """Raise ``PayloadError`` for places or drafts that cannot be."""
    good = len(kept) <= at and all(at - len(kept) <= place < rows.many for place in kept)
    require(good, PayloadError, f"drafts at {kept} of {rows.many} rows, before {at}")
    require(ahead.is_ordered, PayloadError, f"drafts are asked for by a tree {ahead.parents}")


class Picked(NamedTuple):
    """Tokens that the last stage picked for a request: those of positions ``at``, ``at`` + 1, ...

    ``drafts``: what it proposes behind them; ``micros``: how long those of one depth took, 1e-6 s.
    """

    request: int
    at: int
    tokens: tuple[int, ...]
    drafts: tuple[int, ...] = ()
    micros: int = 0


def pack_picked(picked: Sequence[Picked]) -> bytes:
    """Return picked tokens as a message."""
    parts = [COUNT.pack(len(picked))]
    for p in picked:
        parts.append(PICKED.pack(p.request, p.at, len(p.tokens), len(p.drafts), p.micros))
        parts.append(struct.pack(f"<{len(p.tokens) + len(p.drafts)}I", *p.tokens, *p.drafts))
    return b"".join(parts)


def unpack_picked(data: bytes) -> list[Picked]:
    """Return the tokens in a message. Errors: ``PayloadError``."""
    found = list[Picked]()
    try:
        (many,), at = COUNT.unpack_from(data), COUNT.size
        for _ in range(many):
            request, start, count, drafts, micros = PICKED.unpack_from(data, at)
            tokens = struct.unpack_from(f"<{count + drafts}I", data, at + PICKED.size)
            found.append(Picked(request, start, tokens[:count], tokens[count:], micros))
            at += PICKED.size + 4 * (count + drafts)
    except struct.error as e:
        raise PayloadError(f"picked tokens of {len(data)} bytes are cut off") from e
    require(at == len(data), PayloadError, f"picked tokens of {len(data)} bytes, expected {at}")
    return found
