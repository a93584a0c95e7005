"""The words of one version and of a base before it, read while newer versions take their place.

What newer versions changed, the log knows, and here it is undone. So whoever makes a patch holds the lock for
a run of words at a time, and a trainer that publishes waits no longer than that.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np

from thinwire.state.blocks import Block
from thinwire.state.gather import read
from thinwire.state.log import Change, Entry
from thinwire.state.parting import between


class Gone(Exception):
    """So many versions have come since that the log no longer leads back."""


class Past:
    """Words of the version after which ``since`` lists the log's entries; that raises ``Gone`` in the end.

    ``live`` returns the newest words of a piece, a view. Both are called with ``lock`` held.
    """

    def __init__(
        self,
        lock: AbstractContextManager[object],
        live: Callable[[int], np.ndarray],
        since: Callable[[], list[Entry]],
    ) -> None:
        self._lock, self._live, self._since = lock, live, since

    def words(self, piece: int, start: int, stop: int) -> np.ndarray:
        """Return the words of a piece from ``start`` to before ``stop``, in memory of their own."""
        with self._lock:
            words = self._live(piece)[start:stop].copy()
            for change in self._changes(piece):
                change.undo(words, start)
        return words

    def before(self, change: Change, piece: int, start: int, stop: int) -> np.ndarray:
        """Return the words before ``change``, which led to this version. They are for reading."""
        if change.positions is None:
            return change.old[start:stop]
        words = self.words(piece, start, stop)
        change.undo(words, start)
        return words

    def difference(self, change: Change, piece: int) -> Block:
        """Return what ``change`` made of a piece: the differences where there are any, or all of them."""
        positions, old = change
        with self._lock:
            words = self._live(piece)
            numel = len(words)
            if self._changes(piece):
                words = self.words(piece, 0, numel)
            if positions is None:
                return between(old, words)
            diffs = read(words, positions) - old
        if not diffs.all():
            still = np.flatnonzero(diffs)  # the others are back to what they were
            positions, diffs = positions[still], diffs[still]
        return Block(numel, positions, diffs)

    def _changes(self, piece: int) -> list[Change]:
        """Return what newer versions changed, the latest first."""
        return [e.changes[piece] for e in reversed(self._since()) if piece in e.changes]
