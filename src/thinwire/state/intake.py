"""From a trainer's tensors to words: the first time whole, then what changed."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from thinwire.dtypes import name_of
from thinwire.state.devices.tensor_words import INSTEAD, taken
from thinwire.state.find_changes import Changes, Keep, cast, changed, words_of
from thinwire.state.layout import WORDS, Array, Layout, Slot, form_of, takes_casts
from thinwire.state.lossy import settle
from thinwire.state.tensor_kinds import check_dense
from thinwire.state.values import Bits
from thinwire.types import InputError, require

BATCH = 1 << 28  # elements

Look = Callable[[Slot, Tensor, Array], object]  # told of values that were cast, and of their words


def batches(layout: Layout, tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the pieces of those tensors that are in this machine's memory, as many as are worked on at once.

    Those of one tensor are together: one that lies in memory in another order than it is read is copied.
    """
    found, total = [list[int]()], 0
    for i, piece in enumerate(layout.blocks()):
        if tensors[piece.slot].device.type != "cpu":
            continue
        if total >= BATCH and not piece.start:
            found.append([])
            total = 0
        found[-1].append(i)
        total += piece.numel
    return found


def flats(layout: Layout, pieces: Sequence[int], tensors: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return the values of each slot of some pieces, 1-D."""
    slots = {layout.blocks()[i].slot for i in pieces}
    return {i: plain(tensors[i]).contiguous().reshape(-1) for i in slots}


def fill(slot: Slot, x: Tensor, words: np.ndarray, look: Look | None = None) -> None:
    """Write ``x`` [n] into ``words`` [n], which are zeros. Errors: ``InputError`` for NaN in a lossy one."""
    if slot.bound is not None:
        settle(x, words, slot.bound, slot.name, dtype=slot.dtype)
        return
    kind = taken(slot)
    if x.dtype == kind:
        words[...] = words_of(x)
        return
    cast(x, torch.from_numpy(words).view(kind))
    if look is not None:
        look(slot, x, words)


def take(
    slot: Slot, x: Tensor, words: np.ndarray, keep: Keep | None = None, look: Look | None = None
) -> Changes:
    """Bring ``words`` [n] up to ``x`` [n] and return what changed.

    Where much of it did, all old words come without positions. ``keep`` as in ``changed``.

    Errors: ``InputError`` for NaN in a lossy tensor, and then no word has changed.
    """
    if slot.bound is None:
        seen = None if look is None else partial(look, slot)
        return changed(x, words, taken(slot), slot.name, whole=True, keep=keep, look=seen)
    return settle(x, words, slot.bound, slot.name, whole=True, dtype=slot.dtype, keep=keep)


def plain(x: Tensor) -> Tensor:
    """Return ``x`` without its history, in memory as it reads, and truths as 0 and 1: torch takes others too.

    What has too few operations comes as integers of its bits; a complex value as two of them, in one more
    dimension.
    """
    if x.dtype is torch.bool:
        return x.view(torch.uint8) != 0
    x = x.detach().resolve_conj().resolve_neg()
    if x.dtype not in INSTEAD:
        return x
    return (torch.view_as_real(x) if x.is_complex() else x).view(INSTEAD[x.dtype])


def bits_of(x: Tensor) -> Bits:
    """Return the bits of a tensor of this machine's; not copied where it lies in memory as it reads."""
    kind = name_of(x.dtype)
    if not x.numel():
        return Bits(kind, tuple(x.shape), np.zeros(0, WORDS[kind]))
    flat: Array = plain(x).contiguous().reshape(-1).view(torch.uint8).numpy()
    return Bits(kind, tuple(x.shape), flat.view(WORDS[kind]))


def named(layout: Layout, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the tensor of each slot.

    Errors: ``InputError`` naming the first that is missing, too many, of another shape, or not castable.
    """
    extra = next((n for n in tensors if n not in layout.index), None)
    require(extra is None, InputError, f"{extra} is not in the layout of this state; publish it anew")
    for slot in layout.slots:
        given = slot.name in tensors
        require(given, InputError, f"{slot.name} is in the layout of this state, but was not given")
        check_fits(slot, tensors[slot.name])
    for alias, target in layout.aliases:
        if alias not in tensors:
            continue
        check_dense(alias, tensors[alias])
        same = _same(tensors[alias], tensors[target])
        require(same, InputError, f"{alias} was tied to {target} and now differs; publish the state anew")
    return [tensors[s.name] for s in layout.slots]


def _same(x: Tensor, y: Tensor) -> bool:
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if x.data_ptr() == y.data_ptr() and form_of(x) == form_of(y):
        return True
    ours, theirs = (plain(z).contiguous().reshape(-1).view(torch.uint8) for z in (x, y))
    return torch.equal(ours, theirs.to(ours.device))


def check_fits(slot: Slot, x: Tensor) -> None:
    """Raise ``InputError`` unless ``x`` has the slot's shape, can be cast to its dtype and is dense."""
    check_dense(slot.name, x)
    if x.shape != slot.shape:  # not by require: names of dtypes take longer than all the rest
        raise InputError(f"{slot.name}: shape {tuple(x.shape)}, expected {slot.shape}")
    if x.dtype != slot.dtype and not (takes_casts(x.dtype) and takes_casts(slot.kind)):
        raise InputError(f"{slot.name}: {x.dtype} cannot stand for {slot.dtype}")


class Overflows:
    """Count what overflows in a version, and warn of it once a tensor; ``strict`` refuses it each time."""

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self._found: dict[str, int] = {}
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Count from here."""
        self._found.clear()

    def look(self, slot: Slot, x: Tensor, words: Array) -> None:
        """Count the values of ``x`` that the slot's dtype cannot hold; ``words`` are what became of it."""
        if words.size and narrows(x.dtype, slot.dtype) and _reach_end(words, slot.dtype):
            self._count(slot, x)

    def note(self, slot: Slot, x: Tensor, largest: int) -> None:
        """The same where it is known which of the words is the largest without its sign."""
        if largest >= _end(slot.dtype):
            self._count(slot, x)

    def _count(self, slot: Slot, x: Tensor) -> None:
        limit = largest(slot.dtype)
        sizes = (x.detach().float() if x.dtype.itemsize == 1 else x.detach()).abs()
        if many := int(((sizes >= limit) & sizes.isfinite()).sum()):
            with self._lock:  # pieces of one tensor may be looked at at once
                self._found[slot.name] = self._found.get(slot.name, 0) + many

    def tell(self, slots: Iterable[Slot]) -> None:
        """Warn of what was counted since ``begin``, or raise ``InputError``."""
        for slot in slots:
            many = self._found.get(slot.name, 0)
            if not many or (slot.name in self._told and not self.strict):
                continue
            text = f"{many} value{'s' * (many > 1)} of {slot.name} are too large for {slot.kind}"
            if self.strict:
                raise InputError(f"{text}; publish it in a wider dtype, or scale it")
            self._told.add(slot.name)
            warnings.warn(f"{text}: followers get infinity, NaN or the largest number", stacklevel=8)


def narrows(given: torch.dtype, dtype: torch.dtype) -> bool:
    """Return whether a cast may make infinity, or NaN, of numbers."""
    casts = given != dtype and takes_casts(given) and takes_casts(dtype)
    return casts and torch.finfo(given).max > torch.finfo(dtype).max


def _reach_end(words: Array, dtype: torch.dtype) -> bool:
    """Return whether a word is the largest finite value or beyond, of either sign.

    Words are narrow and in a cache: to look at the values that were cast takes several times as long.
    """
    end = _end(dtype)
    sign = 1 << (8 * words.itemsize - 1)
    return int(words.max()) >= end or int(words.view(f"u{words.itemsize}").max()) >= end + sign


@lru_cache
def _end(dtype: torch.dtype) -> int:
    """Return the bits of the largest finite value; those of infinity and NaN are above."""
    value = torch.tensor([torch.finfo(dtype).max], dtype=torch.float64, device="cpu").to(dtype)
    return int(value.view(torch.uint8).numpy().view(WORDS[name_of(dtype)])[0])


@lru_cache
def largest(dtype: torch.dtype) -> float:
    """Return the least magnitude that rounds to more than ``dtype`` can hold.

    >>> largest(torch.float16), largest(torch.float8_e4m3fn)
    (65520.0, 464.0)
    """
    info = torch.finfo(dtype)
    return info.max + 2.0 ** math.floor(math.log2(info.max)) * info.eps / 2
