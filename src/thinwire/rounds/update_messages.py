"""What crosses between the server of a federation and its clients, as bytes. Little-endian::

magic "TF", format u8 (4), kind u8 (1: update, 2: version), crc32 u32 over all that follows
update: client u64, sequence u64, version u64, samples u64, steps u32, gaps u16, each gap: first u32,
    samples u32; one packet as channels/wire.py has it, or several as join_rows of parameters.py does
version: number u64, sequence u64, confirmed u64, check u32, form u8, packets u16, steps u32, rate f64,
    model u64, seconds f64, codec (u16 length, ASCII), work (u32 length, bytes), each packet:
    length u32, bytes as channels/wire.py or state/patches/patch.py
"""

from __future__ import annotations

import enum
import math
import struct
import zlib
from dataclasses import dataclass
from typing import NamedTuple

from thinwire.codecs import Codec, parse_codec
from thinwire.types import MAX_KEY, ByteCursor, PayloadError

MAGIC, FORMAT = b"TF", 4
MAX_STEPS = 1 << 20  # local steps that a server may ask for
HEAD = struct.Struct("<2sBBI")
UPDATE, GAP = struct.Struct("<QQQQIH"), struct.Struct("<II")
MOST_GAPS = 1000
MOST_ROOM = UPDATE.size + MOST_GAPS * GAP.size  # bytes of an update before its packet
VERSION = struct.Struct("<QQQIBHIdQd")
TEXT, LENGTH = struct.Struct("<H"), struct.Struct("<I")


class VersionForm(enum.IntEnum):
    """How a version is sent."""

    FULL = 0  # as it is; the client keeps nothing of it
    WHOLE = 1  # all of the shared model, as a patch from nothing: later versions lead on from it
    PATCH = 2  # a patch of the shared model from the version that the client holds
    MISSED = 3  # the messages since the version that the client holds; none where it holds the newest


class Held(NamedTuple):
    """A version that a client holds: its number, and a sum over its values, as another may bear it too."""

    number: int
    check: int


