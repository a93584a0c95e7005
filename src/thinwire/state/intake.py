"""From a trainer's tensors to words: the first time whole, then what changed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from thinwire.state.compare import Changes, Keep, changed, words_of
from thinwire.state.grid import settle
from thinwire.state.layout import BARE, INTEGERS, PIECE, Array, Slot

Look = Callable[[Slot, Tensor, Array], object]  # told of values that were cast, and of their words


def fill(slot: Slot, x: Tensor, words: np.ndarray, look: Look | None = None) -> None:
    """Write ``x`` into ``words`` [numel], which are zeros. Errors: ``InputError`` for NaN in a lossy one."""
    if slot.bound is None:
        words[...] = words_of(plain(x).to("cpu", slot.taken).contiguous())
        if look is not None:
            look(slot, x, words)
        return
    values = flat(slot, x)
    for at in range(0, words.size, PIECE):  # positions, which nobody wants here, are int32
        some = slice(at, at + PIECE)
        settle(values[some], words[some], slot.bound, slot.name, dtype=slot.dtype)


def take(
    slot: Slot, x: Tensor, words: np.ndarray, keep: Keep | None = None, look: Look | None = None
) -> Changes:
    """Bring ``words`` [n] up to ``x`` [n] and return what changed.

    Where much of it did, all old words come without positions. ``keep`` as in ``changed``.

    Errors: ``InputError`` for NaN in a lossy tensor, and then no word has changed.
    """
    if slot.bound is None:
        seen = None if look is None else partial(look, slot)
        return changed(x, words, slot.taken, slot.name, whole=True, keep=keep, look=seen)
    return settle(x, words, slot.bound, slot.name, whole=True, dtype=slot.dtype, keep=keep)


def flat(slot: Slot, x: Tensor, look: Look | None = None) -> Tensor:
    """Return the values of ``x`` in this machine's memory, 1-D; from another device they come cast."""
    x = plain(x)
    if x.device.type != "cpu":
        there, x = x, (x.to(slot.taken) if slot.bound is None else x.float()).cpu()
        if look is not None and slot.bound is None:
            look(slot, there, words_of(x.contiguous()))
    return x.contiguous().reshape(-1)


def plain(x: Tensor) -> Tensor:
    """Return ``x`` without its history, in memory as it reads, and truths as 0 and 1: torch takes others too.

    What has too few operations comes as integers of its bits; a complex value as two of them, in one more
    dimension.
    """
    if x.dtype is torch.bool:
        return x.view(torch.uint8) != 0
    x = x.detach().resolve_conj().resolve_neg()
    if x.dtype not in BARE:
        return x
    return (torch.view_as_real(x) if x.is_complex() else x).view(INTEGERS[BARE[x.dtype]])
