"""Calls of the compiled passes in ``kernels.c``: several times as fast as torch's, and beside other threads.

They are there for tensors of a CPU where a C compiler was when thinwire was installed; elsewhere ``there()``
is False, and callers do the same, to the same bits, with torch. Tensors are checked here; what others write
to them meanwhile can make a result wrong, but reaches no other memory. One core does the work.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from thinwire import compiled
from thinwire.codecs.kernels.bits import packed_nbytes
from thinwire.types import InputError

_NAMES = (
    *("levels", "pack", "halves", "values", "dithered", "quantised", "dequantised"),
    *("magnitudes", "levelled", "scaled"),
)
_FUNCTIONS = compiled.functions(Path(__file__).parent, _NAMES)
without = _FUNCTIONS.without
_CPU = torch.device("cpu")


def there(*tensors: Tensor) -> bool:
    """Return whether there are compiled passes, and all ``tensors`` lie in a CPU's memory, without gaps."""
    return bool(_FUNCTIONS) and not torch.compiler.is_compiling() and all(map(_is_plain, tensors))


def _is_plain(x: Tensor) -> bool:
    if type(x) is not Tensor or x.device.type != "cpu" or not x.is_contiguous() or x.is_neg():
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
    floats = map(ctypes.c_float, (inverse, offset, step))
    out = _address(values), _address(codes), _address(numbers)
    count = _FUNCTIONS["levels"](_at(x, torch.float32), _size(x), *floats, *out)
    packed, others = _room(packed_nbytes(n, 2), torch.uint8), _room(2 * count, torch.uint8)
    _FUNCTIONS["pack"](_address(codes), _size(codes), _address(packed))
    _FUNCTIONS["halves"](_address(numbers), ctypes.c_size_t(count), _address(others))
    return packed, others, values


def values(packed: Tensor, others: Tensor, n: int, step: float) -> Tensor | None:
    """Return the values float32 [n] of codes and of the levels that they leave out.

    None unless ``packed`` has ``packed_nbytes(n, 2)`` bytes, and ``others`` two for each level left out.
    """
    if packed.numel() != packed_nbytes(n, 2):
        return None
    found, k = _room(n, torch.float32), others.numel() // 2
    given = _at(others, torch.uint8), ctypes.c_size_t(k), ctypes.c_float(step)
    count = _FUNCTIONS["values"](_at(packed, torch.uint8), _size(found), *given, _address(found))
    return found if count == k and others.numel() == 2 * k else None


def dithered(x: Tensor, key: int, table: Tensor, step: float) -> Tensor:
    """Return float32 [n] and ``step`` times the noise of ``key`` beside it; ``table`` as in ``noise.py``."""
    found, noise = _room(x.numel(), torch.float32), _at(table, torch.float32)
    given = _at(x, torch.float32), _size(x), ctypes.c_uint64(key), noise, ctypes.c_float(step)
    _FUNCTIONS["dithered"](*given, _address(found))
    return found


def quantised(x: Tensor, share: float, bounds: tuple[float, float], top: int) -> tuple[Tensor, Tensor] | None:
    """Return codes and scales of float32 [rows, width], a scale a row: ``share`` of its largest magnitude.

    uint8 [rows, width], ``top`` for zero; bfloat16 [rows], rounded up, within ``bounds``. None unless all
    values are finite.
    """
    codes, found = _room(x.numel(), torch.uint8), _room(len(x), torch.bfloat16)
    floats = map(ctypes.c_float, (share, *bounds))
    given = _at(x, torch.float32), *map(ctypes.c_size_t, x.shape), *floats, ctypes.c_int32(top)
    done = _FUNCTIONS["quantised"](*given, _address(codes), _address(found))
    return (codes.view(x.shape), found) if done == len(x) else None


def dequantised(codes: Tensor, scales: Tensor, bounds: tuple[float, float], top: int) -> Tensor | None:
    """Return what ``quantised``'s codes stand for, float32 [rows, width].

    None unless there is a scale a row, and each within ``bounds``.
    """
    if len(scales) != len(codes):
        return None
    found = _room(codes.numel(), torch.float32)
    given = _at(codes, torch.uint8), *map(ctypes.c_size_t, codes.shape), _at(scales, torch.bfloat16)
    floats = map(ctypes.c_float, bounds)
    done = _FUNCTIONS["dequantised"](*given, *floats, ctypes.c_int32(top), _address(found))
    return found.view(codes.shape) if done == len(codes) else None


def magnitudes(x: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return sums of the magnitudes in rows and columns of float32 [matrices, rows, width], and exponents.

    int64 [matrices, rows], int64 [matrices, width], int32 [matrices]; a unit is 2**(exponent - 147). None
    unless all values are finite.
    """
    by_row, by_column = (torch.zeros((len(x), n), dtype=torch.int64, device=_CPU) for n in x.shape[1:])
    exponents = _room(len(x), torch.int32)
    given = _at(x, torch.float32), *map(ctypes.c_size_t, x.shape)
    done = _FUNCTIONS["magnitudes"](*given, *map(_address, (exponents, by_row, by_column)))
    return (by_row, by_column, exponents) if done == len(x) else None


def levelled(x: Tensor, row: Tensor, column: Tensor, edge: float) -> Tensor:
    """Return the codes of float32 [matrices, rows, width] under its scales: one bit each where ``edge`` is 0.

    uint8, as ``x``; ``row`` is float32 [matrices, rows], ``column`` float32 [matrices, width].
    """
    codes = _room(x.numel(), torch.uint8)
    scales = _scales(x, row, column)
    given = _at(x, torch.float32), *map(ctypes.c_size_t, x.shape), *scales, ctypes.c_float(edge)
    _FUNCTIONS["levelled"](*given, _address(codes))
    return codes.view(x.shape)


def scaled(codes: Tensor, row: Tensor, column: Tensor, levels: tuple[float, ...]) -> Tensor:
    """Return what ``levelled``'s codes stand for, float32, as ``codes``; ``levels`` are the positive ones."""
    found = _room(codes.numel(), torch.float32)
    given = _at(codes, torch.uint8), *map(ctypes.c_size_t, codes.shape), *_scales(codes, row, column)
    floats = map(ctypes.c_float, (levels[0], levels[-1]))
    _FUNCTIONS["scaled"](*given, ctypes.c_int32(len(levels)), *floats, _address(found))
    return found.view(codes.shape)


def _scales(x: Tensor, row: Tensor, column: Tensor) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
    matrices, rows, width = x.shape
    if row.shape != (matrices, rows) or column.shape != (matrices, width):
        raise InputError(f"scales {tuple(row.shape)} and {tuple(column.shape)} for {tuple(x.shape)}")
    return _at(row, torch.float32), _at(column, torch.float32)


def _room(n: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(n, dtype=dtype, device=_CPU)  # whatever the default device is


def _at(x: Tensor, dtype: torch.dtype) -> ctypes.c_void_p:
    if x.dtype != dtype or not _is_plain(x):
        raise InputError(f"{x.dtype} on {x.device}, expected {dtype} in one piece of a CPU's memory")
    return _address(x)


def _address(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def _size(x: Tensor) -> ctypes.c_size_t:
    return ctypes.c_size_t(x.numel())
