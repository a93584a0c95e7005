"""Differences of words: signs, which magnitudes are over 1, and these less 2; or all as zigzag numbers.

Numbers are byte planes, or symbols and low bits (``numbers``) where words have four bytes, whose differences
spread over many scales. Every part is within a few per cent of its order-0 entropy, and the parts of a
difference cost together what a joint symbol would.
"""

from __future__ import annotations

import numpy as np

from thinwire.state import native
from thinwire.state.layout import Array
from thinwire.state.patch_code.indexing import where
from thinwire.state.patch_code.patch_stream import (
    LARGEST,
    PatchCursor,
    pack_numbers,
    pack_stream,
    unpack_numbers,
)
from thinwire.state.patch_code.planes import from_zigzag, pack_planes, unpack_planes, zigzag
from thinwire.state.patch_code.positions import Bitmap, many, pack_positions, unpack_positions
from thinwire.types import InputError, PayloadError, require

_PAGE = 1 << 17  # differences that numpy works on at a time: a multiple of 8


def pack_diffs(diffs: Array) -> bytes:
    """Return differences [n], signed integers, none zero and most of them 1 or -1, as bytes."""
    _unsigned(diffs.dtype)
    parts = _compiled(diffs) if native.there(diffs) else _split(diffs)
    if parts is None:
        raise InputError("a difference of zero; leave it out")
    signs, larger, beyond = parts
    return pack_stream(signs) + pack_positions([larger], [diffs.size]) + _pack_numbers(beyond)


def _compiled(diffs: Array) -> tuple[Array, Array | Bitmap, Array] | None:
    """Do what ``_split`` does, and where many sizes are over 1 tell that by bits."""
    count = native.larger(diffs)
    if count < 0:
        return None
    as_bits = many(count, diffs.size)
    larger, beyond = native.beyond(diffs, count, as_bits)
    return native.signs(diffs), Bitmap(larger, count) if as_bits else larger, beyond


def _split(diffs: Array) -> tuple[Array, Array, Array] | None:
    """Return signs as bits, where sizes are over 1, and these less 2; None where a difference is 0."""
    unsigned = _unsigned(diffs.dtype)
    signs, larger, beyond = [np.empty(0, np.uint8)], [np.empty(0, np.int32)], [np.empty(0, unsigned)]
    for start in range(0, diffs.size, _PAGE):
        page = diffs[start : start + _PAGE]
        sizes = np.abs(page).view(unsigned)  # of the lowest word, this is its size too
        if not sizes.min():
            return None
        signs.append(np.packbits(page < 0))
        at = where(sizes > 1)
        beyond.append(sizes.take(at) - unsigned.type(2))
        larger.append(at.astype(np.int32) + np.int32(start))
    return np.concatenate(signs), np.concatenate(larger), np.concatenate(beyond)


def unpack_diffs(reader: PatchCursor, n: int, word: np.dtype) -> Array:
    """Return the ``n`` differences that come next."""
    unsigned = _unsigned(word)
    signs = np.unpackbits(reader.stream(-(-n // 8)), count=n).astype(word)
    (larger,) = unpack_positions(reader, [n])
    beyond = _unpack_numbers(reader, larger.size, unsigned, (1 << 8 * word.itemsize - 1) - 2)
    sizes = np.ones(n, dtype=unsigned)
    sizes[larger.astype(np.intp)] = beyond + unsigned.type(2)
    np.negative(signs, out=signs)  # -1 where negative: x ^ -1 is -x - 1
    diffs = sizes.view(word)
    diffs ^= signs
    diffs -= signs
    return diffs


def fits_whole(diffs: Array) -> bool:
    """Return whether ``pack_whole`` takes ``diffs``: nearly always."""
    if diffs.itemsize != 4 or not diffs.size:
        return True
    return int(diffs.max()) <= LARGEST // 2 and int(diffs.min()) >= -(LARGEST // 2)


def pack_whole(diffs: Array) -> bytes:
    """Return differences [n], any of which may be zero, as bytes."""
    _unsigned(diffs.dtype)
    return pack_numbers(zigzag(diffs)) if diffs.itemsize == 4 else pack_planes(diffs)


def unpack_whole(reader: PatchCursor, n: int, word: np.dtype) -> Array:
    """Return the ``n`` differences that come next."""
    return from_zigzag(_unpack_numbers(reader, n, _unsigned(word), (1 << 8 * word.itemsize) - 1))


def _pack_numbers(numbers: Array) -> bytes:
    return pack_numbers(numbers) if numbers.itemsize == 4 else pack_planes(numbers)


def _unpack_numbers(reader: PatchCursor, n: int, unsigned: np.dtype, largest: int) -> Array:
    if unsigned.itemsize == 4:
        return unpack_numbers(reader, n, min(largest, LARGEST))
    numbers = unpack_planes(reader, n, unsigned)
    require(not n or int(numbers.max()) <= largest, PayloadError, f"a patch with numbers over {largest}")
    return numbers


def _unsigned(word: np.dtype) -> np.dtype:
    if word.kind != "i":
        raise InputError(f"words of {word} are not signed integers")
    return np.dtype(f"u{word.itemsize}")
