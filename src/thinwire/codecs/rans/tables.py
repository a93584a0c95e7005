"""Frequencies of symbols, and their tables: in integers, so that every device finds the same."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from thinwire.codecs.rans.grid import CONSTANT, MOST, PARAMETERS, SYMBOLS, Ints
from thinwire.types import PayloadError, require

Bytes = npt.NDArray[np.uint8]


def normalised(counts: Ints, bits: int) -> Ints:
    """Return frequencies that sum to 2**``bits``, for counts [256] of two symbols or more.

    They are the counts times a scale, rounded, but 1 at least of what there is: at the largest scale where
    they do not sum to more. What is then left goes, one each, to the first of those that would rise next.

    >>> counts = np.zeros(256, np.int64)
    >>> counts[:3] = 900, 99, 1
    >>> normalised(counts, 8)[:3].tolist()
    [230, 25, 1]
    """
    low, high = 0, (1 << bits) + SYMBOLS + 1
    while high - low > 1:
        scale = (low + high) // 2
        low, high = (scale, high) if _shares(counts, scale).sum() <= 1 << bits else (low, scale)
    found = _shares(counts, low)
    rising = np.flatnonzero(_shares(counts, high) > found)
    found[rising[: (1 << bits) - found.sum()]] += 1
    return found


def _shares(counts: Ints, scale: int) -> Ints:
    n = counts.sum()
    return np.where(counts > 0, np.maximum(1, (counts * scale + n // 2) // n), 0)


def packed(freq: Ints) -> bytes:
    """Return the table of frequencies [256], two of them or more above 0."""
    top = int(freq.nonzero()[0][-1])
    widths = [2 * _widths((freq[:top] >> k) + 1) - 1 + k for k in range(PARAMETERS)]
    k = min(range(PARAMETERS), key=lambda k: int(widths[k].sum()))
    number = at = 0
    for f, width in zip(freq[:top].tolist(), widths[k].tolist(), strict=True):
        number |= _code(f, k) << at
        at += width
    return bytes((k, top)) + number.to_bytes(-(-at // 8), "little")


def _code(f: int, k: int) -> int:
    q = (f >> k) + 1
    w = q.bit_length()
    return 1 << (w - 1) | (q ^ 1 << (w - 1)) << w | (f & ((1 << k) - 1)) << (2 * w - 1)


def _widths(numbers: Ints) -> Ints:
    return np.frexp(numbers.astype(np.float64))[1].astype(np.int64)


def unpacked(table: bytes, bits: int) -> Ints:
    """Return the frequencies [256] of a table; ``PayloadError`` where it is none.

    >>> counts = np.bincount([3, 5, 5, 200], minlength=256)
    >>> bool((unpacked(packed(normalised(counts, 8)), 8) == normalised(counts, 8)).all())
    True
    """
    wrong = "a table of frequencies that no encoder writes"
    require(len(table) >= 2 and table[0] < PARAMETERS, PayloadError, wrong)
    k, top, left = table[0], table[1], 1 << bits
    number, at = int.from_bytes(table[2:], "little"), 0
    freq = np.zeros(SYMBOLS, np.int64)
    for s in range(top):
        window = number >> at
        zeros = (window & -window).bit_length() - 1 if window else MOST + 1
        require(zeros <= MOST, PayloadError, wrong)
        q = window >> (zeros + 1) & ((1 << zeros) - 1) | 1 << zeros
        freq[s] = (q - 1) << k | window >> (2 * zeros + 1) & ((1 << k) - 1)
        left -= int(freq[s])
        require(left > 0, PayloadError, wrong)
        at += 2 * zeros + 1 + k
    freq[top] = left
    require(left < 1 << bits and -(-at // 8) == len(table) - 2, PayloadError, wrong)
    return freq


def constant(symbol: int) -> bytes:
    """Return the table of a segment of one symbol only."""
    return bytes((CONSTANT, symbol))