@dataclass(frozen=True)
class Update:
    """What came of a client's local steps: the coded difference, start less end.

    ``sequence``: as in the version it answers; ``version``: the number of that; ``samples``: of its data.
    ``left``: the samples of its share that nobody trained on, as pairs of the first one and how many.

    >>> Update.unpack(Update(3, 1, 0, 20, 5, b"packet").pack()).samples
    20
    """

    client: int
    sequence: int
    version: int
    samples: int
    steps: int
    packet: bytes | memoryview
    left: tuple[tuple[int, int], ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return HEAD.size + UPDATE.size + len(self.left) * GAP.size + len(self.packet)

    def pack(self) -> bytes:
        """Return the update as bytes."""
        numbers = self.client, self.sequence, self.version, self.samples, self.steps, len(self.left)
        gaps = (GAP.pack(*gap) for gap in self.left)
        return _signed(1, b"".join([UPDATE.pack(*numbers), *gaps, self.packet]))

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Update:
        """Read what ``pack`` wrote; ``PayloadError`` for anything else."""
        cursor = _opened(data, 1, "an update")
        client, sequence, version, samples, steps, many = cursor.unpack(UPDATE)
        gaps = tuple((first, n) for first, n in (cursor.unpack(GAP) for _ in range(many)))
        update = cls(client, sequence, version, samples, steps, cursor.rest(), gaps)
        ends = [0, *(first + n for first, n in gaps)]
        ordered = all(n > 0 and first >= end for (first, n), end in zip(gaps, ends, strict=False))
        if not ordered or many > MOST_GAPS:
            raise PayloadError(f"an update that leaves samples out in {many} places, not in order")
        if (most := max(update.client, update.sequence, update.version, update.samples)) >= MAX_KEY:
            raise PayloadError(f"an update with the number {most}, beyond 2**63")
        if not 1 <= update.steps <= MAX_STEPS:
            raise PayloadError(f"an update of {update.steps} local steps")
        return update


@dataclass(frozen=True)
class VersionMessage:
    """A version of the model for one client, and what it is to do with it.

    ``sequence`` is the number of the update that answers it, and ``confirmed`` that of the client's last
    update which was taken: another that the client sent before is void. ``check``: sum over the values.
    ``steps`` local steps at the step size ``rate``; ``codec``: of the update. ``model``: the digest of the
    server's ``Signature``; 0 where it knows of none. ``work``: the samples to train on, as ``WorkSource``
    gives them. ``seconds``: how long the server waits for the update; 0 where nobody says.
    """

    number: int
    sequence: int
    confirmed: int
    check: int
    form: VersionForm
    packets: tuple[bytes | memoryview, ...]
    steps: int
    rate: float
    codec: Codec
    model: int = 0
    work: bytes | memoryview = b""
    seconds: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        fixed = HEAD.size + VERSION.size + TEXT.size + len(repr(self.codec)) + LENGTH.size + len(self.work)
        return fixed + sum(LENGTH.size + len(p) for p in self.packets)

    @property
    def held(self) -> Held | None:
        """What a client holds that took this version; None where it keeps nothing."""
        return None if self.form is VersionForm.FULL else Held(self.number, self.check)

    def pack(self) -> bytes:
        """Return the version as bytes."""
        n, codec = len(self.packets), repr(self.codec).encode("ascii")
        numbers = self.number, self.sequence, self.confirmed, self.check
        head = VERSION.pack(*numbers, self.form, n, self.steps, self.rate, self.model, self.seconds)
        parts = [head, TEXT.pack(len(codec)), codec, LENGTH.pack(len(self.work)), self.work]
        return _signed(2, b"".join([*parts, *(b for p in self.packets for b in (LENGTH.pack(len(p)), p))]))

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> VersionMessage:
        """Read what ``pack`` wrote; ``PayloadError`` for anything else."""
        cursor = _opened(data, 2, "a version")
        number, sequence, confirmed, check, form, packets, steps, rate, model, seconds = cursor.unpack(
            VERSION
        )
        if (most := max(number, sequence, confirmed)) >= MAX_KEY:
            raise PayloadError(f"a version with the number {most}, beyond 2**63")
        if not (form == VersionForm.MISSED or (form < VersionForm.MISSED and packets == 1)):
            raise PayloadError(f"a version of form {form} in {packets} packets")
        if not 1 <= steps <= MAX_STEPS:
            raise PayloadError(f"a version that asks for {steps} local steps")
        if not 0 < rate < math.inf:
            raise PayloadError(f"a version that asks for a step size of {rate}")
        if not 0 <= seconds < math.inf:
            raise PayloadError(f"a version whose update is waited for {seconds} s")
        codec = parse_codec(_ascii(cursor.take(*cursor.unpack(TEXT))))
        work = cursor.take(*cursor.unpack(LENGTH))
        found = tuple(cursor.take(*cursor.unpack(LENGTH)) for _ in range(packets))
        cursor.close()
        numbers = number, sequence, confirmed, check
        return cls(*numbers, VersionForm(form), found, steps, rate, codec, model, work, seconds)


def _signed(kind: int, body: bytes) -> bytes:
    return HEAD.pack(MAGIC, FORMAT, kind, zlib.crc32(body)) + body


def _opened(data: bytes | memoryview, kind: int, what: str) -> ByteCursor:
    cursor = ByteCursor(data, what)
    magic, form, found, crc = cursor.unpack(HEAD)
    if magic != MAGIC or found != kind:
        raise PayloadError(f"not {what} of a federation")
    if form != FORMAT:
        raise PayloadError(f"{what} in format {form}, not {FORMAT}; update the older end")
    if zlib.crc32(cursor.rest()) != crc:
        raise PayloadError(f"{what} was damaged: its checksum is wrong")
    return cursor


def _ascii(data: memoryview) -> str:
    try:
        return bytes(data).decode("ascii")
    except UnicodeDecodeError as e:
        raise PayloadError("a codec in a version is not ASCII") from e
