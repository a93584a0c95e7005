"""What stages say to each other: requests that begin and end, their tokens' hidden states, tokens picked.

On the link, behind a byte for the kind, little-endian: ``Open`` and ``Close`` as declared. A pass is a number
of portions u16, then for each: request u32, position u32, tokens u32, wanted u16, bytes u32, and wanted - 1
drafted tokens u32; then the packets. Tokens picked: a number of requests u16, then for each: request u32,
position u32, count u16, tokens u32.
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
from thinwire.uses.serving.row_pool import TextRows, TextSegment
from thinwire.uses.serving.token_picking import Picking

MOST_PORTIONS, MOST_TOKENS = 4096, 1 << 20
COUNT = struct.Struct("<H")
PORTION = struct.Struct("<IIIHI")
PICKED = struct.Struct("<IIH")


class RingKind(IntEnum):
    """What a message to the next stage says."""

    OPEN, PASS, CLOSE, STOP = 1, 2, 3, 4


class Open(Head, kind=RingKind.OPEN):
    """A request begins, in these rows of every cache; ``picking``: JSON."""

    request: U32
    first: U32
    many: U32
    picking: Rest

    @classmethod
    def of(cls, request: int, rows: TextRows, picking: Picking) -> Open:
        """Return the message for a request."""
        return cls(request, rows.first, rows.many, json.dumps(picking.plain()).encode())

    def read(self) -> tuple[TextRows, Picking]:
        """Return its rows, and how its tokens are picked. Errors: ``PayloadError``."""
        try:
            values = json.loads(bytes(self.picking))
        except ValueError as e:
            raise PayloadError(f"a request that is no JSON: {e}") from e
        require(isinstance(values, dict), PayloadError, "a request without fields")
        return TextRows(self.first, self.many), Picking.read(values)


class Close(Head, kind=RingKind.CLOSE):
    """A request is over."""

    request: U32


STOP = bytes([RingKind.STOP])  # the first stage ends


@dataclass
class Portion:
    """A segment on its way: its hidden states as a packet, and what is wanted of it.

    ``wanted``: of how many of its last tokens the next token is wanted. ``drafted``: the last ``wanted`` - 1
    tokens, which are drafts.
    """

    segment: TextSegment
    wanted: int = 0
    drafted: tuple[int, ...] = ()
    packet: bytes | memoryview = b""


def pack_pass(portions: Sequence[Portion]) -> bytes:
    """Return portions as a message."""
    heads = [bytes([RingKind.PASS]), COUNT.pack(len(portions))]
    for p in portions:
        s = p.segment
        heads.append(PORTION.pack(s.request, s.at, s.many, p.wanted, len(p.packet)))
        heads.append(struct.pack(f"<{len(p.drafted)}I", *p.drafted))
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
            request, start, tokens, wanted, nbytes = PORTION.unpack_from(data, at)
            require(request in rows, PayloadError, f"request {request} is not open")
            require(wanted <= tokens <= MOST_TOKENS, PayloadError, f"{wanted} of {tokens} tokens are wanted")
            drafted = struct.unpack_from(f"<{max(0, wanted - 1)}I", data, at + PORTION.size)
            at += PORTION.size + 4 * len(drafted)
            segment = TextSegment(request, rows[request], start, tokens)
            segment.check(total)
            found.append(Portion(segment, wanted, drafted))
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


class Picked(NamedTuple):
    """Tokens that the last stage picked for a request: those of positions ``at``, ``at`` + 1, ..."""

    request: int
    at: int
    tokens: tuple[int, ...]


def pack_picked(picked: Sequence[Picked]) -> bytes:
    """Return picked tokens as a message."""
    parts = [COUNT.pack(len(picked))]
    for p in picked:
        parts.append(PICKED.pack(p.request, p.at, len(p.tokens)))
        parts.append(struct.pack(f"<{len(p.tokens)}I", *p.tokens))
    return b"".join(parts)


def unpack_picked(data: bytes) -> list[Picked]:
    """Return the tokens in a message. Errors: ``PayloadError``."""
    found = list[Picked]()
    try:
        (many,), at = COUNT.unpack_from(data), COUNT.size
        for _ in range(many):
            request, start, count = PICKED.unpack_from(data, at)
            found.append(Picked(request, start, struct.unpack_from(f"<{count}I", data, at + PICKED.size)))
            at += PICKED.size + 4 * count
    except struct.error as e:
        raise PayloadError(f"picked tokens of {len(data)} bytes are cut off") from e
    require(at == len(data), PayloadError, f"picked tokens of {len(data)} bytes, expected {at}")
    return found
