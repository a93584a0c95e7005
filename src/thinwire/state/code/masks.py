"""Where a mask is set: a compiled search, or numpy's, made up to twice as fast between 1 and 12 %."""

from __future__ import annotations

import numpy as np

from thinwire.state import native
from thinwire.state.layout import Array

_FEW, _MANY = 64, 8  # numpy's loop is faster below one in 64, where its branches are foreseen, and above 1/8


def where(mask: Array) -> Array:
    """Return the positions of bool [n] that are set: intp, increasing."""
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
