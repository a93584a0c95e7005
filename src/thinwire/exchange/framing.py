"""What messages of an exchange are made of: packets, each behind its length, and words about the sender."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence

from thinwire.types import ByteCursor, PayloadError, require

LENGTH = struct.Struct("<I")


def framed(head: bytes, packets: Sequence[bytes | memoryview]) -> bytes:
    """Return a message: its head, then each packet behind its length, u32 little-endian."""
    return b"".join([head, *(part for p in packets for part in (LENGTH.pack(len(p)), p))])


def unframed(cursor: ByteCursor, count: int) -> list[memoryview]:
    """Return the packets behind a head, which end the message. Errors: ``PayloadError``."""
    packets = [cursor.take(*cursor.unpack(LENGTH)) for _ in range(count)]
    cursor.close()
    return packets


def words_of(data: bytes, sender: str) -> dict[str, object]:
    """Return the JSON object that ``sender`` says of itself. Errors: ``PayloadError``."""
    wrong = f"what {sender} says of itself cannot be read"
    try:
        found = json.loads(data)
    except ValueError as e:
        raise PayloadError(wrong) from e
    require(isinstance(found, dict), PayloadError, wrong)
    return dict(found)
