"""Calls of the compiled passes in ``kernels.c``: several times as fast as torch's, and beside other threads.

They are there for tensors of a CPU where a C compiler was when thinwire was installed; elsewhere ``there()``
is False, and callers do the same, to the same bits, with torch. Tensors are checked here; what others write
to them meanwhile can make a result wrong, but reaches no other memory. One core does the work.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from thinwire import compiled
from thinwire.codecs.kernels.bits import packed_nbytes
from thinwire.types import InputError

_TAKES = {
    "levels": "pnfffppp",
    "pack": "pnp",
    "halves": "pnp",
    "values": "pnpnfp",
    "dithered": "pnupfp",
    "quantised": "pnnfffipp",
    "dequantised": "pnnpffip",
    "magnitudes": "pnnnppp",
    "levelled": "pnnnpppip",
    "scaled": "pnnnpppip",
    "uniform": "ppnnnnfffpuppppp",
    "ununiform": "pppnnnnffppp",
    "sums": "pnnp",
    "zoned": "ppnffiffppppppp",
    "unzoned": "ppnpnpffppp",
}
_FUNCTIONS = compiled.functions(Path(__file__).parent, _TAKES)
without = _FUNCTIONS.without
_CPU = torch.device("cpu")
_BOUNDS = 2.0**-100, 2.0**120  # of a scale in bfloat16
_WRAP = 2**64 - 1
KEPT = 1 << 18  # bytes: to ask for more takes less time than to use it


class Scratch(threading.local):
    """Memory of a thread for what a pass needs while it works: the same at each call, unless it is much."""

    def __init__(self) -> None:
        self._kept = np.empty(KEPT, np.uint8)

    def room(self, nbytes: int) -> tuple[int, memoryview]:
        """Return the address of so many bytes and their view, which whoever uses them holds until then."""
        room = self._kept if nbytes <= KEPT else np.empty(nbytes, np.uint8)
        return room.__array_interface__["data"][0], room.data


SCRATCH = Scratch()


class Rows(NamedTuple):
    """A tensor as rows of one width, a scale each, or each column; and how many bits a code has."""

    rows: int
    width: int
    by_column: bool
    bits: int
    scales: int
    packed: int  # bytes of codes


class Scale(NamedTuple):
    """The share of the largest magnitude that a scale is, and its bounds."""

    share: float
    least: float
    most: float


def there(*tensors: Tensor) -> bool:
    """Return whether there are compiled passes, and all ``tensors`` lie in a CPU's memory, without gaps."""
    return bool(_FUNCTIONS) and not torch.compiler.is_compiling() and all(map(_is_plain, tensors))


def fits(reference: Tensor | None, shape: tuple[int, ...]) -> bool:
    """Return whether a pass can work on top of a reference: float32, of this shape, as ``there`` wants it."""
    if reference is None:
        return True
    return reference.dtype == torch.float32 and tuple(reference.shape) == shape and _is_plain(reference)


def against(x: Tensor, reference: Tensor | None) -> bool:
    """Return whether a pass can work on ``x`` beside a reference."""
    return there(x) and fits(reference, tuple(x.shape))


def _is_plain(x: Tensor) -> bool:
    if type(x) is not Tensor or not x.is_cpu or not x.is_contiguous() or x.is_neg():
        return False
    try:
        start = x.data_ptr()
    except RuntimeError:  # a stand-in, which torch's transforms put in a tensor's place
        return False
    return start % x.itemsize == 0 and (start > 0 or not x.numel())


