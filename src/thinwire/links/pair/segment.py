"""The header that ``Reliable`` puts before each piece of a message, 26 bytes, little-endian::

    u32 crc       CRC-32 of all that follows
    u32 session   drawn by the sender when its end was made: a restarted peer is not mistaken for the old one
    u32 number    DATA, MORE: own number, from 1; other kinds: the highest number sent so far
    u32 ack       every number up to here has arrived
    u32 repair    the newest repair round (see NACK) that was answered in full before this segment
    u32 arrived   the sender's clock when the newest data arrived, the acknowledged [us, modulo 2**32]
    u8  kind      u8 label

Numbers do not wrap: a link carries at most 2**32 - 1 segments.
"""

from __future__ import annotations

import enum
import struct
import zlib
from dataclasses import dataclass

from thinwire.links.link import Data
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


@dataclass(frozen=True)
class Segment:
    """One piece on the wire, parsed."""

    session: int
    number: int
    ack: int
    repair: int
    arrived: int
    kind: Kind
    label: str
    body: memoryview


def pack(
    kind: Kind, label: str, body: Data, *, session: int, number: int, ack: int, repair: int, arrived: int
) -> bytes:
    """Return header and body as they go on the wire."""
    code = LABELS.index(label if label in LABELS else OTHER)
    rest = _REST.pack(session, number, ack, repair, arrived, kind, code)
    crc = zlib.crc32(body, zlib.crc32(rest))
    return b"".join((_CRC.pack(crc), rest, body))


def parse(data: bytes) -> Segment:
    """Return the segment; ``PayloadError`` where the check sum does not fit the bytes."""
    require(len(data) >= HEADER, PayloadError, f"a segment of {len(data)} bytes is shorter than its header")
    view = memoryview(data)
    require(
        _CRC.unpack_from(data)[0] == zlib.crc32(view[_CRC.size :]), PayloadError, "a segment is corrupted"
    )
    session, number, ack, repair, arrived, kind, code = _REST.unpack_from(data, _CRC.size)
    require(kind <= max(Kind) and code < len(LABELS), PayloadError, f"unknown kind {kind} or label {code}")
    return Segment(session, number, ack, repair, arrived, Kind(kind), LABELS[code], view[HEADER:])


def ticks(seconds: float) -> int:
    """Return a clock's reading in ticks, as it goes on the wire."""
    return int(seconds / TICK) % TICKS


def label_of(data: bytes) -> str:
    """Return the traffic class of a segment from its bytes, unchecked, for a meter below ``Reliable``."""
    code = data[HEADER - 1] if len(data) >= HEADER else len(LABELS)
    return LABELS[code] if code < len(LABELS) else "other"
