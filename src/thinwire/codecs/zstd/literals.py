"""Frames of literals alone, by the compiled pass in ``kernels.c``; without a C compiler there are none."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import numpy.typing as npt

from thinwire import compiled

LEAST = 100  # bytes that may take fewer so
_FUNCTIONS = compiled.functions(Path(__file__).parent, ["literals"])
there, without = _FUNCTIONS.there, _FUNCTIONS.without


def frame(data: npt.NDArray[np.uint8], room: int | None = None) -> bytes | None:
    """Return uint8 [n], in one piece of memory, as a frame of fewer than ``room`` bytes (default: n).

    None where it takes more, or within some bytes as much, where there is no compiled pass, and for other
    data: of another type, in pieces, of less than ``LEAST`` or of 4 GB and more.
    """
    n, room = data.size, min(data.size, data.size if room is None else room)
    right = data.dtype == np.uint8 and data.flags.c_contiguous and n >= LEAST and not n >> 32
    if not there() or not right:
        return None
    found = np.empty(room, np.uint8)
    given = _address(data), ctypes.c_size_t(n), _address(found), ctypes.c_size_t(room)
    count = _FUNCTIONS["literals"](*given)
    return found[:count].tobytes() if 0 <= count < room else None


def _address(data: npt.NDArray[np.uint8]) -> ctypes.c_void_p:
    return ctypes.c_void_p(data.__array_interface__["data"][0])
