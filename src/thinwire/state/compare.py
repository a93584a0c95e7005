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

from thinwire.state.gather import read
from thinwire.state.masks import where
from thinwire.state.stream import Array
from thinwire.types import InputError, require

_PIECE = 1 << 19  # elements: fewer calls are worth more than a level 2 cache; a fifth faster than 2**17
_WHOLE = 5  # where more than one in so many changed, all old words take less time than positions and some
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Fresh = Callable[[Tensor, Array], Array]  # what a piece of words becomes: new values and words held -> words


class Changes(NamedTuple):
    """Where words changed (int32 [n], increasing; None: anywhere), and what was there before (words [n])."""

    positions: Array | None
    old: Array

    def diffs(self, words: Array) -> Array:
        """Return by how much ``words`` [numel] now differ from what was there, modulo 2**bits: words [n]."""
        return read(words, self.positions) - self.old


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


def changed(
    new: Tensor, words: Array, dtype: torch.dtype, name: str = "a tensor", whole: bool = False
) -> Changes:
    """Cast ``new`` to ``dtype``, bring ``words`` (of as many elements) up to it, and return what changed.

    Bits decide: NaN equals itself, and zero differs from minus zero. With ``whole``, all old words come
    back without positions where that takes less memory. ``name`` is for errors.

    >>> words = np.zeros(3, dtype=np.int16)
    >>> changed(torch.tensor([0.0, 1.0, 0.0]), words, torch.bfloat16).positions.tolist(), words.tolist()
    ([1], [0, 16256, 0])
    """
    held = word_dtype(dtype)
    if words.dtype != held:
        raise InputError(f"{name}: {dtype} held as {words.dtype}, expected {held}")
    buffer = torch.empty(min(_PIECE, words.size), dtype=dtype)

    def cast(piece: Tensor, _: Array) -> Array:
        ready = piece.dtype == dtype and piece.is_cpu
        return words_of(piece if ready else buffer[: piece.numel()].copy_(piece))

    return replace(new, words, cast, name, whole)


def replace(new: Tensor, words: Array, fresh: Fresh, name: str, whole: bool) -> Changes:
    """Make ``words`` what ``fresh`` says, piece by piece, and return what changed; a failure undoes it."""
    n = new.numel()
    require(n == words.size, InputError, f"{name} has {n} elements, expected {words.size}")
    x, log = new.detach().reshape(-1), list[_Piece]()
    try:
        for start in range(0, words.size, _PIECE):
            held = words[start : start + _PIECE]
            now = fresh(x[start : start + _PIECE], held)
            differs = now != held
            count = int(np.count_nonzero(differs))
            if count * _WHOLE > held.size:
                log.append(_Piece(start, count, None, held.copy()))
                held[:] = now
            elif count:
                at = where(differs)
                log.append(_Piece(start, count, at, held[at]))
                held[at] = now[at]
    except BaseException:
        for piece in log:
            piece.restore(words)
        raise
    return _joined(log, words, whole)


class _Piece(NamedTuple):
    """What was in one piece of the words: at ``at``, or everywhere."""

    start: int
    moved: int
    at: Array | None
    old: Array

    def restore(self, words: Array) -> None:
        piece = words[self.start : self.start + _PIECE]
        piece[slice(None) if self.at is None else self.at] = self.old

    def sparse(self, words: Array) -> tuple[Array, Array]:
        """Return positions in ``words``, and what was there."""
        at, old = self.at, self.old
        if at is None:
            at = where(old != words[self.start : self.start + _PIECE])
            old = old[at]
        return at.astype(np.int32) + np.int32(self.start), old


def _joined(log: Sequence[_Piece], words: Array, whole: bool) -> Changes:
    if whole and _WHOLE * sum(piece.moved for piece in log) > words.size:
        old = words.copy()
        for piece in log:
            piece.restore(old)
        return Changes(None, old)
    parts = [piece.sparse(words) for piece in log]
    if not parts:
        return Changes(np.empty(0, dtype=np.int32), words[:0].copy())
    return Changes(np.concatenate([p for p, _ in parts]), np.concatenate([o for _, o in parts]))
