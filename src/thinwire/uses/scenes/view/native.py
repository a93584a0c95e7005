"""Call of the compiled pass in ``kernels.c``; without a C compiler there is none, and numpy does the work."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinwire import compiled
from thinwire.types import InputError, require

FIELDS, LANES = 11, 8  # of kernels.c
_FUNCTIONS = compiled.functions(Path(__file__).parent, ["splat"])
there, without = _FUNCTIONS.there, _FUNCTIONS.without


def splat(
    rows: npt.NDArray[np.float32], planes: npt.NDArray[np.float32], least: float
) -> npt.NDArray[np.float64]:
    """Draw splats [n, FIELDS], the nearest first, on planes [4, height, width]; return sums [n, 2].

    Of each splat's weights, and of their squares. Planes are red, green, blue, and what is let through.
    """
    require(rows.ndim == 2 and rows.shape[1] == FIELDS, InputError, f"splats of shape {rows.shape}")
    require(planes.ndim == 3 and len(planes) == 4, InputError, f"planes of shape {planes.shape}")
    room = np.empty(planes.size + LANES, np.float32)  # a row's last lanes reach behind it
    room[: planes.size] = planes.reshape(-1)
    sums = np.zeros((len(rows), 2))
    size = ctypes.c_int64(planes.shape[2]), ctypes.c_int64(planes.shape[1]), ctypes.c_float(least)
    given = _at(rows, np.float32), ctypes.c_size_t(len(rows)), *size, _at(room, np.float32)
    room[planes.size :] = 0
    _FUNCTIONS["splat"](*given, _at(sums, np.float64))
    planes[...] = room[: planes.size].reshape(planes.shape)
    return sums


def _at(array: npt.NDArray[Any], kind: type) -> ctypes.c_void_p:
    good = array.dtype == kind and array.flags.c_contiguous and array.flags.aligned
    require(good, InputError, f"{array.dtype}, expected {kind.__name__} in one piece of memory")
    return ctypes.c_void_p(array.__array_interface__["data"][0])
