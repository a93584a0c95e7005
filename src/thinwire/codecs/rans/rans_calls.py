"""Calls of the compiled passes in ``kernels.c``; without a C compiler numpy does the work."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

from thinwire import compiled
from thinwire.codecs.rans.grid import Grid
from thinwire.codecs.rans.tables import Bytes
from thinwire.types import PayloadError, require

_FUNCTIONS = compiled.functions(Path(__file__).parent, ["encode", "decode"])
there, without = _FUNCTIONS.there, _FUNCTIONS.without


def encode(symbols: Bytes, grid: Grid, out: Bytes) -> int | None:
    """Write the body of symbols [planes * n] to ``out``; return its length, None where there is no room."""
    require(symbols.size == grid.n * grid.planes, PayloadError, f"{symbols.size} symbols for {grid}")
    count: int = _FUNCTIONS["encode"](_address(symbols), *_sizes(grid), _address(out), _size(out))
    return count if count >= 0 else None


def decode(body: Bytes, grid: Grid) -> Bytes:
    """Return the symbols [planes * n] of a body; ``PayloadError`` where it is none."""
    out = np.empty(grid.n * grid.planes, np.uint8)
    done = _FUNCTIONS["decode"](_address(body), _size(body), *_sizes(grid), _address(out))
    require(done == 0, PayloadError, f"{len(body)} bytes that no encoder of {out.size} symbols writes")
    return out


def _sizes(grid: Grid) -> tuple[ctypes.c_size_t, ...]:
    return ctypes.c_size_t(grid.n), ctypes.c_size_t(grid.planes), ctypes.c_size_t(grid.lane)


def _address(data: Bytes) -> ctypes.c_void_p:
    return ctypes.c_void_p(data.__array_interface__["data"][0])


def _size(data: Bytes) -> ctypes.c_size_t:
    return ctypes.c_size_t(data.size)
