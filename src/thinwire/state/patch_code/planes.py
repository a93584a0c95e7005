"""Whole tensors, for keyframes: byte planes of their words, each entropy-coded by itself.

Words are first turned so that the plane of the highest bytes says as much as it can: by a bit to the left
where they are floats (the exponent fills the plane, the sign joins the noise of the mantissa), by zigzag
where they are small integers. Which, a sample decides. Layout: a byte for the turn, then a stream for each
plane, the lowest first.
"""

from __future__ import annotations

import numpy as np

from thinwire.state import native
from thinwire.state.layout import Array
from thinwire.state.patch_code.patch_stream import PatchCursor, pack_stream
from thinwire.state.threads import room
from thinwire.types import InputError, PayloadError, require

_SAMPLE = 4096
_ROTATED, _ZIGZAG = 0, 1


def encode_whole(words: Array) -> bytes:
    """Return signed integers [n] as bytes: about 10.6 bits for each bf16 of trained weights."""
    if words.dtype.kind != "i":
        raise InputError(f"words of {words.dtype} are not signed integers")
    sample = words[:: max(1, words.size // _SAMPLE)]
    turn = min((_ROTATED, _ZIGZAG), key=lambda way: _bits(_turned(sample, way)))
    return bytes((turn,)) + pack_planes(_turned(words, turn))


def at_least(words: Array) -> int:
    """Return how many bytes ``encode_whole`` takes at least: those of the noise, in a fifth of its time."""
    return min(len(pack_stream(_turned(words, way).astype(np.uint8))) for way in (_ROTATED, _ZIGZAG))


def decode_whole(data: bytes | bytearray | memoryview, numel: int, word: np.dtype) -> Array:
    """Return the ``numel`` words in ``data``; ``PayloadError`` where there are not as many, or more."""
    reader = PatchCursor(data, "a patch")
    turn = reader.take(1)[0]
    require(turn in (_ROTATED, _ZIGZAG), PayloadError, f"a keyframe turned in the unknown way {turn}")
    turned = unpack_planes(reader, numel, np.dtype(f"u{word.itemsize}"))
    reader.close()
    return _restored(turned, turn)


def pack_planes(values: Array) -> bytes:
    """Return unsigned integers [n] as one stream a byte of theirs; signed ones as those ``zigzag`` makes."""
    return b"".join(pack_stream(plane) for plane in _planes(values))


def _planes(values: Array) -> Array | list[Array]:
    signed = values.dtype.kind == "i"
    if native.there(values):
        return native.planes(values, signed)
    unsigned = zigzag(values) if signed else values
    shifts = range(0, 8 * values.itemsize, 8)
    return [(unsigned >> unsigned.dtype.type(s)).astype(np.uint8) for s in shifts]


def unpack_planes(reader: PatchCursor, n: int, dtype: np.dtype) -> Array:
    """Return the ``n`` unsigned integers of ``dtype`` that come next: there until others are read."""
    values, plane = room("values", n, dtype), room("plane", n, dtype)
    values[:] = reader.stream(n)
    for shift in range(8, 8 * dtype.itemsize, 8):
        plane[:] = reader.stream(n)
        values |= np.left_shift(plane, dtype.type(shift), out=plane)
    return values


def zigzag(words: Array) -> Array:
    """Return signed integers as unsigned ones, 0, -1, 1, -2 as 0, 1, 2, 3: small stays small."""
    turned: Array = (words << 1) ^ (words >> (8 * words.itemsize - 1))
    return turned.view(f"u{words.itemsize}")


def from_zigzag(numbers: Array) -> Array:
    """Return the signed integers of which ``zigzag`` made ``numbers``."""
    signs = (numbers & 1).view(f"i{numbers.itemsize}")
    words: Array = (numbers >> 1).view(signs.dtype) ^ -signs
    return words


def _turned(words: Array, turn: int) -> Array:
    if turn == _ZIGZAG:
        return zigzag(words)
    unsigned = words.view(f"u{words.itemsize}")
    turned, sign = (room(name, words.size, unsigned.dtype) for name in ("turned", "sign"))
    np.left_shift(unsigned, 1, out=turned)
    turned |= np.right_shift(unsigned, 8 * words.itemsize - 1, out=sign)
    return turned


def _restored(turned: Array, turn: int) -> Array:
    if turn == _ZIGZAG:
        return from_zigzag(turned)
    words: Array = turned >> 1
    words |= np.left_shift(turned, 8 * turned.itemsize - 1, out=turned)
    return words.view(f"i{turned.itemsize}")


def _bits(values: Array) -> float:
    """Return about how many bits the planes of ``values`` take, by their order-0 entropy."""
    planes = np.ascontiguousarray(values).view(np.uint8).reshape(-1, values.itemsize)
    total = 0.0
    for i in range(values.itemsize):
        odds = np.bincount(planes[:, i]) / max(1, values.size)
        odds = odds[odds > 0]
        total -= float((odds * np.log2(odds)).sum())
    return total
