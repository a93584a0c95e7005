"""What followers use of the words of a state: the bits of each tensor, as arrays or as torch's tensors.

The bits of a lossy tensor are computed from its words, and have memory of their own.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from thinwire.dtypes import check_torch, name_of
from thinwire.state.layout import PARTS, WORDS, Array, itemsize
from thinwire.state.words import Words, zeros
from thinwire.types import InputError, require

if TYPE_CHECKING:
    from torch import Tensor

_RUN = 1 << 15  # values that are computed at once: they stay in a cache
Place = tuple[int, Array | None]  # a piece, and positions in it; None: all of it


class Bits(NamedTuple):
    """A tensor as the bits of its values: the name of its dtype, its shape, and its words [n]."""

    kind: str
    shape: tuple[int, ...]
    words: Array

    @property
    def array(self) -> Array:
        """The same memory as an array; bits as unsigned integers where numpy has no such dtype.

        It has bfloat16 and floats of 8 bits where the package ml_dtypes is. Of a complex value without a
        dtype there are two integers, in one more dimension.
        """
        dtype = _dtype(self.kind)
        if dtype is None:
            found = self.words.view(f"u{self.words.itemsize}")
            return found.reshape((*self.shape, 2) if self.kind in PARTS else self.shape)
        return self.words.view(dtype).reshape(self.shape)


def bits_of(x: Array, kind: str | None = None) -> Bits:
    """Return the bits of an array; ``kind`` names its dtype where it holds integers in place of that.

    Errors: ``InputError`` for a dtype that cannot be followed.

    >>> bits_of(np.ones(2, np.float16)).words.tolist(), bits_of(np.ones(2, np.uint16), "bfloat16").kind
    ([15360, 15360], 'bfloat16')
    """
    own = name_of(x.dtype)
    used = kind if kind is not None and x.dtype.kind in "iu" else own
    fits = used in WORDS and itemsize(used) == x.itemsize
    require(fits, InputError, f"an array of {own} holds no {used}; give its values or their bits")
    return Bits(used, x.shape, np.ascontiguousarray(x).reshape(-1).view(WORDS[used]))


class View:
    """The values of some words. Lossy ones have memory of their own: ``refresh`` what changed."""

    def __init__(self, words: Words) -> None:
        self.words = words
        layout = words.layout
        bounded = [(i, slot) for i, slot in enumerate(layout.slots) if slot.bound]
        self._values = {i: zeros(slot.count, WORDS[slot.kind]) for i, slot in bounded}
        for i in range(len(layout.blocks())):
            self.refresh(i)

    def bits(self, index: int) -> Bits:
        """Return the bits of a slot, not copied."""
        slot, values = self.words.layout.slots[index], self._values.get(index)
        return Bits(slot.kind, slot.shape, self.words.slot(index) if values is None else values)

    @cached_property
    def slots(self) -> list[Tensor]:
        """A tensor a slot, in the same memory."""
        from thinwire.state.devices.tensor_words import tensor_of

        return [tensor_of(*self.bits(i)) for i in range(len(self.words.layout.slots))]

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors by name, aliases too."""
        return {name: self.slots[i] for name, i in self.words.layout.index.items()}

    @cached_property
    def arrays(self) -> Mapping[str, Array]:
        """The same as arrays."""
        return {name: self.bits(i).array for name, i in self.words.layout.index.items()}

    def refresh(self, piece: int, positions: np.ndarray | None = None) -> None:
        """Compute the values of a piece anew, those at ``positions`` or all."""
        p = self.words.layout.blocks()[piece]
        slot, values = self.words.layout.slots[p.slot], self._values.get(p.slot)
        if values is None or slot.bound is None:
            return
        words, into = self.words[piece], values[p.start : p.stop]
        if positions is None:
            into[:] = told(words, slot.bound, slot.kind)
        else:
            into[positions] = told(words[positions], slot.bound, slot.kind)

    def copy_from(self, other: View) -> None:
        """Take over all words and values of another view of this layout."""
        self.words.copy_from(other.words)
        for i, values in self._values.items():
            np.copyto(values, other._values[i])


def told(words: Array, bound: float, kind: str) -> Array:
    """Return the bits that followers use of a lossy tensor's ``words`` int32 [n]: words of ``kind`` [n]."""
    found, step = np.empty(words.size, WORDS[kind]), np.float32(bound)
    for start in range(0, words.size, _RUN):
        some = words[start : start + _RUN].astype(np.float32)
        some *= step
        found[start : start + _RUN] = narrowed(some, kind)
    return found


def narrowed(x: Array, kind: str) -> Array:
    """Return float32 [n], of which none is NaN, as words of another kind of floats, rounded to nearest even.

    Errors: ``MissingExtra`` for floats of 8 bits without torch and ml_dtypes.

    >>> narrowed(np.float32([1.0, 1.00390625, 1.01171875]), "bfloat16").tolist()
    [16256, 16256, 16258]
    """
    if kind == "bfloat16":
        bits = x.view(np.uint32)
        carried = bits >> np.uint32(16)
        carried &= np.uint32(1)
        carried += np.uint32(0x7FFF)
        carried += bits
        carried >>= np.uint32(16)
        return carried.astype(np.int16)
    with np.errstate(over="ignore"):
        dtype = _dtype(kind)
        if dtype is not None:
            return x.astype(dtype, copy=False).view(WORDS[kind])
    check_torch(f"{kind} within a bound, without the package ml_dtypes, needs")
    import torch

    rounded: Array = torch.from_numpy(x).to(getattr(torch, kind)).view(torch.int8).numpy()
    return rounded


def _dtype(kind: str) -> np.dtype[Any] | None:
    """Return numpy's dtype of that name, or that of ml_dtypes; None where there is none."""
    try:
        return np.dtype(kind)
    except TypeError:
        pass
    if kind.endswith("_x2") or find_spec("ml_dtypes") is None:
        return None
    found = getattr(importlib.import_module("ml_dtypes"), kind, None)
    return None if found is None or np.dtype(found).itemsize != WORDS[kind].itemsize else np.dtype(found)
