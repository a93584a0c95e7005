"""Where a mask is set, and words at many positions (int32): by compiled passes, or page by page.

To numpy, wide indices are twice as fast as narrow ones, but all of them at once would be fresh memory of four
times the words, and the first touch of that takes longer than the rest.
"""

from __future__ import annotations

import numpy as np

from thinwire.state import native
from thinwire.state.layout import Array

_FEW, _MANY = 64, 8  # numpy's loop is faster below one in 64, where its branches are foreseen, and above 1/8
_PAGE = 1 << 15  # positions at a time


def where(mask: Array) -> Array:
    """Return the positions of bool [n] that are set: intp, increasing; numpy's own search is slower."""
    if native.there(mask):
        return native.where(mask)
    count = int(np.count_nonzero(mask))
    if mask.size % 8 or count * _FEW < mask.size or count * _MANY > mask.size or not mask.flags.c_contiguous:
        return np.flatnonzero(mask)
    eights = mask.view(np.uint64)  # most of these are zero
    some = np.flatnonzero(eights != 0)
    found = np.flatnonzero(eights[some].view(np.bool_))
    at: Array = (some << 3)[found >> 3] | (found & 7)
    return at


def read(words: Array, positions: Array | None) -> Array:
    """Return the words at ``positions`` [n], which are in range; without any, all words, not copied."""
    if positions is None:
        return words
    if _compiled(words, positions):
        return native.take(words, positions)
    found = np.empty(positions.size, dtype=words.dtype)
    for start in range(0, positions.size, _PAGE):
        page = positions[start : start + _PAGE].astype(np.intp)
        words.take(page, out=found[start : start + _PAGE], mode="clip")  # others write by way of a buffer
    return found


def write(words: Array, positions: Array | None, values: Array) -> None:
    """Write ``values`` [n] into ``words`` at ``positions`` [n]; without any, they are all words."""
    if positions is None:
        words[...] = values
        return
    if _compiled(words, positions):
        native.put(words, positions, np.ascontiguousarray(values))
        return
    for start in range(0, positions.size, _PAGE):
        words[positions[start : start + _PAGE].astype(np.intp)] = values[start : start + _PAGE]


def mark(mask: Array, positions: Array) -> None:
    """Set a mask at ``positions`` [n]."""
    if _compiled(mask, positions):
        native.put(mask, positions, np.ones(positions.size, dtype=np.bool_))
        return
    for start in range(0, positions.size, _PAGE):
        mask[positions[start : start + _PAGE].astype(np.intp)] = True


def _compiled(words: Array, positions: Array) -> bool:
    return native.there(words, positions) and positions.dtype == np.int32
