"""CRC-32 of packets and of what links carry: zlib's sums, several times as fast where data is long."""

from __future__ import annotations

import ctypes
import zlib
from pathlib import Path

import numpy as np

from thinwire.compiled import Passes, functions

Data = bytes | bytearray | memoryview
SHORT = 1 << 14  # bytes below which zlib is as fast
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
