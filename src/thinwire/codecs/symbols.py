"""Whole numbers to bytes: mostly small ones of uneven odds, which Zstandard's Huffman stage codes.

A Huffman code spends a bit a symbol at least, so numbers that are nearly all zero go several to a byte. The
form is chosen for each list by the entropy of its bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from thinwire.codecs import zstd
from thinwire.types import ByteCursor, PayloadError, require

Ints = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]
PER_BYTE = {1: 1, 2: 8, 3: 5, 4: 4, 6: 3, 16: 2}  # by base: digits of a byte; base 1 stands for whole bytes
ESCAPE = 255  # a byte that stands for this and more: what is beyond comes behind
PLANES = 4  # bytes of a number beyond
DENSE = 4.0  # bits a number from which on only whole bytes are tried
FRAME_NBYTES = 60  # that one more list costs, about
_LENGTH = struct.Struct("<I")
_RAW = 1 << 31
_DIGITS = {
    base: (np.arange(256)[:, None] // base ** np.arange(k) % base).astype(np.uint8)
    for base, k in PER_BYTE.items()
    if base > 1
}


def pack_bytes(data: Bytes) -> bytes:
    """Return bytes as a frame that says how long it is."""
    frame = zstd.smallest(np.ascontiguousarray(data))
    if len(frame) >= len(data):
        return _LENGTH.pack(len(data) | _RAW) + data.tobytes()
    return _LENGTH.pack(len(frame)) + frame


def unpack_bytes(cursor: ByteCursor, n: int) -> Bytes:
    """Return the ``n`` bytes of the frame that comes next. Errors: ``PayloadError``."""
    (length,) = cursor.unpack(_LENGTH)
    part = cursor.take(length & ~_RAW)
    if not length & _RAW:
        size = zstd.content_size(part)
        require(size == n, PayloadError, f"a frame of {size} bytes, expected {n}")
        part = memoryview(zstd.decompress(part))
    require(len(part) == n, PayloadError, f"{len(part)} bytes, expected {n}")
    return np.frombuffer(part, np.uint8)


def zigzag(values: Ints) -> Ints:
    """Return 0, -1, 1, -2, ... as 0, 1, 2, 3, ..."""
    return (values << 1) ^ (values >> 31)


def unzigzag(numbers: Ints) -> Ints:
    """Return what ``zigzag`` was given."""
    return (numbers >> 1) ^ -(numbers & 1)


def pack_numbers(numbers: Ints) -> bytes:
    """Return numbers [n], int32 and not negative, in the form that takes fewest bits.

    >>> few = np.zeros(8000, np.int32)
    >>> few[::100] = 7
    >>> len(pack_numbers(few)) < 300
    True
    """
    base = _best(numbers)
    if base == 1:
        return bytes([1]) + _pack_whole(numbers)
    digits, beyond = _digits(numbers, base)
    return bytes([base]) + pack_bytes(digits) + _pack_whole(beyond)


def unpack_numbers(cursor: ByteCursor, n: int) -> Ints:
    """Return the ``n`` numbers that come next. Errors: ``PayloadError``."""
    (base,) = cursor.take(1)
    require(base in PER_BYTE, PayloadError, f"numbers in the unknown form {base}")
    if base == 1:
        return _unpack_whole(cursor, n)
    packed = unpack_bytes(cursor, -(-n // PER_BYTE[base]))
    numbers = _DIGITS[base][packed].reshape(-1)[:n].astype(np.int32)
    return _put_beyond(cursor, numbers, base - 1)


def _best(numbers: Ints) -> int:
    least, bits = 1, _whole_bits(numbers)
    for base in PER_BYTE if bits < DENSE * len(numbers) else ():
        if base > 1:
            digits, beyond = _digits(numbers, base)
            own = _bits(digits) + _whole_bits(beyond)
            least, bits = (base, own) if own < bits else (least, bits)
    return least


def _digits(numbers: Ints, base: int) -> tuple[Bytes, Ints]:
    """Return digits several to a byte, and what the largest digit stands for beyond itself."""
    k = PER_BYTE[base]
    small = np.zeros(-(-len(numbers) // k) * k, np.uint8)
    np.minimum(numbers, base - 1, out=small[: len(numbers)], casting="unsafe")
    packed = np.zeros(len(small) // k, np.uint8)
    for i in range(k):
        packed += small[i::k] * np.uint8(base**i)
    return packed, numbers[numbers >= base - 1] - (base - 1)


def _pack_whole(numbers: Ints) -> bytes:
    """Return numbers as bytes, and those from ``ESCAPE`` on as planes of bytes behind."""
    beyond = numbers[numbers >= ESCAPE] - ESCAPE
    head = pack_bytes(np.minimum(numbers, ESCAPE).astype(np.uint8))
    planes = [(beyond >> 8 * i & 255).astype(np.uint8) for i in range(PLANES if len(beyond) else 0)]
    return b"".join([head, *map(pack_bytes, planes)])


def _unpack_whole(cursor: ByteCursor, n: int) -> Ints:
    numbers = unpack_bytes(cursor, n).astype(np.int32)
    at = np.flatnonzero(numbers == ESCAPE)
    for i in range(PLANES if len(at) else 0):
        numbers[at] += unpack_bytes(cursor, len(at)).astype(np.int32) << 8 * i
    return numbers


def _put_beyond(cursor: ByteCursor, numbers: Ints, most: int) -> Ints:
    at = np.flatnonzero(numbers == most)
    numbers[at] += _unpack_whole(cursor, len(at))
    return numbers


def _whole_bits(numbers: Ints) -> float:
    if not len(numbers):
        return 0.0
    small = np.minimum(numbers, ESCAPE).astype(np.uint8)
    return _bits(small) + 16 * float((small == ESCAPE).sum())


def _bits(data: Bytes) -> float:
    """Return the bits that Huffman's code takes, about: the entropy, but one for a byte of more than half."""
    counts = np.bincount(data, minlength=1)
    most = int(counts.argmax())
    if 2 * counts[most] <= len(data):
        return entropy(counts)
    counts[most] = 0
    return len(data) + entropy(counts)


