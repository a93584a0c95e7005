"""Streams of a patch: counts as varints, bytes behind a Huffman coder, and a reader that trusts none of it.

A stream is ``uvarint(2 * length + compressed)`` and its bytes. What it decompresses to, the reader knows from
counts it has checked before, so nothing is allocated on the word of the stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thinwire.codecs import zstd
from thinwire.state.layout import Array
from thinwire.types import ByteCursor, InputError, PayloadError, require

_TABLE, _WINDOW = 6, 17  # what repeats here are runs, which lie next to each other
_LONGEST = 10  # bytes of a varint of 64 bits


def uvarint(n: int) -> bytes:
    """Return ``n`` (0 or more) in 7 bits a byte, the lowest first; all bytes but the last have bit 7 set.

    >>> uvarint(300).hex()
    'ac02'
    """
    require(0 <= n < 1 << 63, InputError, f"{n} is no count of a stream: it must be in 0..2**63 - 1")
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    out.append(n)
    return bytes(out)


def pack_stream(data: Array) -> bytes:
    """Return uint8 [n] as a stream: compressed where that is smaller, else as it is."""
    raw = np.ascontiguousarray(data)
    if not raw.size:
        return uvarint(0)
    frame = zstd.compress(raw, 1, _TABLE, _WINDOW)
    if len(frame) < raw.size:
        return uvarint(2 * len(frame) + 1) + frame
    return uvarint(2 * raw.size) + raw.tobytes()


def pack_flags(flags: Sequence[bool]) -> bytes:
    """Return booleans in a bit each."""
    return np.packbits(np.array(flags, dtype=np.bool_)).tobytes()


class PatchCursor(ByteCursor):
    """A cursor over the code of a patch."""

    def uvarint(self) -> int:
        """Return the next varint."""
        n = 0
        for i in range(_LONGEST):
            byte = self.take(1)[0]
            n |= (byte & 127) << 7 * i
            if byte < 128:
                return n
        raise PayloadError(f"a number in a patch takes more than {_LONGEST} bytes")

    def flags(self, n: int) -> list[bool]:
        """Return the ``n`` flags that come next."""
        packed = np.frombuffer(self.take(-(-n // 8)), dtype=np.uint8)
        return np.unpackbits(packed, count=n).view(np.bool_).tolist()

    def stream(self, nbytes: int) -> Array:
        """Return the stream that comes next as uint8 [nbytes], read-only; else ``PayloadError``."""
        length, compressed = divmod(self.uvarint(), 2)
        data = self.take(length)
        if compressed:
            data = memoryview(_expand(data, nbytes))
        require(len(data) == nbytes, PayloadError, f"a stream of {len(data)} bytes, expected {nbytes}")
        return np.frombuffer(data, dtype=np.uint8)


def _expand(frame: memoryview, nbytes: int) -> bytes:
    size = zstd.content_size(frame)
    require(size == nbytes, PayloadError, f"a frame claims {size} bytes, expected {nbytes}")
    return zstd.decompress(frame)


def check_coder() -> None:
    """Raise ``MissingExtra`` without zstandard: at the start, not in the midst of training."""
    zstd.package()
