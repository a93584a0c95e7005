"""Sets of positions: as gaps where they are few, as one bit an element where they are many.

Layout: for each set ``uvarint(2 * count + many)``; the gaps of all sets of few, as ``numbers``; the bitmaps
of all sets of many, each padded to whole bytes, as one stream. So an empty set costs a byte, and small sets
share what an entropy coder needs to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from thinwire.state import native
from thinwire.state.layout import Array
from thinwire.state.patch_code.indexing import mark, where
from thinwire.state.patch_code.patch_stream import (
    PatchCursor,
    pack_numbers,
    pack_stream,
    unpack_numbers,
    uvarint,
)
from thinwire.types import PayloadError, require

MAX_SIZE = 2**31 - 1  # elements a set is drawn from: positions are int32
_MANY = 8  # a bitmap where more than one in so many is set: about there both cost the same


class Bitmap(NamedTuple):
    """A set as one bit an element, uint8 [size / 8], and how many of these are set."""

    bits: Array
    size: int


def many(count: int, size: int) -> bool:
    """Return whether so many positions travel as a bitmap."""
    return _MANY * count > size


def pack_positions(sets: Sequence[Array | Bitmap], sizes: Sequence[int]) -> bytes:
    """Return sets of positions, int32 or int64 [n] each, increasing within 0..size - 1, as bytes.

    Those of ``many`` may come as bitmaps.
    """
    heads, few, maps = bytearray(), list[Array](), list[Array]()
    for positions, size in zip(sets, sizes, strict=True):
        as_bits = many(positions.size, size)
        heads += uvarint(2 * positions.size + as_bits)
        if isinstance(positions, Bitmap):
            maps.append(positions.bits)
        elif positions.size:
            (maps if as_bits else few).append(_bitmap(positions, size) if as_bits else _gaps(positions))
    return bytes(heads) + pack_numbers(_joined(few, np.uint32)) + pack_stream(_joined(maps, np.uint8))


def unpack_positions(reader: PatchCursor, sizes: Sequence[int]) -> list[Array]:
    """Return the sets that come next: int32 [n] each, increasing, below its size; else ``PayloadError``."""
    heads = [divmod(reader.uvarint(), 2) for _ in sizes]
    for (count, _), size in zip(heads, sizes, strict=True):
        require(count <= size <= MAX_SIZE, PayloadError, f"a patch changes {count} of {size} elements")
    few = sum(count for count, as_bits in heads if not as_bits)
    gaps = unpack_numbers(reader, few, max(sizes, default=0))
    whole = sum(
        -(-size // 8) for (count, as_bits), size in zip(heads, sizes, strict=True) if as_bits and count
    )
    maps = reader.stream(whole)
    sets, gap, byte = [], 0, 0
    for (count, as_bits), size in zip(heads, sizes, strict=True):
        if as_bits and count:
            sets.append(_set_bits(maps[byte : byte + -(-size // 8)], size, count))
            byte += -(-size // 8)
        else:
            sets.append(_summed(gaps[gap : gap + count], size))
            gap += count
    return sets


def _gaps(positions: Array) -> Array:
    steps = np.diff(positions, prepend=positions.dtype.type(-1))
    return (steps - 1).astype(np.uint32)


def _summed(gaps: Array, size: int) -> Array:
    positions = native.summed(gaps, size) if native.there(gaps) else _cumulated(gaps, size)
    if positions is None:
        raise PayloadError(f"a patch changes an element behind the last of {size}")
    return positions


def _cumulated(gaps: Array, size: int) -> Array | None:
    positions = np.cumsum(gaps, dtype=np.int64)
    positions += np.arange(gaps.size)
    return None if gaps.size and positions[-1] >= size else positions.astype(np.int32)


def _bitmap(positions: Array, size: int) -> Array:
    if native.there(positions) and positions.dtype == np.int32:
        return native.bits(positions, size)
    mask = np.zeros(size, dtype=np.bool_)
    mark(mask, positions)
    return np.packbits(mask)


def _set_bits(bitmap: Array, size: int, count: int) -> Array:
    positions = where(np.unpackbits(bitmap, count=size).view(np.bool_))
    require(positions.size == count, PayloadError, f"a bitmap of {positions.size} changes, expected {count}")
    return positions.astype(np.int32)


def _joined(arrays: Sequence[Array], dtype: type) -> Array:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=dtype)
