"""What messages of an exchange are made of: packets, each behind its length, and words about the sender."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

from thinwire.types import ByteCursor, PayloadError, require

LENGTH = struct.Struct("<I")


class Framing:
    """How the messages of one engine lie in bytes, little-endian: its version, and fields of its own.

    Version u8, state u8 (below ``states``), packets u16, the ``fields``; each packet behind its length, u32.
    """

    def __init__(self, version: int, states: int, fields: str) -> None:
        self._version, self._states, self._head = version, states, struct.Struct(f"<BBH{fields}")
        self.size = self._head.size  # bytes of a message without packets

    def pack(self, state: int, packets: Sequence[bytes | memoryview], *fields: float) -> bytes:
        """Return a message as bytes."""
        parts: list[bytes | memoryview] = [self._head.pack(self._version, state, len(packets), *fields)]
        for packet in packets:
            parts += LENGTH.pack(len(packet)), packet
        return b"".join(parts)

    def unpack(self, data: bytes | memoryview) -> tuple[int, list[memoryview], list[Any]]:
        """Return the state, the packets and the fields of a message. Errors: ``PayloadError``."""
        cursor = ByteCursor(data, "the message of an exchange")
        version, state, count, *fields = cursor.unpack(self._head)
        known = version == self._version and state < self._states
        require(known, PayloadError, "an exchange's message of another version")
        packets = [cursor.take(*cursor.unpack(LENGTH)) for _ in range(count)]
        cursor.close()
        return state, packets, fields


def words_of(data: bytes, sender: str) -> dict[str, object]:
    """Return the JSON object that ``sender`` says of itself. Errors: ``PayloadError``."""
    wrong = f"what {sender} says of itself cannot be read"
    try:
        found = json.loads(data)
    except ValueError as e:
        raise PayloadError(wrong) from e
    require(isinstance(found, dict), PayloadError, wrong)
    return dict(found)
