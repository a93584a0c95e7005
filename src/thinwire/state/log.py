"""What each version of a state changed: old words, so that a patch can be made from any version still known.

Over its budget a log merges neighbouring entries whose boundary nobody uses or asked for lately, small ones
first, and then drops the oldest. Versions in use may take some times the budget. The last two stay, whatever
their size: without them, changes of many words would leave nothing to patch from. There are at most ``MOST``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np

from thinwire.state import native
from thinwire.state.layout import Layout, Piece
from thinwire.state.patch_code.blocks import Block, block_at
from thinwire.state.patch_code.classes import block_of
from thinwire.state.patch_code.indexing import mark, read, where, write
from thinwire.state.patches.moves import Move
from thinwire.state.threads import by_runs, room
from thinwire.state.words import Words

KEPT = 2  # entries that no budget takes
MOST = 1024  # entries: what each publication lists
OVERHEAD = 200  # bytes that an entry takes besides its arrays, and so does each change; about
MARKS = 64  # bases lately asked for that are kept apart
IN_USE = 8  # times the budget that all may take while there are bases in use: two states, by default
_DENSE = 3  # a piece of which more than a third changed is logged whole
_MERGE = 5  # below this share of a piece, all rounds of merging in pairs together, nothing is faster
_SCATTER = 64  # merging by scattering over the whole piece pays off from this share of it, against sorting


class Change(NamedTuple):
    """Old words of a piece at ``positions`` [n], rising; all its words where that is None."""

    positions: np.ndarray | None
    old: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        return OVERHEAD + self.old.nbytes + (0 if self.positions is None else self.positions.nbytes)

    def undo(self, words: np.ndarray, start: int) -> None:
        """Put the old words back into ``words``, those of the piece from ``start`` on."""
        stop = start + len(words)
        if self.positions is None:
            words[...] = self.old[start:stop]
        else:
            ends = np.array((start, stop), dtype=self.positions.dtype)  # of another type, all would be cast
            first, last = self.positions.searchsorted(ends)
            write(words, self.positions[first:last] - ends.dtype.type(start), self.old[first:last])


@dataclass(frozen=True)
class LogEntry:
    """What one or more versions after ``base`` changed, by piece; ``hash`` is of the contents at ``base``."""

    base: int
    hash: int
    changes: Mapping[int, Change]

    @property
    def nbytes(self) -> int:
        """Bytes it takes; some even if nothing changed."""
        return OVERHEAD + sum(c.nbytes for c in self.changes.values())


class ChangeLog:
    """Entries in order, each from its base to the next one's, the last to the newest version.

    ``in_use`` returns versions that patches will start from, the most important first; it is asked when
    there is not room for all.
    """

    def __init__(self, layout: Layout, budget: int, in_use: Callable[[], Iterable[int]] = lambda: ()) -> None:
        self.budget, self._in_use = budget, in_use  # bytes
        self._pieces = layout.blocks()
        self._entries: list[LogEntry] = []
        self._marks: OrderedDict[int, None] = OrderedDict()
        self.nbytes = 0

    def append(self, entry: LogEntry) -> None:
        """Add what took ``entry.base`` to the newest version."""
        self._entries.append(entry)
        self.nbytes += entry.nbytes
        self._shrink()

    def bases(self) -> dict[int, int]:
        """Return the versions that can be patched from, oldest first, and the hash of each."""
        return {e.base: e.hash for e in self._entries}

    def mark(self, base: int) -> None:
        """Keep ``base`` as one to patch from while there is room: somebody asked for it, and may again."""
        self._marks[base] = None
        self._marks.move_to_end(base)
        if len(self._marks) > MARKS:
            self._marks.popitem(last=False)

    def known(self) -> tuple[list[LogEntry], int]:
        """Return what ``restore`` goes back to."""
        return [*self._entries], self.nbytes

    def restore(self, known: tuple[list[LogEntry], int]) -> None:
        """Be as it was when ``known`` was returned; what was merged since is apart again."""
        self._entries, self.nbytes = known

    def since(self, base: int) -> list[LogEntry]:
        """Return the entries from ``base`` to the newest version; none where that is not known."""
        start = next((i for i, e in enumerate(self._entries) if e.base == base), None)
        return [] if start is None else self._entries[start:]

    def _shrink(self) -> None:
        if self.nbytes <= self.budget and len(self._entries) <= MOST:
            return
        ranks = {base: i for i, base in enumerate(dict.fromkeys(self._in_use()))}
        while len(self._entries) > KEPT and self._over(ranks):
            at = self._least(ranks)
            if not at:
                self.nbytes -= self._entries.pop(0).nbytes
            else:
                merged = merge(self._entries[at - 1 : at + 1], self._pieces)
                self.nbytes += merged.nbytes - self._entries[at - 1].nbytes - self._entries[at].nbytes
                self._entries[at - 1 : at + 1] = [merged]

    def _over(self, ranks: Mapping[int, int]) -> bool:
        """Return whether there is not room for all. What nobody uses has the budget to itself.

        Else, beside a large entry in use, each small one were merged into it at once, which takes its time.
        """
        if len(self._entries) > MOST:
            return True
        free = sum(e.nbytes for e in self._entries if e.base not in ranks)
        return free > self.budget or self.nbytes > IN_USE * self.budget

    def _least(self, ranks: Mapping[int, int]) -> int:
        """Return the entry whose base to forget.

        First one nobody asked for, then that asked for longest ago, then the last: it may be asked for yet.
        Last come those in use, the least important first.
        """
        lately = {base: i for i, base in enumerate(self._marks)}
        bases, last = [e.base for e in self._entries], len(self._entries) - 1
        free = [i for i, base in enumerate(bases) if base not in ranks]
        inner = [i for i in free if 0 < i < last and bases[i] not in lately]
        if inner:  # where merging costs least
            return min(inner, key=lambda i: self._entries[i - 1].nbytes + self._entries[i].nbytes)
        if free:
            return min(free, key=lambda i: (i == last, lately.get(bases[i], -1)))
        return max(range(last + 1), key=lambda i: ranks[bases[i]])


def logged(move: Move, words: np.ndarray) -> Change:
    """Return the change of a piece that a move has brought to ``words`` [numel], in its shorter form."""
    positions, old = move.positions, move.old
    if positions is None or len(positions) * _DENSE <= len(words):
        return Change(positions, old)
    before = words.copy()
    write(before, positions, old)
    return Change(None, before)


def merge(entries: Sequence[LogEntry], pieces: Sequence[Piece]) -> LogEntry:
    """Return one entry for a run of them: every position that changed, with its word at the first base."""
    by_piece: dict[int, list[Change]] = {}
    for entry in entries:
        for i, change in entry.changes.items():
            by_piece.setdefault(i, []).append(change)
    lists = list(by_piece.items())
    sizes = [sum(len(change.old) for change in found) for _, found in lists]
    runs = by_runs(lambda run: [(i, _union(found, pieces[i].numel)) for i, found in lists[run]], sizes)
    return LogEntry(entries[0].base, entries[0].hash, dict(chain.from_iterable(runs)))


def _union(found: list[Change], numel: int) -> Change:
    """Return the changes of one piece, oldest first, as one."""
    if len(found) == 1:
        return found[0]
    if any(c.positions is None for c in found):
        last = next(i for i, c in enumerate(found) if c.positions is None)
        return Change(None, _roll_back(found[last].old.copy(), found[:last]))
    some = [(c.positions, c.old) for c in found if c.positions is not None]
    total, rounds = sum(len(positions) for positions, _ in some), (len(some) - 1).bit_length()
    if total * rounds * _MERGE < numel and native.there(*(array for both in some for array in both)):
        return Change(*_merged(some))
    if total * _SCATTER < numel:
        positions, first = np.unique(np.concatenate([at for at, _ in some]), return_index=True)
        return Change(positions, np.concatenate([old for _, old in some])[first])
    changed = np.zeros(numel, bool)
    for positions, _ in some:
        mark(changed, positions)
    rising = where(changed).astype(np.int32)
    before = _roll_back(np.empty(numel, found[0].old.dtype), found)
    return Change(rising, read(before, rising))


def _merged(some: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Return positions and old words, oldest first, as one: neighbours are merged until there is one left."""
    while len(some) > 1:
        pairs = zip(some[::2], some[1::2], strict=False)
        some = [native.merge(*a, *b) for a, b in pairs] + some[len(some) & ~1 :]
    return some[0]


