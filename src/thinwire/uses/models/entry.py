"""Coded tensors to what a file holds of each: a few words about it, and its bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs.symbols import (
    pack_bytes,
    pack_numbers,
    unpack_bytes,
    unpack_numbers,
    unzigzag,
    zigzag,
)
from thinwire.types import WRONG_VALUES, ByteCursor, PayloadError, require
from thinwire.uses.models.streams import pack_codes, unpack_codes
from thinwire.uses.models.tensors import (
    FARTHEST,
    REACH,
    WIDTHS,
    Coded,
    Grouped,
    Plain,
    Stepped,
    Tied,
    groups_of,
    matrix_shape,
)

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SCALES = {"float16": torch.float16, "bfloat16": torch.bfloat16}  # types of scales; the first is not said
MOST_AXES = 16


@dataclass(frozen=True, eq=False)
class PackedTensor:
    """A tensor in a file: ``about`` are JSON values that reading needs, ``data`` its bytes."""

    about: Mapping[str, Any]
    data: bytes

    @property
    def kind(self) -> str:
        """How it is coded: ``steps``, ``groups``, ``plain`` or ``same``."""
        return str(self.about.get("kind"))

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape; empty for ``same``."""
        return () if self.kind == Tied.kind else tuple(self.about.get("shape", ()))

    @property
    def numel(self) -> int:
        """Weights that it has bytes for."""
        return 0 if self.kind == Tied.kind else math.prod(self.shape)


def pack_entry(coded: Coded) -> PackedTensor:
    """Return what a file holds of a coded tensor."""
    if isinstance(coded, Tied):
        return PackedTensor({"kind": coded.kind, "name": coded.name}, b"")
    about: dict[str, Any] = {"kind": coded.kind, "shape": list(coded.shape), "dtype": NAMES[coded.dtype]}
    if isinstance(coded, Plain):
        return PackedTensor(about, _pack_plain(coded.values))
    codes = pack_codes(coded.codes.cpu().numpy().astype(np.int16, copy=False))
    about |= {"swapped": True} if coded.swapped else {}
    about |= {"power": coded.power} if coded.power else {}
    if isinstance(coded, Grouped):
        about |= {"scales": NAMES[coded.scales.dtype]} if coded.scales.dtype != torch.float16 else {}
        return PackedTensor(about | {"width": coded.width}, _pack_plain(coded.scales) + codes)
    about |= {"wide": True} if coded.wide else {}
    parts = (pack_numbers(_turns(own)) for own in (coded.row_parts, coded.column_parts))
    return PackedTensor(about, b"".join([*parts, codes]))


def unpack_entry(entry: PackedTensor, name: str) -> Coded:
    """Return the coded tensor of an entry, whose size was checked before. Errors: ``PayloadError``."""
    try:
        return _unpacked(entry, name)
    except WRONG_VALUES as e:
        raise PayloadError(f"{name:.99} is damaged: {str(e)[:80]}") from e


def _unpacked(entry: PackedTensor, name: str) -> Coded:
    about = entry.about
    if entry.kind == Tied.kind:
        return Tied(str(about["name"]))
    shape, dtype = shape_of(about, name), DTYPES.get(about["dtype"])
    if dtype is None:
        raise PayloadError(f"{name:.99} is of type {about['dtype']!r:.20}; update thinwire")
    cursor, swapped = ByteCursor(entry.data, f"{name:.99}"), about.get("swapped", False) is True
    coded: Coded
    if entry.kind == Plain.kind:
        coded = Plain(_unpack_plain(cursor, shape, dtype))
    else:
        known = entry.kind in (Stepped.kind, Grouped.kind) and len(shape) >= 2
        require(known, PayloadError, f"{name:.99} is coded as {entry.kind!r:.20}; update thinwire")
        coded = _unpack_matrix(cursor, entry, shape, dtype, swapped)
    cursor.close()
    return coded


def _unpack_matrix(
    cursor: ByteCursor, entry: PackedTensor, shape: tuple[int, ...], dtype: torch.dtype, swapped: bool
) -> Coded:
    rows, columns = matrix_shape(shape, swapped)
    power = power_in(entry.about)
    if entry.kind == Grouped.kind:
        width = entry.about["width"]
        require(type(width) is int and width in WIDTHS, PayloadError, f"codes of {width!r:.20} bits")
        kind = SCALES[entry.about.get("scales", "float16")]
        scales = _unpack_plain(cursor, (rows, groups_of(columns)), kind)
        codes = torch.from_numpy(unpack_codes(cursor, rows, columns))
        return Grouped(codes, scales, width, shape, dtype, swapped, power)
    by_row, by_column = (torch.from_numpy(_unturned(unpack_numbers(cursor, n))) for n in (rows, columns))
    codes = torch.from_numpy(unpack_codes(cursor, rows, columns))
    wide = entry.about.get("wide", False) is True
    return Stepped(codes, by_row, by_column, shape, dtype, swapped, wide, power)


def power_in(about: Mapping[str, Any]) -> int:
    """Return the power of two that an entry's matrix is divided by. Errors: ``PayloadError``."""
    power = about.get("power", 0)
    good = type(power) is int and abs(power) <= FARTHEST
    require(good, PayloadError, f"a power of {power!r:.20}, which no number has")
    return int(power)


def shape_of(about: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Return the shape that an entry claims. Errors: ``PayloadError``."""
    shape = about["shape"]
    good = isinstance(shape, list) and len(shape) <= MOST_AXES
    good = good and all(type(n) is int and 0 <= n < 1 << 40 for n in shape)
    require(good, PayloadError, f"{name:.99} has the shape {shape!r:.40}")
    return tuple(shape)


def _turns(parts: Tensor) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the differences between neighbours as numbers that are not negative."""
    return zigzag(np.diff(parts.cpu().numpy().astype(np.int32), prepend=np.int32(0)).astype(np.int32))


def _unturned(numbers: np.ndarray[Any, np.dtype[np.int32]]) -> np.ndarray[Any, np.dtype[np.int32]]:
    parts = np.cumsum(unzigzag(numbers), dtype=np.int64)
    require(bool((abs(parts) <= REACH).all()), PayloadError, "steps that no tensor has: it is damaged")
    return parts.astype(np.int32)


def _pack_plain(x: Tensor) -> bytes:
    """Return a tensor's bytes, the first of each value first: those of floats are like each other."""
    planes = _bytes_of(x).reshape(-1, x.dtype.itemsize)
    return b"".join(pack_bytes(np.ascontiguousarray(plane)) for plane in planes.T) if x.numel() else b""


def _unpack_plain(cursor: ByteCursor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    n, size = math.prod(shape), dtype.itemsize
    if not n:
        return torch.empty(shape, dtype=dtype)
    planes = np.empty((n, size), np.uint8)
    for i in range(size):
        planes[:, i] = unpack_bytes(cursor, n)
    raw = torch.from_numpy(planes.reshape(-1))
    require(dtype != torch.bool or int(raw.max()) <= 1, PayloadError, "a truth value that is neither 0 nor 1")
    return raw.view(dtype).reshape(shape)


def _bytes_of(x: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    found: np.ndarray[Any, np.dtype[np.uint8]] = x.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return found
