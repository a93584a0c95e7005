"""Calls of the compiled passes in ``kernels.c``; without a C compiler numpy does the work."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from thinwire import compiled
from thinwire.codecs.kernels.kernel_calls import SCRATCH
from thinwire.codecs.rans.grid import Grid
from thinwire.codecs.rans.tables import Bytes
from thinwire.types import PayloadError, require

_FUNCTIONS = compiled.functions(
    Path(__file__).parent,
    {"encode": "pnnnpn", "decode": "pnnnnp", "framed": "pnnnnnpn", "unframed": "pnnnnnp", "repeated": "pn"},
)
there, without = _FUNCTIONS.there, _FUNCTIONS.without
_CPU = torch.device("cpu")


def encode(symbols: Bytes, grid: Grid, out: Bytes) -> int | None:
    """Write the body of symbols [planes * n] to ``out``; return its length, None where there is no room."""
    require(symbols.size == grid.n * grid.planes, PayloadError, f"{symbols.size} symbols for {grid}")
    given = _address(symbols), grid.n, grid.planes, grid.lane
    count: int = _FUNCTIONS["encode"](*given, _address(out), out.size)
    return count if count >= 0 else None


def decode(body: Bytes, grid: Grid) -> Bytes:
    """Return the symbols [planes * n] of a body; ``PayloadError`` where it is none."""
    out = np.empty(grid.n * grid.planes, np.uint8)
    about = grid.n, grid.planes, grid.lane
    done = _FUNCTIONS["decode"](_address(body), body.size, *about, _address(out))
    require(done == 0, PayloadError, f"{len(body)} bytes that no encoder of {out.size} symbols writes")
    return out


def framed(data: Tensor, n: int, how: int, planes: int, bits: int, tag: int, room: int) -> Tensor | None:
    """Return a tag and the frame of the ``n`` symbols of a part, uint8 on the CPU, as ``rans`` says.

    None where that takes ``room`` bytes or more, at least one.
    """
    at, out = SCRATCH.room(room)
    made = _FUNCTIONS["framed"](_at(data), n, how, planes, bits, tag, at, room - 1)
    return torch.frombuffer(bytearray(out[:made]), dtype=torch.uint8) if made >= 0 else None


def unframed(frame: Tensor, start: int, n: int, how: int, planes: int, bits: int, nbytes: int) -> Tensor:
    """Return the part of ``nbytes`` for a frame's body, from ``start`` on, or ``PayloadError``."""
    out, size = torch.empty(nbytes, dtype=torch.uint8, device=_CPU), max(0, frame.numel() - start)
    done = _FUNCTIONS["unframed"](_at(frame) + start, size, n, how, planes, bits, out.data_ptr())
    require(done == 0, PayloadError, f"{size} bytes that no encoder of {n} symbols writes")
    return out


def repeated(data: Tensor, n: int) -> int:
    """Return how many of the first ``n`` bytes, at most 64 thousand, repeat seven before them and more."""
    count: int = _FUNCTIONS["repeated"](_at(data), min(n, data.numel()))
    return count


def _at(data: Tensor) -> int:
    plain = data.is_cpu and data.dtype == torch.uint8 and data.is_contiguous()
    require(plain, PayloadError, f"{data.dtype} on {data.device}, expected bytes in one piece")
    return data.data_ptr()


def _address(data: Bytes) -> int:
    found: int = data.__array_interface__["data"][0]
    return found