def _roll_back(words: np.ndarray, found: list[Change]) -> np.ndarray:
    """Undo changes in ``words``, the latest first, and return them."""
    for c in reversed(found):
        write(words, c.positions, c.old)
    return words


Found = TypeVar("Found")


class Past:
    """The words of the version that ``words`` are of now, whatever becomes of them.

    Whoever overwrites words of a version that is still being read keeps them first. So a reader needs no
    lock: it reads, and where meanwhile they were kept, it reads what was kept. It never waits for a trainer
    that publishes, nor the trainer for it; what that takes is memory, at most a copy of the state for each
    reader.
    """

    def __init__(self, words: Words) -> None:
        self._words, self._kept = words, dict[int, np.ndarray]()

    def lacks(self, piece: int) -> bool:
        """Return whether the words of a piece are to be kept before they are overwritten."""
        return piece not in self._kept

    def keep(self, piece: int, words: np.ndarray) -> None:
        """Take ``words`` [n], which nobody will change, for those of a piece that is to be overwritten."""
        self._kept[piece] = words

    def words(self, piece: int, start: int, stop: int) -> np.ndarray:
        """Return the words of a piece from ``start`` to before ``stop``, in memory of this thread's.

        They are for use until it asks for others.
        """
        into = room("words", stop - start, self._words[piece].dtype)

        def copy(words: np.ndarray) -> np.ndarray:
            np.copyto(into, words[start:stop])
            return into

        return self._read(piece, copy)

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
