"""Codes of a matrix to bytes: each by the odds of its row and column.

How far codes spread in a row and in a column is said in quarters of an octave. The sum of both is the
class of a code, and classes are coded apart where that saves.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from thinwire.codecs.symbols import (
    Ints,
    entropy,
    pack_classes,
    pack_numbers,
    unpack_classes,
    unpack_numbers,
    unzigzag,
    zigzag,
)
from thinwire.types import ByteCursor, PayloadError, require

Codes = npt.NDArray[np.int16]
PIECE = 1 << 22  # weights that are coded together
PARTS = 4.0  # of an octave
LOWEST, CLASSES = -24, 64  # of classes: codes that are nearly all zero, and how many there are
SYMBOLS = 256
FEW = 64  # sizes of codes that have a symbol each; above, four an octave


def pack_codes(codes: Codes) -> bytes:
    """Return codes [rows, columns] as bytes; ``unpack_codes`` needs their shape.

    >>> codes = np.random.default_rng(0).normal(0, [[1], [8]], (2, 500)).round().astype(np.int16)
    >>> bool((unpack_codes(ByteCursor(pack_codes(codes), "codes"), 2, 500) == codes).all())
    True
    """
    return b"".join(_pack_piece(part) for part in _pieces(codes))


def unpack_codes(cursor: ByteCursor, rows: int, columns: int) -> Codes:
    """Return what ``pack_codes`` was given. Errors: ``PayloadError``."""
    codes = np.empty((rows, columns), np.int16)
    for part in _pieces(codes):
        _unpack_piece(cursor, part)
    return codes


def bits_of(codes: Codes) -> float:
    """Return the bits that codes [rows, columns] take by their entropy, class by class."""
    classes = _classes(*_spread(codes)).astype(np.int64)
    symbols, rest = _symbols(codes)
    counts = np.bincount((classes * SYMBOLS + symbols).reshape(-1), minlength=CLASSES * SYMBOLS)
    return float(rest.sum()) + sum(entropy(own) for own in counts.reshape(CLASSES, SYMBOLS))


def _symbols(codes: Codes) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return a symbol for each code, and the bits that say more of it: large ones share one."""
    size = np.abs(codes.astype(np.int64))
    octave = np.frexp(np.maximum(size, 1).astype(np.float32))[1].astype(np.int64) - 1
    rest = np.where(size < FEW, 0, octave - 2)
    shared = FEW + 4 * (octave - FEW.bit_length() + 1) + ((size >> rest) & 3)
    found = np.where(size < FEW, size, shared)
    return np.where(codes < 0, SYMBOLS - 1 - found, found), rest


def _pieces(codes: Codes) -> list[Codes]:
    rows, columns = codes.shape
    each = max(1, PIECE // max(columns, 1))
    return [codes[start : start + each] for start in range(0, rows, each)] if codes.size else []


def _spread(codes: Codes) -> tuple[Ints, Ints]:
    """Return how far codes spread by row and, beyond that, by column, in parts of an octave."""
    squares = codes.astype(np.float32) ** 2
    by_row = squares.mean(1) + 1e-4
    by_column = (squares / by_row[:, None]).mean(0) + 1e-4
    return _parts(by_row), _parts(by_column)


def _parts(squares: npt.NDArray[np.float32]) -> Ints:
    return np.rint(PARTS / 2 * np.log2(squares)).astype(np.int32)


def _classes(rows: Ints, columns: Ints) -> npt.NDArray[np.uint8]:
    """Return the class [rows, columns] of each code."""
    return np.clip(rows[:, None] + columns - LOWEST, 0, CLASSES - 1).astype(np.uint8)


def _pack_piece(codes: Codes) -> bytes:
    rows, columns = _spread(codes)
    order, counts = _by_class(rows, columns)
    head = pack_numbers(zigzag(rows)) + pack_numbers(zigzag(columns))
    return head + pack_classes(zigzag(codes.reshape(-1)[order].astype(np.int32)), counts)


def _unpack_piece(cursor: ByteCursor, out: Codes) -> None:
    n, m = out.shape
    rows, columns = (np.clip(unzigzag(unpack_numbers(cursor, k)), -999, 999) for k in (n, m))
    order, counts = _by_class(rows, columns)
    numbers = unzigzag(unpack_classes(cursor, counts))
    least, most = (int(numbers.min()), int(numbers.max())) if len(numbers) else (0, 0)
    good = least >= -(1 << 15) and most < 1 << 15
    require(good, PayloadError, f"codes from {least} to {most}, 16 bits are expected")
    flat = np.empty(n * m, np.int16)
    flat[order] = numbers
    out[:] = flat.reshape(n, m)


def _by_class(rows: Ints, columns: Ints) -> tuple[npt.NDArray[np.intp], list[int]]:
    """Return the order in which codes come class by class, and how many there are of each."""
    classes = _classes(rows, columns).reshape(-1)
    counts = np.bincount(classes, minlength=CLASSES).tolist()
    return np.argsort(classes, kind="stable"), counts