def entropy(counts: npt.NDArray[np.int64]) -> float:
    """Return the order-0 entropy of symbols of these counts, in bits, of all together.

    >>> entropy(np.array([4, 4]))
    8.0
    """
    there = counts[counts > 0].astype(np.float64)
    total = there.sum()
    return float((there * np.log2(total / there)).sum()) if len(there) else 0.0


def pack_classes(numbers: Ints, counts: Sequence[int]) -> bytes:
    """Return numbers [n] that come class by class, ``counts`` of each; neighbours may share a list."""
    parts = list[bytes]()
    for first, last in _runs(numbers, counts):
        begin, end = sum(counts[:first]), sum(counts[:last])
        parts.append(bytes([last - first]) + pack_numbers(numbers[begin:end]))
    return b"".join(parts)


def unpack_classes(cursor: ByteCursor, counts: Sequence[int]) -> Ints:
    """Return what ``pack_classes`` was given. Errors: ``PayloadError``."""
    found, at = list[Ints](), 0
    while at < len(counts):
        (classes,) = cursor.take(1)
        require(
            0 < classes <= len(counts) - at, PayloadError, f"{classes} classes, {len(counts) - at} are left"
        )
        found.append(unpack_numbers(cursor, sum(counts[at : at + classes])))
        at += classes
    return np.concatenate(found) if found else np.zeros(0, np.int32)


def _runs(numbers: Ints, counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the classes that share a list: a class joins those before it unless a list of its own saves."""
    ends = list(accumulate(counts, initial=0))
    small = np.minimum(numbers, ESCAPE).astype(np.uint8)
    own = [np.bincount(small[a:b], minlength=256) for a, b in pairwise(ends)]
    bits = [entropy(one) for one in own]
    first = 0
    while first < len(counts):
        held, kept, last = own[first], bits[first], first + 1
        while last < len(counts):
            both = held + own[last]
            shared = entropy(both)
            if shared - kept - bits[last] > 8 * FRAME_NBYTES:
                break
            held, kept, last = both, shared, last + 1
        yield first, last
        first = last
