"""Casts that overflow: values of a source that are too large for the dtype in which followers use them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from thinwire.state.layout import Array, Slot
from thinwire.types import InputError


class Overflows:
    """Count what overflows in a version, and warn of it once a tensor; ``strict`` refuses it each time."""

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self._found: dict[str, int] = {}
        self._told: set[str] = set()

    def begin(self) -> None:
        """Count from here."""
        self._found.clear()

    def look(self, slot: Slot, x: Tensor, _words: Array) -> None:
        """Count the values of ``x`` that the slot's dtype cannot hold."""
        if x.dtype == slot.dtype or not (
            x.is_floating_point() and slot.dtype.is_floating_point and x.numel()
        ):
            return
        limit = largest(slot.dtype)
        if torch.finfo(x.dtype).max < limit or bool((sizes := x.detach().abs()).amax() < limit):
            return
        if many := int(((sizes >= limit) & sizes.isfinite()).sum()):
            self._found[slot.name] = self._found.get(slot.name, 0) + many

    def tell(self, slots: Iterable[Slot]) -> None:
        """Warn of what was counted since ``begin``, or raise ``InputError``."""
        for slot in slots:
            many = self._found.get(slot.name, 0)
            if not many or (slot.name in self._told and not self.strict):
                continue
            dtype = str(slot.dtype).removeprefix("torch.")
            text = f"{many} value{'s' * (many > 1)} of {slot.name} are too large for {dtype}"
            if self.strict:
                raise InputError(f"{text}; publish it in a wider dtype, or scale it")
            self._told.add(slot.name)
            warnings.warn(f"{text}: followers get infinity, NaN or the largest number", stacklevel=4)


def largest(dtype: torch.dtype) -> float:
    """Return the least magnitude that rounds to more than ``dtype`` can hold.

    >>> largest(torch.float16), largest(torch.float8_e4m3fn)
    (65520.0, 464.0)
    """
    info = torch.finfo(dtype)
    return info.max + 2.0 ** math.floor(math.log2(info.max)) * info.eps / 2
