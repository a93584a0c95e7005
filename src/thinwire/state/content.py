"""Content hash of a state: 64 bits that follow from the words alone, whichever way a version was reached.

h = START + sum of word * A[low part of its position] * B[high part] * C[piece], modulo 2^64; all factors are
odd and drawn by splitmix64 from a fixed seed. It is a sum, so a change moves it by what changed alone. Words
of 8 bytes count as two of 4, lest two flipped signs cancel. One wrong word of up to 4 bytes always shows; of
several, errors at random stay unnoticed with a chance of about 2^-32 at worst. It is against accidents, not
attackers: links and stores authenticate by keys.

Source: multilinear hashing (Carter and Wegman 1979) [second-hand]; splitmix64 (Steele, Lea and Flood 2014).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from thinwire.state import native
from thinwire.state.layout import PIECE

START = 0x7468696E77697265  # of a state of zeros; nothing at all has the hash 0
_MASK = (1 << 64) - 1
_ROW = native.ROW  # positions of one row: its factors stay in the first-level cache
_SHIFT = _ROW.bit_length() - 1
_ROWS = 32  # converted to 8 bytes at once, by numpy
_RUN = 1 << 14  # changes looked up at once, by numpy


def _splitmix(seed: int, n: int) -> np.ndarray:
    """Return ``n`` odd uint64 that a seed draws."""
    z = np.uint64(seed) + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


_A = _splitmix(1, _ROW)
_B = _splitmix(2, 2 * PIECE // _ROW)


@lru_cache(maxsize=1 << 16)
def _factor(piece: int) -> int:
    return int(_splitmix(3 + (piece << 8), 1)[0])


def whole(words: np.ndarray, piece: int, old: np.ndarray | None = None) -> int:
    """Return what the words [n] of a piece add to the hash; or by how much it moves if they were ``old``."""
    halves, less = _narrow(words), None if old is None else _narrow(old)
    if native.there(halves, *([] if less is None else [less])):
        return native.whole(halves, less, _A, _B) * _factor(piece) & _MASK
    total = 0
    for at in range(0, len(halves), _ROW * _ROWS):
        block = halves[at : at + _ROW * _ROWS].astype(np.int64)
        if less is not None:
            block -= less[at : at + _ROW * _ROWS]
        total += _summed(block.view(np.uint64), at // _ROW)
    return total * _factor(piece) & _MASK


def _summed(block: np.ndarray, row: int) -> int:
    """Return the sum of words, of which the first is at the start of a row, each times its factors."""
    rows = len(block) // _ROW
    sums = np.einsum("ij,j->i", block[: rows * _ROW].reshape(-1, _ROW), _A)
    rest = block[rows * _ROW :]
    total = int((sums * _B[row : row + rows]).sum())
    return total + (int((rest * _A[: len(rest)]).sum()) * int(_B[row + rows]) if len(rest) else 0)


def moved(positions: np.ndarray | None, old: np.ndarray, new: np.ndarray, piece: int) -> int:
    """Return by how much the hash moves when words at ``positions`` [n], each once, become ``new`` [n].

    Without positions these are all words of the piece.
    """
    if positions is None:
        return whole(new, piece, old)
    old, new, total = _narrow(old), _narrow(new), 0
    at = positions if len(old) == len(positions) else np.repeat(2 * positions.astype(np.int64), 2)
    if len(old) > len(positions):
        at[1::2] += 1
    if native.there(at, old, new) and at.dtype == np.int32:
        return native.moved(at, old, new, _A, _B) * _factor(piece) & _MASK
    for i in range(0, len(at), _RUN):
        here = at[i : i + _RUN].astype(np.int64)
        step = np.subtract(new[i : i + _RUN], old[i : i + _RUN], dtype=np.int64).view(np.uint64)
        step *= _A.take(here & _ROW - 1)
        step *= _B.take(here >> _SHIFT)
        total += int(step.sum())
    return total * _factor(piece) & _MASK


def add(*terms: int) -> int:
    """Return the sum of hashes and movements modulo 2^64."""
    return sum(terms) & _MASK


def _narrow(words: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(words).view(np.int32) if words.dtype.itemsize == 8 else words
