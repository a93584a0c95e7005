"""Take the differences of each class out of blocks and put them back: run by run, within the cache.

Both ends know the words before the change, so which class an element is of need not travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from thinwire.state.blocks import Block
from thinwire.state.masks import where
from thinwire.state.stream import Array
from thinwire.types import InputError, PayloadError

RUN = 1 << 19  # elements to work on at a time: near the caches, and enough for what each call costs
_WHOLE = 3  # where more than one in so many changed, a difference for every element takes less memory

# Words of a block before its change: its index, and from which element to before which. They may be a view,
# and are done with before others are asked for.
Look = Callable[[int, int, int], Array]
Changes = tuple[Array, Array]  # positions [n], differences [n]


class Run(NamedTuple):
    """Elements ``start`` to ``stop`` of a block, and which of its changes are among them."""

    start: int
    stop: int
    first: int
    last: int

    def changes(self, block: Block) -> Changes:
        """Return the changes here, their positions from ``start`` on: intp."""
        if block.positions is None:
            diffs = block.diffs[self.start : self.stop]
            at = where(diffs != 0)
            return at, diffs.take(at)
        at = block.positions[self.first : self.last].astype(np.intp)
        at -= self.start
        return at, block.diffs[self.first : self.last]

    def back(self, at: Array) -> Array:
        """Return positions from ``start`` on as those in the block: int32 [n]."""
        return at.astype(np.int32) + np.int32(self.start)


def runs(block: Block, length: int, first: int = 0, step: int = 1) -> list[Run]:
    """Return each ``step``-th run of ``length`` elements, but the last, of a block, from the ``first`` on."""
    starts = range(first * length, block.numel, step * length)
    stops = [min(start + length, block.numel) for start in starts]
    if block.positions is None:
        return [Run(start, stop, 0, 0) for start, stop in zip(starts, stops, strict=True)]
    ends = np.array([starts, stops], dtype=block.positions.dtype)  # of another type, all would be cast
    places = block.positions.searchsorted(ends).tolist()
    return [Run(*ends) for ends in zip(starts, stops, *places, strict=True)]


def sizes_at(look: Look, index: int, run: Run, word: np.dtype) -> Array:
    """Return the words of a run without their signs, whose highest byte is their size: unsigned [n]."""
    words = look(index, run.start, run.stop)
    if words.shape != (run.stop - run.start,) or words.dtype != word:
        raise InputError(
            f"{words.size} words of {words.dtype} before a change of {run.stop - run.start} of {word}"
        )
    sizes: Array = words.view(f"u{word.itemsize}") << 1
    return sizes


def take_out(blocks: Sequence[Block], look: Look, cuts: Sequence[int]) -> tuple[list[Array], list[Block]]:
    """Return the differences of all elements of each class, and the blocks of what changed in none."""
    classes: list[list[Array]] = [[] for _ in cuts]
    rest = []
    for i, block in enumerate(blocks):
        word = block.diffs.dtype
        others, every = list[Changes](), np.zeros(min(RUN, block.numel), dtype=word)
        for run in runs(block, RUN):
            sizes = sizes_at(look, i, run, word)
            at, diffs = run.changes(block)
            members, parts = _classed(sizes, cuts)
            every[at] = diffs
            own = every.take(members)
            every[at] = 0
            for found, part in zip(classes, parts, strict=True):
                found.append(own.take(part))
            at, diffs = _outside(sizes, cuts, at, diffs)
            others.append((run.back(at), diffs))
        rest.append(_gathered(block.numel, others, word))
    return [np.concatenate(found) for found in classes], rest


def put_back(rest: Sequence[Block], classes: Sequence[Array], look: Look, cuts: Sequence[int]) -> list[Block]:
    """Undo ``take_out``. Errors: ``PayloadError`` unless there are as many elements of each class."""
    queues = [_Queue(differences) for differences in classes]
    blocks = []
    for i, block in enumerate(rest):
        word, found = block.diffs.dtype, list[Changes]()
        for run in runs(block, RUN):
            sizes = sizes_at(look, i, run, word)
            members, parts = _classed(sizes, cuts)
            own = np.empty(members.size, dtype=word)
            for queue, part in zip(queues, parts, strict=True):
                own[part] = queue.take(part.size)
            some = where(own != 0)
            at, diffs = _merged(
                (members.take(some), own.take(some)), _outside(sizes, cuts, *run.changes(block))
            )
            found.append((run.back(at), diffs))
        blocks.append(_gathered(block.numel, found, word))
    for queue in queues:
        queue.close()
    return blocks


def between(old: Array, new: Array) -> Block:
    """Return what takes ``old`` to ``new``: words [numel] each."""
    moved = int(np.count_nonzero(old != new))
    if moved * _WHOLE > old.size:
        return Block(old.size, None, new - old)
    positions, diffs, done = np.empty(moved, dtype=np.int32), np.empty(moved, dtype=old.dtype), 0
    for start in range(0, old.size if moved else 0, RUN):
        every = new[start : start + RUN] - old[start : start + RUN]
        at = where(every != 0)
        diffs[done : done + at.size] = every.take(at)
        at += start
        positions[done : done + at.size] = at
        done += at.size
    return Block(old.size, positions, diffs)


class _Queue:
    """The differences of a class, of which each run takes as many as it has elements of that class."""

    def __init__(self, differences: Array) -> None:
        self._differences, self._at = differences, 0

    def take(self, n: int) -> Array:
        self._at += n
        if self._at > self._differences.size:
            raise PayloadError("a patch for other words than are held")
        return self._differences[self._at - n : self._at]

    def close(self) -> None:
        if self._at != self._differences.size:
            raise PayloadError("a patch for other words than are held")


def _classed(sizes: Array, cuts: Sequence[int]) -> tuple[Array, list[Array]]:
    """Return where elements below the last cut are, and which of these each class has: intp, increasing."""
    members = where(sizes < _least(cuts[-1], sizes))
    own = sizes.take(members)
    below = [own < _least(cut, sizes) for cut in cuts[:-1]] + [np.ones(own.size, dtype=np.bool_)]
    masks = below[:1] + [b ^ a for a, b in pairwise(below)]
    return members, [where(mask) for mask in masks]


def _outside(sizes: Array, cuts: Sequence[int], at: Array, diffs: Array) -> Changes:
    """Return those changes of a run that have no class."""
    outside = where(sizes.take(at) >= _least(cuts[-1], sizes))
    return at.take(outside), diffs.take(outside)


def _merged(some: Changes, others: Changes) -> Changes:
    """Return all changes, of which no two are at one position, in order."""
    if not others[0].size or not some[0].size:
        return some if some[0].size else others
    at, diffs = (np.concatenate(both) for both in zip(some, others, strict=True))
    order = np.argsort(at, kind="stable")  # a merge: both are in order
    return at.take(order), diffs.take(order)


def _least(cut: int, sizes: Array) -> int:
    return cut << 8 * sizes.itemsize - 8


def _gathered(numel: int, found: Sequence[Changes], word: np.dtype) -> Block:
    at = np.concatenate([np.empty(0, dtype=np.int32), *(at for at, _ in found)], dtype=np.int32)
    block = Block(numel, at, np.concatenate([np.empty(0, dtype=word), *(diffs for _, diffs in found)]))
    return block if at.size * _WHOLE <= numel else Block(numel, None, block.dense())
