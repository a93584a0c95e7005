"""The messages between a publisher's feed and a follower, each one frame: a kind, fixed fields, maybe a tail.

After every connect a follower says HELLO and what it holds. The feed answers with LAYOUT, then come patches:
BEGIN, CHUNK..., and END, or ABANDON where a newer one made the rest useless. The follower acknowledges bytes
(ACK), versions (DONE), or says that it could not use what came (AGAIN). ASK: the feed does not know this
follower.
"""

from __future__ import annotations

from typing import Annotated, Any

from thinwire.heads import F64, U8, U32, U64, Rest
from thinwire.heads import Head as Message
from thinwire.types import PayloadError, require

PROTOCOL = 3
MAGIC = b"TWSY"
MAX_NAME = 64  # bytes of a state's name
NOTHING = bytes(16)  # in place of an instance or a digest
Digest = Annotated[bytes, "16s"]


class Hello(Message, kind=1):
    """What a follower holds: a version of a publisher's life (instance), and part of a patch to another."""

    magic: Annotated[bytes, "4s"]
    protocol: U8
    session: U32  # of this HELLO; what belongs to another one does not count any more
    instance: Digest  # whose version numbers these are; NOTHING: none
    layout: Digest  # digest; NOTHING where the layout is not known yet
    version: U64
    hash: U64
    above: U64  # newest version number known to it or to those it relays to
    part_base: U64
    part_version: U64
    part_hash: U64
    part: U64  # bytes of its body


class Ack(Message, kind=2):
    """How many bytes of chunks have come since HELLO."""

    session: U32
    received: U64


class Done(Message, kind=3):
    """A transfer was applied, and its version is held now."""

    session: U32
    transfer: U32
    version: U64
    hash: U64


class Again(Message, kind=4):
    """A transfer could not be used: ``version`` is still held, or a keyframe is needed (0)."""

    session: U32
    transfer: U32
    version: U64
    hash: U64


class LayoutIs(Message, kind=16):
    """Whose versions these are, and of what; the JSON is left out where the follower has it."""

    protocol: U8
    session: U32
    instance: Digest
    layout: Digest
    newest: U64
    name: Annotated[bytes, f"{MAX_NAME}s"]  # padded with zero bytes
    json: Rest


class Begin(Message, kind=17):
    """A patch follows, from byte ``start`` of its body on; it may not be made to its end yet."""

    transfer: U32
    base: U64
    base_hash: U64
    version: U64
    hash: U64
    start: U64


class Chunk(Message, kind=18):
    """The bytes of a patch's body from ``at`` on."""

    transfer: U32
    at: U64
    data: Rest


class End(Message, kind=23):
    """The body of a patch, ``nbytes`` long, is complete; this is its head."""

    transfer: U32
    nbytes: U64
    head: Rest


class Abandon(Message, kind=19):
    """The rest of a transfer will not come: version ``newer`` makes it useless."""

    transfer: U32
    newer: U64


class Same(Message, kind=21):
    """What the follower holds has the contents of the newest version, which is called so here.

    ``meta``: the version's, as JSON.
    """

    version: U64
    hash: U64
    published: F64
    meta: Rest = b""


class Ask(Message, kind=20):
    """The feed does not know this follower: it should say HELLO. ``protocol`` is the feed's."""

    protocol: U8


class Quiet(Message, kind=22):
    """A relay has had no sign of its publisher for so many ``seconds``; 0 once there is one again."""

    seconds: F64


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
    return kinds[view[0]].unpack(view)
