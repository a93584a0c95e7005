"""Classes of elements by the size of the word they had: whether they change depends on little else.

A step of an optimiser is about as large for every weight; the spacing of floats is not. At a small learning
rate the weights near zero, a few in a thousand, change at each step and most others never. Both ends hold the
old words, so the elements below some cuts are coded as classes of their own, in which nearly all or a known
share changes: where they are costs next to nothing. On weights of SmolLM2-135M with steps as Adam's this
more than halves the bytes at a learning rate of 1e-6, and takes a third off at 1e-5.

To read all words takes 0.7 ns an element at each end, and 6 to 8 ns more for one that has a class. Below
one change in 8192 the patch is so small that this is not worth it. Above one in 8, where a fifth of the bytes
is gained, comparing and coding would take over 5 ns an element.

A size is the highest byte of a word without its sign: the exponent of bf16 and fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thinwire.state.code.blocks import Block
from thinwire.state.code.class_split import RUN, Look, runs, sizes_of, words_at
from thinwire.state.layout import Array
from thinwire.state.native import MOST

MAX_CUTS = MOST
_SIZES = 256
_SYMBOLS = 18  # unchanged, and the bit lengths of a difference from 1 to 17 and above
_FEWEST = 256  # changes that are worth a table
_PER_CLASS = 2000  # bits: what its streams cost, however short
_PER_MEMBER = 0.3  # bits that justify the time for an element that is coded by class, about 8 ns at each end
_RARE, _OFTEN = 1 << 13, 8  # changes of one in so many elements, between which there are classes
_SAMPLE = 1 << 10  # elements of a run whose sizes are counted
_MOST = 1 << 13  # changes that are counted, about
_RUNS = 256  # that these come from, about
_BELOW = 2.0**-16  # share of elements not worth a cut below them


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
