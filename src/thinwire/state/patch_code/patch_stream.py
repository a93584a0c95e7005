"""Streams of a patch: counts as varints, bytes behind a Huffman coder, and a reader that trusts none of it.

A stream is ``uvarint(2 * length + compressed)`` and its bytes. What it decompresses to, the reader knows from
counts it has checked before, so nothing is allocated on the word of the stream.

Numbers of any scale are a symbol of one byte for the magnitude, and the bits below it as they are. The symbol
of u holds the exponent and the three bits after the leading one of u + 8, so u < 8 is a symbol itself and
each octave above has 8 of them. Within a symbol, gaps and differences are as good as uniform: what is left
are incompressible bits, kept out of the entropy coder and packed by width, at most 0.3 % above the order-0
entropy of what geometric gaps of any mean need. Symbols adapt to the data every 128 KiB, the coder's block.
The stream of all symbols goes first; then, page by page and width by width (1, 2, ...), the low bits in the
order of their numbers, as wide codes of ``bits``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from thinwire.codecs import zstd
from thinwire.state import native
from thinwire.state.layout import Array
from thinwire.state.patch_code.bit_planes import pack, unpack, wide_nbytes
from thinwire.types import ByteCursor, InputError, MissingExtra, PayloadError, require

_TABLE, _WINDOW = 6, 17  # what repeats here are runs, which lie next to each other
_LONGEST = 10  # bytes of a varint of 64 bits
LARGEST = 2**32 - 9
_PAGE = 1 << 17  # numbers to work on at a time: near the caches
_FIRST = 130 << 3  # exponent and three bits of 8.0
_WIDEST = 28  # low bits of the largest symbols
_BASES = np.array([(8 + s % 8 << s // 8) - 8 for s in range(8 * (_WIDEST + 1))], dtype=np.uint32)


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
    try:
        zstd.package()
    except MissingExtra as e:
        raise MissingExtra("states need zstandard: pip install 'thinwire[sync]'") from e


def pack_numbers(numbers: Array) -> bytes:
    """Return uint32 [n], each at most ``LARGEST``, as bytes."""
    if native.there(numbers):
        found, low = native.pack_numbers(numbers)
        return pack_stream(found) + low.tobytes()
    symbols = np.empty(numbers.size, dtype=np.uint8)
    rests: list[bytes] = []
    for start in range(0, numbers.size, _PAGE):
        page = numbers[start : start + _PAGE] + np.uint32(8)
        symbols[start : start + _PAGE] = _symbols(page)
        for group, width in _by_width(symbols[start : start + _PAGE]):
            rests.append(_pack_bits(page[group], width))
    return b"".join([pack_stream(symbols), *rests])


def unpack_numbers(reader: PatchCursor, n: int, largest: int = LARGEST) -> Array:
    """Return the ``n`` numbers that come next as uint32 [n]; ``PayloadError`` for any over ``largest``."""
    symbols = reader.stream(n)
    require(not n or symbols.max() < _BASES.size, PayloadError, "a patch with symbols that stand for nothing")
    if native.there(symbols):
        numbers = native.unpack_numbers(symbols, _bytes(reader.take(native.low_nbytes(symbols))))
    else:
        numbers = _unpacked(reader, symbols)
    require(not n or numbers.max() <= largest, PayloadError, f"a patch with numbers over {largest}")
    return numbers


def _unpacked(reader: PatchCursor, symbols: Array) -> Array:
    numbers = np.empty(symbols.size, dtype=np.uint32)
    for start in range(0, symbols.size, _PAGE):
        page = numbers[start : start + _PAGE]
        np.take(_BASES, symbols[start : start + _PAGE], out=page, mode="clip")
        for group, width in _by_width(symbols[start : start + _PAGE]):
            page[group] += _unpack_bits(reader, width, group.size)
    return numbers


def _bytes(data: memoryview) -> Array:
    return np.frombuffer(data, dtype=np.uint8)


def _symbols(page: Array) -> Array:
    """Return the symbols of u + 8: the leading bits of a float32, which is exact where it does not round."""
    if page.max() < 1 << 24:
        floats = page.view(np.int32).astype(np.float32)
    else:
        floats = np.where(page < 1 << 24, page, page & np.uint32(0xFFFFFF00)).astype(np.float32)
    return ((floats.view(np.int32) >> 20) - _FIRST).astype(np.uint8)


def _by_width(symbols: Array) -> Iterator[tuple[Array, int]]:
    """Yield which numbers of a page have low bits, and how many, from few to many."""
    widths = symbols >> 3
    if not widths.any():
        return
    order = np.argsort(widths, kind="stable")  # a radix sort, for bytes
    counts = np.bincount(widths)
    stops = np.cumsum(counts)
    for width in range(1, counts.size):
        if counts[width]:
            yield order[stops[width] - counts[width] : stops[width]], width


def _pack_bits(values: Array, width: int) -> bytes:
    """Return the low bits as wide codes; by numpy, which starts no threads of its own."""
    whole, rest = divmod(width, 8)
    parts = [(values >> np.uint32(8 * i)).astype(np.uint8).tobytes() for i in range(whole)]
    if rest:
        codes = (values >> np.uint32(8 * whole)).astype(np.uint8) & np.uint8((1 << rest) - 1)
        parts.append(pack(codes, rest).tobytes())
    return b"".join(parts)


def _unpack_bits(reader: PatchCursor, width: int, n: int) -> Array:
    whole, rest = divmod(width, 8)
    packed = reader.take(wide_nbytes(n, width))
    planes = [np.frombuffer(packed, np.uint8, n, i * n) for i in range(whole)]
    if rest:
        planes.append(unpack(np.frombuffer(packed, np.uint8, offset=whole * n), rest, n))
    found = planes.pop().astype(np.uint32)
    for plane in reversed(planes):
        found <<= np.uint32(8)
        found |= plane
    return found
