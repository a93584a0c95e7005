"""The pass that finds what changed: a trainer's tensor against the words that followers hold.

It casts, compares and takes over in pieces that stay in the cache, so memory is read once: a trainer's
fp32 tensor and the words, which are written where something changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from thinwire.state import native
from thinwire.state.layout import Array
from thinwire.state.patch_code.indexing import read, where, write
from thinwire.state.threads import QUIET
from thinwire.types import InputError, require

_PIECE = 1 << 20  # elements: fewer calls are worth more than a level 2 cache; a third faster than 2**17
_WHOLE = 5  # where more than one in so many changed, all old words take less time than positions and some
_SAMPLE = 1 << 13  # elements that tell whether to count before listing: to give up on a list takes longer
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Fresh = Callable[[Tensor, Array], Array]  # what a piece of words becomes: new values and words held -> words


class Changes(NamedTuple):
    """Where words changed (int32 [n], increasing; None: anywhere), what was there before, and what is now.

    Without positions ``new`` is a view of the words themselves. ``moved`` is how many changed.
    """

    positions: Array | None
    old: Array
    new: Array
    moved: int


Look = Callable[[Tensor, Array], object]
Keep = Callable[[Changes], object]  # told what changed while a failure, or a Ctrl-C, still undoes it


def word_dtype(dtype: torch.dtype) -> np.dtype:
    """Return the signed integer that holds the bits of one element.

    >>> word_dtype(torch.bfloat16)
    dtype('int16')
    """
    if dtype.itemsize not in _WORDS or dtype.is_complex:
        raise InputError(f"elements of {dtype} cannot be kept as words; cast them")
    return np.dtype(f"i{dtype.itemsize}")


def words_of(x: Tensor) -> Array:
    """Return the bits of a CPU tensor as words [numel]; they share its memory where it is contiguous."""
    return x.detach().reshape(-1).view(_WORDS[word_dtype(x.dtype).itemsize]).numpy()


def cast(x: Tensor, into: Tensor) -> Tensor:
    """Write ``x`` [n] into a tensor of the CPU [n], and return that; no thread of torch's own takes part."""
    for start in range(0, into.numel(), QUIET):
        into[start : start + QUIET].copy_(x[start : start + QUIET])
    return into


def changed(
    new: Tensor,
    words: Array,
    dtype: torch.dtype,
    name: str = "a tensor",
    whole: bool = False,
    keep: Keep | None = None,
    look: Look | None = None,
) -> Changes:
    """Cast ``new`` to ``dtype``, bring ``words`` (of as many elements) up to it, and return what changed.

    Bits decide: NaN equals itself, and zero differs from minus zero. With ``whole``, all old words come
    back without positions where that takes less memory. ``name`` is for errors. ``keep`` is told what
    changed before anything can come between, ``look`` each piece that was cast, and its words.

    >>> words = np.zeros(3, dtype=np.int16)
    >>> changed(torch.tensor([0.0, 1.0, 0.0]), words, torch.bfloat16).positions.tolist(), words.tolist()
    ([1], [0, 16256, 0])
    """
    held = word_dtype(dtype)
    if words.dtype != held:
        raise InputError(f"{name}: {dtype} held as {words.dtype}, expected {held}")
    buffer = torch.empty(min(_PIECE, words.size), dtype=dtype, device="cpu")

    def fresh(piece: Tensor, _: Array) -> Array:
        ready = piece.dtype == dtype and piece.is_cpu
        found = words_of(piece if ready else cast(piece, buffer[: piece.numel()]))
        if look is not None and not ready:
            look(piece, found)
        return found

    return replace(new, words, fresh, name, whole, keep)


def replace(
    new: Tensor, words: Array, fresh: Fresh, name: str, whole: bool, keep: Keep | None = None
) -> Changes:
    """Make ``words`` what ``fresh`` says, piece by piece, and return what changed; a failure undoes it."""
    n = new.numel()
    require(n == words.size, InputError, f"{name} has {n} elements, expected {words.size}")
    x, log, room = new.detach().reshape(-1), list[_Changed](), _Room(words)
    try:
        for start in range(0, words.size, _PIECE):
            held = words[start : start + _PIECE]
            now = fresh(x[start : start + _PIECE], held)
            piece = _compared(now, held, start, room)
            if piece is not None:
                log.append(piece)  # before anything is written: then it can be undone
                if piece.at is None:
                    held[:] = now
                else:
                    write(words, piece.at, piece.new)
        found = _joined(log, words, room if whole else None)
        if keep is not None:
            keep(found)
        return found
    except BaseException:
        for piece in log:
            piece.restore(words)
        raise


