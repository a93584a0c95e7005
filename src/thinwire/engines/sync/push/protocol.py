"""The messages between a publisher's feed and a follower, each one frame: a kind, fixed fields, maybe a tail.

After every connect a follower says HELLO and what it holds. The feed answers with LAYOUT, then come patches:
BEGIN, CHUNK..., and END, or ABANDON where a newer one made the rest useless. The follower acknowledges bytes
(ACK), versions (DONE), or says that it could not use what came (AGAIN). ASK: the feed does not know this
follower.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from thinwire.types import PayloadError, require

PROTOCOL = 3
MAGIC = b"TWSY"
MAX_NAME = 64  # bytes of a state's name
NOTHING = bytes(16)  # in place of an instance or a digest


@dataclass(frozen=True)
class Message:
    """A message with fields of fixed size; ``tail`` where the last field takes the bytes that are left."""

    KIND: ClassVar[int]
    FIELDS: ClassVar[struct.Struct]
    TAIL: ClassVar[bool] = False

    def pack(self) -> bytes:
        """Return the message as bytes."""
        values: list[Any] = [getattr(self, f.name) for f in fields(self)]
        tail = values.pop() if self.TAIL else b""
        return b"".join((bytes([self.KIND]), self.FIELDS.pack(*values), tail))

    @classmethod
    def unpack(cls, body: memoryview) -> Self:
        """Return the message whose fields are in ``body``; ``PayloadError`` where it is too short or long."""
        size = cls.FIELDS.size
        fits = len(body) >= size if cls.TAIL else len(body) == size
        require(fits, PayloadError, f"a {cls.__name__.upper()} of {len(body)} bytes, expected {size}")
        tail = [body[size:]] if cls.TAIL else []
        return cls(*cls.FIELDS.unpack(body[:size]), *tail)


@dataclass(frozen=True)
class Hello(Message):
    """What a follower holds: a version of a publisher's life (instance), and part of a patch to another."""

    magic: bytes
    protocol: int
    session: int  # of this HELLO; what belongs to another one does not count any more
    instance: bytes  # whose version numbers these are; NOTHING: none
    layout: bytes  # digest; NOTHING where the layout is not known yet
    version: int
    hash: int
    above: int  # newest version number known to it or to those it relays to
    part_base: int
    part_version: int
    part_hash: int
    part: int  # bytes of its body
    KIND = 1
    FIELDS = struct.Struct("<4sBI16s16sQQQQQQQ")


@dataclass(frozen=True)
class Ack(Message):
    """How many bytes of chunks have come since HELLO."""

    session: int
    received: int
    KIND = 2
    FIELDS = struct.Struct("<IQ")


@dataclass(frozen=True)
class Done(Message):
    """A transfer was applied, and its version is held now."""

    session: int
    transfer: int
    version: int
    hash: int
    KIND = 3
    FIELDS = struct.Struct("<IIQQ")


@dataclass(frozen=True)
class Again(Message):
    """A transfer could not be used: ``version`` is still held, or a keyframe is needed (0)."""

    session: int
    transfer: int
    version: int
    hash: int
    KIND = 4
    FIELDS = struct.Struct("<IIQQ")


@dataclass(frozen=True)
class LayoutIs(Message):
    """Whose versions these are, and of what; the JSON is left out where the follower has it."""

    protocol: int
    session: int
    instance: bytes
    layout: bytes
    newest: int
    name: bytes  # padded with zero bytes
    json: memoryview
    KIND = 16
    FIELDS = struct.Struct(f"<BI16s16sQ{MAX_NAME}s")
    TAIL = True


@dataclass(frozen=True)
class Begin(Message):
    """A patch follows, from byte ``start`` of its body on; it may not be made to its end yet."""

    transfer: int
    base: int
    base_hash: int
    version: int
    hash: int
    start: int
    KIND = 17
    FIELDS = struct.Struct("<IQQQQQ")


@dataclass(frozen=True)
class Chunk(Message):
    """The bytes of a patch's body from ``at`` on."""

    transfer: int
    at: int
    data: memoryview | bytes
    KIND = 18
    FIELDS = struct.Struct("<IQ")
    TAIL = True


@dataclass(frozen=True)
class End(Message):
    """The body of a patch, ``nbytes`` long, is complete; this is its head."""

    transfer: int
    nbytes: int
    head: memoryview | bytes
    KIND = 23
    FIELDS = struct.Struct("<IQ")
    TAIL = True


@dataclass(frozen=True)
class Abandon(Message):
    """The rest of a transfer will not come: version ``newer`` makes it useless."""

    transfer: int
    newer: int
    KIND = 19
    FIELDS = struct.Struct("<IQ")


@dataclass(frozen=True)
class Same(Message):
    """What the follower holds has the contents of the newest version, which is called so here.

    ``meta``: the version's, as JSON.
    """

    version: int
    hash: int
    published: float
    meta: memoryview | bytes = b""
    KIND = 21
    FIELDS = struct.Struct("<QQd")
    TAIL = True


@dataclass(frozen=True)
class Ask(Message):
    """The feed does not know this follower: it should say HELLO. ``protocol`` is the feed's."""

    protocol: int
    KIND = 20
    FIELDS = struct.Struct("<B")


@dataclass(frozen=True)
class Quiet(Message):
    """A relay has had no sign of its publisher for so many ``seconds``; 0 once there is one again."""

    seconds: float
    KIND = 22
    FIELDS = struct.Struct("<d")


UP = {m.KIND: m for m in (Hello, Ack, Done, Again)}
DOWN = {m.KIND: m for m in (LayoutIs, Begin, Chunk, End, Abandon, Same, Quiet, Ask)}


def unpack(data: bytes | memoryview, kinds: dict[int, Any]) -> Any:
    """Return the message in ``data``, one of ``kinds``: ``UP`` (from followers) or ``DOWN``.

    Errors: ``PayloadError`` for anything else.

    >>> unpack(Ack(session=1, received=4096).pack(), UP)
    Ack(session=1, received=4096)
    """
    view = memoryview(data)
    found = kinds.get(view[0]) if len(view) else None
    require(found is not None, PayloadError, f"a message of {len(view)} bytes of an unknown kind")
    return kinds[view[0]].unpack(view[1:])
