"""CRC-32 of packets and of what links carry: zlib's sums, several times as fast where data is long."""

from __future__ import annotations

import ctypes
import zlib
from pathlib import Path

import numpy as np

from thinwire.compiled import Passes, functions

Data = bytes | bytearray | memoryview
SHORT = 1 << 14  # bytes below which zlib is as fast
_DIVISOR = 0xEDB88320  # the polynomial of CRC-32 without x**32; as in all that follows, bit 31 is x**0
PASSES: Passes = functions(Path(__file__).parent, ("crc32", "crc32_there", "crc32_wide_there"))
WIDE = False  # whether this processor multiplies four blocks at once
if PASSES:
    PASSES["crc32"].argtypes = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32, ctypes.c_int64
    WIDE = bool(PASSES.pop("crc32_wide_there")())
    if not PASSES.pop("crc32_there")():  # by this processor
        PASSES.clear()
without = PASSES.without


def crc32(data: Data, crc: int = 0) -> int:
    """Return zlib's CRC-32 of ``data`` behind bytes whose sum is ``crc``.

    >>> crc32(b"789", crc32(b"123456")) == zlib.crc32(b"123456789")
    True
    """
    if len(data) < SHORT or not PASSES:
        return zlib.crc32(data, crc)
    whole = np.frombuffer(data, np.uint8)
    return int(PASSES["crc32"](whole.ctypes.data, len(whole), crc, WIDE))


def joined(first: int, second: int, nbytes: int) -> int:
    """Return the CRC-32 of two runs of bytes as one, from that of each and the ``nbytes`` of the second.

    So bytes that came before what stands in front of them need not be read again. Source: zlib's
    crc32_combine: the first sum, as a polynomial, times x to the number of bits that follow.

    >>> joined(crc32(b"123"), crc32(b"456789"), 6) == crc32(b"123456789")
    True
    """
    power, rest = 1 << 23, nbytes  # x**8
    while rest:
        if rest & 1:
            first = _times(power, first)
        power, rest = _times(power, power), rest >> 1
    return first ^ second


def _times(a: int, b: int) -> int:
    """Return the product of two polynomials modulo that of CRC-32."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_DIVISOR if b & 1 else 0)
    return product
