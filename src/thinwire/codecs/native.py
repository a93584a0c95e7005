"""Calls of the compiled passes in ``kernels.c``: several times as fast as torch's, and beside other threads.

They are there for tensors of a CPU where a C compiler was when thinwire was installed; elsewhere ``there()``
is False, and callers do the same, to the same bits, with torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs.bits import packed_nbytes
from thinwire.compiled import library

_NAMES = ("levels", "pack", "halves", "values")


def _load() -> dict[str, Any]:
    """Return the functions of the library beside this file; none where there is none."""
    found = library(Path(__file__).parent)
    if found is None:
        return {}
    for name in ("levels", "values"):
        getattr(found, f"tw_{name}").restype = ctypes.c_int64
    return {name: getattr(found, f"tw_{name}") for name in _NAMES}


_FUNCTIONS = _load()


def there(*tensors: Tensor) -> bool:
    """Return whether there are compiled passes, for ``tensors`` that lie in a CPU's memory, without gaps."""
    if not _FUNCTIONS or torch.compiler.is_compiling():
        return False
    return all(type(x) is Tensor and x.device.type == "cpu" and x.is_contiguous() for x in tensors)


@contextmanager
def without() -> Iterator[None]:
    """Leave all to torch for a while, to compare both; no other thread may be at work."""
    kept = dict(_FUNCTIONS)
    _FUNCTIONS.clear()
    try:
        yield
    finally:
        _FUNCTIONS.update(kept)


def levels(x: Tensor, inverse: float, offset: float, step: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``DeadZone``'s codes of float32 [n], the levels that they leave out, and the values of all.

    uint8 [packed_nbytes(n, 2)], uint8 [2 k], float32 [n].
    """
    n = x.numel()
    values, codes = torch.empty_like(x), torch.empty(n, dtype=torch.uint8)
    numbers = torch.empty(n, dtype=torch.int16)
    floats = map(ctypes.c_float, (inverse, offset, step))
    out = _at(values, torch.float32), _at(codes, torch.uint8), _at(numbers, torch.int16)
    count = _FUNCTIONS["levels"](_at(x, torch.float32), _size(x), *floats, *out)
    packed = torch.empty(packed_nbytes(n, 2), dtype=torch.uint8)
    _FUNCTIONS["pack"](_at(codes, torch.uint8), _size(codes), _at(packed, torch.uint8))
    others = torch.empty(2 * count, dtype=torch.uint8)
    _FUNCTIONS["halves"](_at(numbers, torch.int16), ctypes.c_size_t(count), _at(others, torch.uint8))
    return packed, others, values


def values(packed: Tensor, others: Tensor, n: int, step: float) -> Tensor | None:
    """Return the values float32 [n] of codes and of the levels that they leave out; None for other counts.

    ``packed`` has ``packed_nbytes(n, 2)`` bytes, ``others`` two for each level that the codes leave out.
    """
    found, k = torch.empty(n, dtype=torch.float32), others.numel() // 2
    given = _at(others, torch.uint8), ctypes.c_size_t(k), ctypes.c_float(step)
    count = _FUNCTIONS["values"](_at(packed, torch.uint8), _size(found), *given, _at(found, torch.float32))
    return found if count == k and others.numel() == 2 * k else None


def _at(x: Tensor, dtype: torch.dtype) -> ctypes.c_void_p:
    if x.dtype != dtype:
        raise TypeError(f"{x.dtype}, expected {dtype}")
    return ctypes.c_void_p(x.data_ptr())


def _size(x: Tensor) -> ctypes.c_size_t:
    return ctypes.c_size_t(x.numel())
