"""Classes of elements by the size of the word they had: whether they change depends on little else.

A step of an optimiser is about as large for every weight; the spacing of floats is not. At a small learning
rate the weights near zero, a few in a thousand, change at each step and most others never. Both ends hold the
old words, so the elements below some cuts are coded as classes of their own, in which nearly all or a known
share changes: where they are costs next to nothing. On weights of SmolLM2-135M with steps as Adam's this
more than halves the bytes at a learning rate of 1e-6, and takes a third off at 1e-5. Up to 16 classes, nearly
one for each exponent in which anything moves, take a tenth to a fifth fewer bytes than four.

To read all words takes 0.7 ns an element at each end, and 3 to 8 ns more for one that has a class. Below
one change in 8192 the patch is so small that this is not worth it. Above one in 8, where a fifth of the bytes
is gained, comparing and coding would take over 5 ns an element.

A size is the highest byte of a word without its sign: the exponent of bf16 and fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from thinwire.state import native
from thinwire.state.layout import Array
from thinwire.state.native import MOST
from thinwire.state.patch_code import indexing
from thinwire.state.patch_code.blocks import Block
from thinwire.state.patch_code.indexing import where
from thinwire.types import InputError, PayloadError

RUN = 1 << 22  # elements to work on at a time: a piece, as threads share what holds the interpreter
_WHOLE = 3  # where more than one in so many changed, a difference for every element takes less memory

# Words of a block before its change: its index, and from which element to before which. They may be a view,
# and are done with before others are asked for.
Look = Callable[[int, int, int], Array]
Changes = tuple[Array, Array]  # positions [n], differences [n]

_OTHER = "a patch for other words than are held"
MAX_CUTS = MOST
_SIZES = 256
_SYMBOLS = 18  # unchanged, and the bit lengths of a difference from 1 to 17 and above
_FEWEST = 256  # changes that are worth a table
_PER_CLASS = 2000  # bits: what its streams cost, however short
_PER_MEMBER = 0.05  # bits that justify the time for an element that is coded by class, 3 to 8 ns at each end
_RARE, _OFTEN = 1 << 13, 8  # changes of one in so many elements, between which there are classes
_SAMPLE = 1 << 10  # elements of a run whose sizes are counted
_MOST = 1 << 14  # changes that are counted, about
_RUNS = 256  # that these come from, about
_BELOW = 2.0**-16  # share of elements not worth a cut below them


class ElementRun(NamedTuple):
    """Elements ``start`` to ``stop`` of a block, and which of its changes are among them."""

    start: int
    stop: int
    first: int
    last: int

    def changes(self, block: Block) -> Changes:
        """Return the changes here, their positions from ``start`` on: int32."""
        if block.positions is None:
            diffs = block.diffs[self.start : self.stop]
            at = where(diffs != 0)
            return at.astype(np.int32), diffs.take(at)
        at = block.positions[self.first : self.last].astype(np.int32, copy=False) - np.int32(self.start)
        return at, block.diffs[self.first : self.last]

    def back(self, at: Array) -> Array:
        """Return positions from ``start`` on as those in the block: int32 [n]."""
        found: Array = at + np.int32(self.start)
        return found


def runs(block: Block, length: int, first: int = 0, step: int = 1) -> list[ElementRun]:
    """Return each ``step``-th run of ``length`` elements, but the last, of a block, from the ``first`` on."""
    starts = range(first * length, block.numel, step * length)
    stops = [min(start + length, block.numel) for start in starts]
    if block.positions is None:
        return [ElementRun(start, stop, 0, 0) for start, stop in zip(starts, stops, strict=True)]
    ends = np.array([starts, stops], dtype=block.positions.dtype)  # of another type, all would be cast
    places = block.positions.searchsorted(ends).tolist()
    return [ElementRun(*ends) for ends in zip(starts, stops, *places, strict=True)]


def words_at(look: Look, index: int, run: ElementRun, word: np.dtype) -> Array:
    """Return the words of a run before the change [n]."""
    words = look(index, run.start, run.stop)
    if words.shape != (run.stop - run.start,) or words.dtype != word:
        raise InputError(
            f"{words.size} words of {words.dtype} before a change of {run.stop - run.start} of {word}"
        )
    return words


def sizes_of(words: Array) -> Array:
    """Return words without their signs, whose highest byte is their size: unsigned [n]."""
    sizes: Array = words.view(f"u{words.itemsize}") << 1
    return sizes


def take_out(blocks: Sequence[Block], look: Look, cuts: Sequence[int]) -> tuple[list[Array], list[Block]]:
    """Return the differences of all elements of each class, and the blocks of what changed in none."""
    classes: list[list[Array]] = [[] for _ in cuts]
    rest = []
    for i, block in enumerate(blocks):
        word = block.diffs.dtype
        least = _least(cuts, word)
        others = list[Changes]()
        for run in runs(block, RUN):
            parts, (at, diffs) = _sorted(words_at(look, i, run, word), least, *run.changes(block))
            for found, part in zip(classes, parts, strict=True):
                found.append(part)
            others.append((run.back(at), diffs))
        rest.append(_gathered(block.numel, others, word))
    return [np.concatenate(found) for found in classes], rest


def put_back(rest: Sequence[Block], classes: Sequence[Array], look: Look, cuts: Sequence[int]) -> list[Block]:
    """Undo ``take_out``. Errors: ``PayloadError`` unless there are as many elements of each class."""
    taken, blocks = [0 for _ in cuts], []
    for i, block in enumerate(rest):
        word, found = block.diffs.dtype, list[Changes]()
        least = _least(cuts, word)
        for run in runs(block, RUN):
            words = words_at(look, i, run, word)
            own = _unsorted(words, least, classes, taken)
            at, diffs = _merged(own, _outside(words, least, *run.changes(block)))
            found.append((run.back(at), diffs))
        blocks.append(_gathered(block.numel, found, word))
    if taken != [differences.size for differences in classes]:
        raise PayloadError(_OTHER)
    return blocks


def block_of(diffs: Array) -> Block:
    """Return differences [numel], zero where nothing changed, as a block that takes little memory."""
    block = Block(diffs.size, None, diffs)
    return block if block.moved * _WHOLE > diffs.size else Block(diffs.size, *block.sparse())


def _sorted(words: Array, least: Array, at: Array, diffs: Array) -> tuple[list[Array], Changes]:
    """Return the differences of all elements of each class, and those changes of a run that have none."""
    if native.there(words, at, diffs):
        listed, *others = native.sort(words, least, at, diffs)
        return listed, (others[0], others[1])
    every = np.zeros(words.size, dtype=diffs.dtype)
    indexing.write(every, at, diffs)
    members, parts = _classed(words, least)
    own = every.take(members)
    return [own.take(part) for part in parts], _outside(words, least, at, diffs)


def _unsorted(words: Array, least: Array, classes: Sequence[Array], taken: list[int]) -> Changes:
    """Return what changed among the elements of classes, whose differences follow those that were taken."""
    if native.there(words, *classes):
        found = native.unsort(words, least, classes, taken)
        if found is None:
            raise PayloadError(_OTHER)
        return found
    members, parts = _classed(words, least)
    own = np.empty(members.size, dtype=words.dtype)
    for i, (part, differences) in enumerate(zip(parts, classes, strict=True)):
        start, stop = taken[i], taken[i] + part.size
        if stop > differences.size:
            raise PayloadError(_OTHER)
        own[part], taken[i] = differences[start:stop], stop
    some = where(own != 0)
    return members.take(some).astype(np.int32), own.take(some)


def _classed(words: Array, least: Array) -> tuple[Array, list[Array]]:
    """Return where elements below the last cut are, and which of these each class has: intp, increasing."""
    sizes = sizes_of(words)
    members = where(sizes < least[-1])
    own = sizes.take(members)
    below = [own < cut for cut in least[:-1]] + [np.ones(own.size, dtype=np.bool_)]
    masks = below[:1] + [b ^ a for a, b in pairwise(below)]
    return members, [where(mask) for mask in masks]


def _outside(words: Array, least: Array, at: Array, diffs: Array) -> Changes:
    """Return those changes of a run that have no class."""
    most = least[-1]
    if native.there(words, at, diffs):
        return native.outside(words, int(most), at, diffs)
    some = where(sizes_of(words.take(at)) >= most)
    return at.take(some), diffs.take(some)


def _merged(some: Changes, others: Changes) -> Changes:
    """Return all changes, of which no two are at one position, in order."""
    if not others[0].size or not some[0].size:
        return some if some[0].size else others
    if native.there(*some, *others):
        return native.merge(*some, *others)
    at, diffs = (np.concatenate(both) for both in zip(some, others, strict=True))
    order = np.argsort(at, kind="stable")  # a merge: both are in order
    return at.take(order), diffs.take(order)


def _least(cuts: Sequence[int], word: np.dtype) -> Array:
    """Return from which size on words are of no class below a cut: unsigned, one a cut."""
    return np.array([cut << 8 * word.itemsize - 8 for cut in cuts], dtype=f"u{word.itemsize}")


def _gathered(numel: int, found: Sequence[Changes], word: np.dtype) -> Block:
    at = np.concatenate([np.empty(0, dtype=np.int32), *(at for at, _ in found)], dtype=np.int32)
    block = Block(numel, at, np.concatenate([np.empty(0, dtype=word), *(diffs for _, diffs in found)]))
    return block if at.size * _WHOLE <= numel else Block(numel, None, block.dense())


def choose(blocks: Sequence[Block], look: Look) -> list[int]:
    """Return the cuts between classes that need fewest bits: increasing sizes; none where that is no gain."""
    moved, numel = sum(block.moved for block in blocks), sum(block.numel for block in blocks)
    if not max(_FEWEST, numel // _RARE) <= moved <= numel // _OFTEN:
        return []
    step = 1 + moved // _MOST  # look at one run in so many
    length = min(RUN, max(_SAMPLE, numel // step // _RUNS))
    first, all_sizes, sizes_then, by = 0, np.zeros(_SIZES), list[Array](), list[Array]()
    for i, block in enumerate(blocks):
        for run in runs(block, length, first, step):
            words = words_at(look, i, run, block.diffs.dtype)
            sizes = sizes_of(words) >> (8 * block.diffs.itemsize - 8)
            sample = sizes[:_SAMPLE]
            all_sizes += np.bincount(sample, minlength=_SIZES) * (sizes.size / sample.size)
            at, diffs = run.changes(block)
            sizes_then.append(sizes[at])
            by.append(diffs)
        first = (first + block.numel // -length) % step
    if not by:
        return []
    return _cheapest(step * _table(all_sizes, np.concatenate(sizes_then), np.concatenate(by)))


def _table(all_sizes: Array, sizes: Array, diffs: Array) -> Array:
    """Return about how many elements of each size have each symbol: none, or the bits of a difference."""
    symbols = np.minimum(np.frexp(np.abs(diffs.astype(np.float32)))[1], _SYMBOLS - 1)
    counts = np.bincount(sizes.astype(np.intp) * _SYMBOLS + symbols, minlength=_SIZES * _SYMBOLS)
    table = counts.reshape(_SIZES, _SYMBOLS).astype(np.float64)
    table[:, 0] = np.maximum(all_sizes - table.sum(1), 0)
    return table


def _cheapest(table: Array) -> list[int]:
    """Return the best cuts by dynamic programming over their number and the last one."""
    some = np.flatnonzero(table[:, 1:].any(1))
    if not some.size:
        return []
    rare = np.searchsorted(np.cumsum(table.sum(1)), table.sum() * _BELOW)  # not worth the time to look at
    at = np.arange(max(some[0], rare), min(some[-1] + 2, _SIZES))  # where a cut may be
    sums = np.concatenate([np.zeros((1, _SYMBOLS)), np.cumsum(table, 0)])[at]
    sums[0] = 0  # the first class begins there
    n = at.size
    inner = sums[None, :] - sums[:, None]
    cost = _bits(inner) + _PER_CLASS + _PER_MEMBER * inner.sum(2)
    cost[np.tril_indices(n)] = np.inf
    rest = table.sum(0) - sums
    rest[:, 0] = table.sum() - rest[:, 1:].sum(1)  # coded among all elements: the classes are holes
    last = _bits(rest)
    best, paths = np.where(np.arange(n) == 0, 0.0, np.inf), [list[int]() for _ in range(n)]
    least, cuts = float(last[0]), list[int]()
    for _ in range(MAX_CUTS):
        total = best[:, None] + cost
        origin = total.argmin(0)
        best, paths = total.min(0), [[*paths[a], b] for b, a in enumerate(origin)]
        b = int((best + last).argmin())
        if best[b] + last[b] < least:
            least, cuts = float(best[b] + last[b]), paths[b]
    return [int(at[b]) for b in cuts]


def _bits(counts: Array) -> Array:
    """Return the order-0 entropy of symbols of these counts [..., symbols] in bits, of all together."""
    bits: Array = _weighed(counts.sum(-1)) - _weighed(counts).sum(-1)
    return bits


def _weighed(counts: Array) -> Array:
    """Return n * log2(n), 0 for 0 and below."""
    positive = np.maximum(counts, 1e-9)
    weighed: Array = positive * np.log2(positive)
    return weighed
