"""The words of one version and of a base before it, read while newer versions take their place.

Whoever overwrites words of a version that is still being read keeps them first. So a reader needs no lock:
it reads, and where meanwhile they were kept, it reads what was kept. It never waits for a trainer that
publishes, nor the trainer for it; what that takes is memory, at most a copy of the state for each reader.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from thinwire.state.code.blocks import Block, block_at
from thinwire.state.code.class_split import block_of
from thinwire.state.code.gather import read
from thinwire.state.log import Change
from thinwire.state.words import Words

Found = TypeVar("Found")


class Past:
    """The words of the version that ``words`` are of now, whatever becomes of them."""

    def __init__(self, words: Words) -> None:
        self._words, self._kept = words, dict[int, np.ndarray]()

    def lacks(self, piece: int) -> bool:
        """Return whether the words of a piece are to be kept before they are overwritten."""
        return piece not in self._kept

    def keep(self, piece: int, words: np.ndarray) -> None:
        """Take ``words`` [n], which nobody will change, for those of a piece that is to be overwritten."""
        self._kept[piece] = words

    def words(self, piece: int, start: int, stop: int) -> np.ndarray:
        """Return the words of a piece from ``start`` to before ``stop``, in memory of their own."""
        return self._read(piece, lambda words: words[start:stop].copy())

    def before(self, change: Change | None, piece: int, start: int, stop: int) -> np.ndarray:
        """Return the words before ``change``, if any, which led to this version. They are for reading."""
        if change is None:
            return self.words(piece, start, stop)
        if change.positions is None:
            return change.old[start:stop]
        words = self.words(piece, start, stop)
        change.undo(words, start)
        return words

    def difference(self, change: Change, piece: int) -> Block:
        """Return what ``change`` made of a piece: the differences where there are any, or all of them."""
        positions, old = change
        numel = len(self._words[piece])
        if positions is None:
            return block_of(self._read(piece, lambda words: words - old))
        return block_at(numel, positions, self._read(piece, lambda words: read(words, positions)) - old)

    def _read(self, piece: int, get: Callable[[np.ndarray], Found]) -> Found:
        """Return what ``get`` copies of a piece, whose words may change meanwhile: then it copies again."""
        if self.lacks(piece):
            found = get(self._words[piece])
            if self.lacks(piece):  # only now it is known that nobody wrote meanwhile
                return found
        return get(self._kept[piece])
