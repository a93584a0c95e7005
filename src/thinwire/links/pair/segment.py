"""The header that ``Reliable`` puts before each piece of a message, 26 bytes, little-endian::

    u32 crc       CRC-32 of all that follows
    u32 session   drawn by the sender when its end was made: a restarted peer is not mistaken for the old one
    u32 number    DATA, MORE: own number, from 1; other kinds: the highest number sent so far
    u32 ack       every number up to here has arrived
    u32 repair    the newest repair round (see NACK) that was answered in full before this segment
    u32 arrived   the sender's clock when the newest data arrived, the acknowledged [us, modulo 2**32]
    u8  kind      u8 label

Numbers do not wrap: a link carries at most 2**32 - 1 segments. A segment is one frame or, between ends that
take that, two: the header and the head of what follows, and the rest, which nobody then needs to copy.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from thinwire.checksum import crc32
from thinwire.links.message import Message, Parts, buffers_of
from thinwire.links.pair.buffers import joined
from thinwire.types import PayloadError, require

_REST = struct.Struct("<IIIIIBB")  # all but the crc
_CRC = struct.Struct("<I")
HEADER = _CRC.size + _REST.size
TICK = 1e-6  # seconds
TICKS = 1 << 32  # after which a clock in ticks begins again
PING = struct.Struct("<QI")  # sender's clock [us], time since it heard from the peer [ms]
PONG = struct.Struct("<QI")  # the clock of the ping that is answered; this end's when it arrived, in ticks
NACK = struct.Struct("<II")  # repair round asked for, newest round seen answered; then ranges
RANGE = struct.Struct("<II")  # first number, count
TAKES = struct.Struct("<I")  # body of an ACK: bytes of the largest piece that its sender takes
FIRST = struct.Struct("<QH")  # bytes of the message, and how many of them, its head, follow at once
LENGTH = struct.Struct("<I")  # bytes of each of several messages

LABELS = ("control", "forward", "backward", "evaluation", "state", "other", "saving", "exchange")
OTHER = "other"


class Kind(enum.IntEnum):
    """What a segment is."""

    DATA = 0  # the whole or last piece of a message
    MORE = 1  # a piece with more to follow
    ACK = 2
    PING = 3
    PONG = 4
    NACK = 5  # asks for numbers that are missing
    BYE = 6  # the sender closes the link
    FIRST = 7  # the first piece, with more to follow, of a message whose size it tells
    MANY = 8  # several messages, each behind its length


DATA = (Kind.DATA, Kind.MORE, Kind.FIRST, Kind.MANY)


class Segment(NamedTuple):
    """One piece on the wire, parsed."""

    session: int
    number: int
    ack: int
    repair: int
    arrived: int
    kind: Kind
    label: str
    buffers: tuple[memoryview, ...]  # of the body

    @property
    def body(self) -> memoryview:
        """The body in one piece."""
        return self.buffers[0] if len(self.buffers) == 1 else memoryview(joined(self.buffers))


def pack(
    kind: Kind, label: str, body: Message, *, session: int, number: int, ack: int, repair: int, arrived: int
) -> Message:
    """Return header and body as they go on the wire: in parts where the body is in parts."""
    code = LABELS.index(label if label in LABELS else OTHER)
    rest = _REST.pack(session, number, ack, repair, arrived, kind, code)
    crc, buffers = crc32(rest), buffers_of(body)
    for buffer in buffers:
        crc = crc32(buffer, crc)
    first = b"".join((_CRC.pack(crc), rest, buffers[0]))
    return Parts(first, *buffers[1:]) if len(buffers) > 1 else first


def parse(data: Message) -> Segment:
    """Return the segment; ``PayloadError`` where the check sum does not fit the bytes."""
    view, *others = [memoryview(buffer) for buffer in buffers_of(data)]
    require(len(view) >= HEADER, PayloadError, f"a segment of {len(view)} bytes is shorter than its header")
    crc = crc32(view[_CRC.size :])
    for other in others:
        crc = crc32(other, crc)
    require(_CRC.unpack_from(view)[0] == crc, PayloadError, "a segment is corrupted")
    session, number, ack, repair, arrived, kind, code = _REST.unpack_from(view, _CRC.size)
    require(kind <= max(Kind) and code < len(LABELS), PayloadError, f"unknown kind {kind} or label {code}")
    return Segment(session, number, ack, repair, arrived, Kind(kind), LABELS[code], (view[HEADER:], *others))


def ticks(seconds: float) -> int:
    """Return a clock's reading in ticks, as it goes on the wire."""
    return int(seconds / TICK) % TICKS


def label_of(data: Message) -> str:
    """Return the traffic class of a segment from its bytes, unchecked, for a meter below ``Reliable``."""
    first = buffers_of(data)[0]
    code = first[HEADER - 1] if len(first) >= HEADER else len(LABELS)
    return LABELS[code] if code < len(LABELS) else "other"