def replaced(new: Array, words: Array, keep: Keep | None = None) -> Changes:
    """Write ``new`` [n] into ``words`` [n], and return what changed as ``changed`` does."""
    return replace(torch.from_numpy(new), words, lambda piece, _: piece.numpy(), "a tensor", True, keep)


def listed(at: Array, new: Array, words: Array, keep: Keep | None = None) -> Changes:
    """Write ``new`` [n] into ``words`` at positions int32 [n], and return that as ``changed`` does."""
    if at.size * _WHOLE > words.size:
        found = Changes(None, words.copy(), words, at.size)
    else:
        found = Changes(at, read(words, at), new.copy(), at.size)
    if keep is not None:
        keep(found)
    write(words, at, new)
    return found


class _Room:
    """Where words that are overwritten are kept, each at its place, so that nobody has to join them."""

    def __init__(self, words: Array) -> None:
        self._words = words
        self.all = words[:0]

    def keep(self, start: int, held: Array) -> Array:
        """Return a copy of ``held``, the words from ``start`` on."""
        if not self.all.size:
            self.all = np.empty_like(self._words)
        kept = self.all[start : start + held.size]
        kept[:] = held
        return kept


def _compared(now: Array, held: Array, start: int, room: _Room) -> _Changed | None:
    """Return what is to change in ``held``, the words from ``start`` on, for them to be what ``now`` is."""
    most = held.size // _WHOLE
    if native.there(now, held):
        few = native.differing(now[:_SAMPLE], held[:_SAMPLE]) * _WHOLE <= _SAMPLE
        count = 0 if few else native.differing(now, held)  # a sample may differ from the rest
        found = native.compared(now, held, start, most) if count <= most else None
        if found is None:
            return _Changed(start, count or native.differing(now, held), None, room.keep(start, held), held)
        return _Changed(start, found[0].size, *found) if found[0].size else None
    differs = now != held
    count = int(np.count_nonzero(differs))
    if count > most:
        return _Changed(start, count, None, room.keep(start, held), held)
    at = where(differs).astype(np.int32)
    return _Changed(start, at.size, at + np.int32(start), held[at], now[at]) if at.size else None


class _Changed(NamedTuple):
    """What was in one piece of the words, that from ``start`` on: at ``at`` in all of them, or everywhere."""

    start: int
    moved: int
    at: Array | None
    old: Array
    new: Array

    def restore(self, words: Array) -> None:
        if self.at is None:
            words[self.start : self.start + self.old.size] = self.old
        else:
            write(words, self.at, self.old)

    def sparse(self) -> tuple[Array, Array, Array]:
        """Return positions in the words, what was there, and what is."""
        if self.at is not None:
            return self.at, self.old, self.new
        at = where(self.old != self.new)
        return at.astype(np.int32) + np.int32(self.start), self.old[at], self.new[at]


def _joined(log: Sequence[_Changed], words: Array, room: _Room | None) -> Changes:
    """Return what the pieces say together; with ``room`` all old words where that takes less memory."""
    moved = sum(piece.moved for piece in log)
    if room is not None and _WHOLE * moved > words.size:
        return Changes(None, _old(log, words, room), words, moved)
    if not log:
        return Changes(np.empty(0, dtype=np.int32), words[:0].copy(), words[:0].copy(), 0)
    if len(log) == 1:
        return Changes(*log[0].sparse(), moved)
    parts = zip(*(piece.sparse() for piece in log), strict=True)
    at, old, new = (np.concatenate(part) for part in parts)
    return Changes(at, old, new, moved)


def _old(log: Sequence[_Changed], words: Array, room: _Room) -> Array:
    """Return all words as they were."""
    if sum(piece.old.size for piece in log if piece.at is None) == words.size:
        return room.all
    old = words.copy()
    for piece in log:
        piece.restore(old)
    return old
