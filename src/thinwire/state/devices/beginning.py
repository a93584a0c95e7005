"""The words that a state begins with: of tensors, or of arrays, which need no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import numpy as np

from thinwire.state.layout import Array, Layout, Slot
from thinwire.state.values import bits_of
from thinwire.state.words import Words
from thinwire.types import InputError, require

if TYPE_CHECKING:
    from torch import Tensor


def first_words(layout: Layout, tensors: Mapping[str, Tensor] | Mapping[str, Array]) -> Words:
    """Return the words of tensors, or of arrays; ``InputError`` naming the one that does not fit."""
    arrays = {name: x for name, x in tensors.items() if isinstance(x, np.ndarray)}
    if len(arrays) == len(tensors):
        return _of_arrays(layout, arrays)
    from thinwire.state.devices.resident import filled
    from thinwire.state.intake import named

    return filled(layout, named(layout, cast("Mapping[str, Tensor]", tensors)))[0]


def _of_arrays(layout: Layout, arrays: Mapping[str, Array]) -> Words:
    """Return the words of arrays, taken bit by bit: nothing is cast, and no bound is settled."""
    extra = next((name for name in arrays if name not in layout.index), None)
    require(extra is None, InputError, f"{extra} is not in the layout of this state; leave it out")
    words = Words(layout)
    for i, slot in enumerate(layout.slots):
        given = slot.name in arrays
        require(given, InputError, f"{slot.name} is in the layout of this state, but was not given")
        words.slot(i)[:] = _fitting(slot, arrays[slot.name])
    return words


def _fitting(slot: Slot, x: Array) -> Array:
    require(slot.bound is None, InputError, f"{slot.name} is kept within a bound; give torch's tensors")
    found = bits_of(x, slot.kind)
    fits = (found.kind, found.shape) == (slot.kind, slot.shape)
    told = f"{slot.name} is {found.kind} {list(found.shape)}, expected {slot.kind} {list(slot.shape)}"
    require(fits, InputError, told)
    return found.words