def levels(x: Tensor, inverse: float, offset: float, step: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``DeadZone``'s codes of float32 [n], the levels that they leave out, and the values of all.

    uint8 [packed_nbytes(n, 2)], uint8 [2 k], float32 [n]. No level of ``x`` may be beyond 15 bits.
    """
    n = x.numel()
    values, codes, numbers = _room(n, torch.float32), _room(n, torch.uint8), _room(n, torch.int16)
    out = values.data_ptr(), codes.data_ptr(), numbers.data_ptr()
    count = _FUNCTIONS["levels"](_at(x, torch.float32), n, inverse, offset, step, *out)
    packed = _room(packed_nbytes(n, 2), torch.uint8)
    _FUNCTIONS["pack"](codes.data_ptr(), n, packed.data_ptr())
    return packed, _halves(numbers.data_ptr(), count), values


def _halves(numbers: int, count: int) -> Tensor:
    """Return the low bytes of numbers of two bytes at an address, and then the high ones."""
    others = _room(2 * count, torch.uint8)
    if count:
        _FUNCTIONS["halves"](numbers, count, others.data_ptr())
    return others


def values(packed: Tensor, others: Tensor, n: int, step: float) -> Tensor | None:
    """Return the values float32 [n] of codes and of the levels that they leave out.

    None unless ``packed`` has ``packed_nbytes(n, 2)`` bytes, and ``others`` two for each level left out.
    """
    if packed.numel() != packed_nbytes(n, 2):
        return None
    found, k = _room(n, torch.float32), others.numel() // 2
    given = _at(packed, torch.uint8), n, _at(others, torch.uint8), k, step
    count = _FUNCTIONS["values"](*given, found.data_ptr())
    return found if count == k and others.numel() == 2 * k else None


def dithered(x: Tensor, key: int, table: Tensor, step: float) -> Tensor:
    """Return float32 [n] and ``step`` times the noise of ``key`` beside it; ``table`` as in ``noise.py``."""
    found, noise = _room(x.numel(), torch.float32), _at(table, torch.float32)
    _FUNCTIONS["dithered"](_at(x, torch.float32), x.numel(), key, noise, step, found.data_ptr())
    return found


def quantised(x: Tensor, share: float, bounds: tuple[float, float], top: int) -> tuple[Tensor, Tensor] | None:
    """Return codes and scales of float32 [rows, width], a scale a row: ``share`` of its largest magnitude.

    uint8 [rows, width], ``top`` for zero; bfloat16 [rows], rounded up, within ``bounds``. None unless all
    values are finite.
    """
    codes, found = _room(x.numel(), torch.uint8), _room(len(x), torch.bfloat16)
    given = _at(x, torch.float32), *x.shape, share, *bounds, top
    done = _FUNCTIONS["quantised"](*given, codes.data_ptr(), found.data_ptr())
    return (codes.view(x.shape), found) if done == len(x) else None


def dequantised(codes: Tensor, scales: Tensor, bounds: tuple[float, float], top: int) -> Tensor | None:
    """Return what ``quantised``'s codes stand for, float32 [rows, width].

    None unless there is a scale a row, and each within ``bounds``.
    """
    if len(scales) != len(codes):
        return None
    found = _room(codes.numel(), torch.float32)
    given = _at(codes, torch.uint8), *codes.shape, _at(scales, torch.bfloat16), *bounds, top
    done = _FUNCTIONS["dequantised"](*given, found.data_ptr())
    return found.view(codes.shape) if done == len(codes) else None


def magnitudes(x: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return sums of the magnitudes in rows and columns of float32 [matrices, rows, width], and exponents.

    int64 [matrices, rows], int64 [matrices, width], int32 [matrices]; a unit is 2**(exponent - 147). None
    unless all values are finite.
    """
    by_row, by_column = (torch.zeros((len(x), n), dtype=torch.int64, device=_CPU) for n in x.shape[1:])
    exponents = _room(len(x), torch.int32)
    out = [t.data_ptr() for t in (exponents, by_row, by_column)]
    done = _FUNCTIONS["magnitudes"](_at(x, torch.float32), *x.shape, *out)
    return (by_row, by_column, exponents) if done == len(x) else None


def levelled(x: Tensor, row: Tensor, column: Tensor, edges: Tensor) -> Tensor:
    """Return the codes of float32 [matrices, rows, width] under its scales: levels from the lowest up.

    ``edges``, float32, are between magnitudes: none, 1, 3 or 7. uint8, as ``x``; ``row`` is float32
    [matrices, rows], ``column`` float32 [matrices, width].
    """
    codes = _room(x.numel(), torch.uint8)
    given = _at(x, torch.float32), *x.shape, *_scales(x, row, column)
    _FUNCTIONS["levelled"](*given, _at(edges, torch.float32), len(edges), codes.data_ptr())
    return codes.view(x.shape)


def scaled(codes: Tensor, row: Tensor, column: Tensor, levels: Tensor) -> Tensor:
    """Return what ``levelled``'s codes stand for, float32, as ``codes``.

    ``levels``, float32, are the positive ones, 1, 2, 4 or 8.
    """
    found = _room(codes.numel(), torch.float32)
    given = _at(codes, torch.uint8), *codes.shape, *_scales(codes, row, column)
    _FUNCTIONS["scaled"](*given, _at(levels, torch.float32), len(levels), found.data_ptr())
    return found.view(codes.shape)


def uniform(
    x: Tensor, held: Tensor | None, rows: Rows, scale: Scale, noise: Tensor | None, seed: int
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return ``Uniform``'s packed codes, its scales, and what they stand for, in one go.

    Of ``x``, float32, or its difference to ``held``, and on top of it: uint8, bfloat16, float32. With
    the table of the noise (``noise.py``) codes are rounded stochastically. None unless all values are finite.
    """
    n, values = x.numel(), torch.empty_like(x)
    codes, stored = _room(n, torch.uint8), _room(rows.scales, torch.bfloat16)
    packed = codes if rows.bits == 8 else _room(rows.packed, torch.uint8)
    room, _held = SCRATCH.room(8 * rows.width if rows.by_column else 0)
    given = x.data_ptr(), _or_none(held), *rows[:4], *scale, _or_none(noise), seed & _WRAP
    out = codes.data_ptr(), stored.data_ptr(), packed.data_ptr(), values.data_ptr()
    done = _FUNCTIONS["uniform"](*given, *out, room)
    return (packed, stored, values) if done == rows.scales else None


def ununiform(
    packed: Tensor, stored: Tensor, held: Tensor | None, shape: tuple[int, ...], rows: Rows, scale: Scale
) -> Tensor | None:
    """Return what ``uniform``'s codes and scales stand for; None for a scale out of bounds."""
    values = torch.empty(shape, dtype=torch.float32, device=_CPU)
    steps = 4 * rows.width if rows.by_column else 0
    room, _held = SCRATCH.room(steps + (values.numel() if rows.bits < 8 else 0))
    given = packed.data_ptr(), stored.data_ptr(), _or_none(held), *rows[:4], *scale[1:]
    done = _FUNCTIONS["ununiform"](*given, room + steps, values.data_ptr(), room)
    return values if done == rows.scales else None


def zoned(
    x: Tensor, held: Tensor | None, step: float, offset: float, top: int, noise: Tensor | None
) -> tuple[list[Tensor], Tensor] | None:
    """Return the parts of ``DeadZone``'s payload, and what they stand for, as ``uniform`` does.

    ``step`` is raised where no level up to ``top`` would reach the largest value. None where a value is not
    finite, or may not come back so.
    """
    n, values = x.numel(), torch.empty_like(x)
    packed, stored = _room(packed_nbytes(n, 2), torch.uint8), _room(1, torch.bfloat16)
    room, _held = SCRATCH.room(8 + 3 * n)  # a key, numbers, codes
    given = x.data_ptr(), _or_none(held), n, step, offset, top, *_BOUNDS, _or_none(noise), room + 8 + 2 * n
    out = room + 8, packed.data_ptr(), stored.data_ptr(), room, values.data_ptr()
    count = _FUNCTIONS["zoned"](*given, *out)
    if count < 0:
        return None
    parts = [packed, _halves(room + 8, count), stored]
    if noise is not None:
        parts.append(torch.frombuffer(bytearray(_held[:8]), dtype=torch.int64))
    return parts, values


def unzoned(
    parts: Sequence[Tensor], held: Tensor | None, shape: tuple[int, ...], noise: Tensor | None
) -> Tensor | None:
    """Return what ``zoned``'s parts stand for; None where they do not fit each other."""
    packed, others, stored = parts[:3]
    n, k = math.prod(shape), others.numel()
    if packed.numel() != packed_nbytes(n, 2) or k % 2:
        return None  # before anything is allocated
    values = torch.empty(shape, dtype=torch.float32, device=_CPU)
    key = None if noise is None else parts[3].data_ptr()
    given = packed.data_ptr(), _or_none(held), n, others.data_ptr(), k // 2, stored.data_ptr(), *_BOUNDS
    count = _FUNCTIONS["unzoned"](*given, _or_none(noise), key, values.data_ptr())
    return values if count == k // 2 else None


def sums(x: Tensor) -> Tensor:
    """Return the sum of the words of each row of float32 [n, ...], modulo 2**32: int32 [n]."""
    n = x.shape[0]
    found = _room(n, torch.int32)
    _FUNCTIONS["sums"](x.data_ptr(), n, x.numel() // max(1, n), found.data_ptr())
    return found


def _scales(x: Tensor, row: Tensor, column: Tensor) -> tuple[int, int]:
    matrices, rows, width = x.shape
    if row.shape != (matrices, rows) or column.shape != (matrices, width):
        raise InputError(f"scales {tuple(row.shape)} and {tuple(column.shape)} for {tuple(x.shape)}")
    return _at(row, torch.float32), _at(column, torch.float32)


def _room(n: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(n, dtype=dtype, device=_CPU)  # whatever the default device is


def _at(x: Tensor, dtype: torch.dtype) -> int:
    if x.dtype != dtype or not _is_plain(x):
        raise InputError(f"{x.dtype} on {x.device}, expected {dtype} in one piece of a CPU's memory")
    return x.data_ptr()


def _or_none(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
