"""Classes of elements by the size of the word they had: whether they change depends on little else.

A step of an optimiser is about as large for every weight; the spacing of floats is not. At a small learning
rate the weights near zero, a few in a thousand, change at each step and most others never. Both ends hold the
old words, so the elements below some cuts are coded as classes of their own, in which nearly all or a known
share changes: where they are costs next to nothing. On weights of SmolLM2-135M with steps as Adam's this
halves the bytes at a learning rate of 1e-6, and takes a fifth off at 5e-5.

A size is the highest byte of a word without its sign: the exponent of bf16 and fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from thinwire.state.blocks import Block
from thinwire.state.masks import where
from thinwire.state.stream import Array

MAX_CUTS = 4
_SIZES = 256
_SYMBOLS = 18  # unchanged, and the bit lengths of a difference from 1 to 17 and above
_FEWEST = 256  # changes that are worth a table
_PER_CLASS = 2000  # bits: what its streams cost, however short
_PER_MEMBER = 0.15  # bits that justify the time for an element that is coded by class
_PIECE = 1 << 19  # elements to work on at a time
_SAMPLE, _STRIDE = 1 << 12, 1 << 18  # sizes are counted in the first so many elements of each stride
_MOST = 1 << 14  # changes of a block that are counted


def members(words: Array, cuts: Sequence[int]) -> list[Array]:
    """Return where in ``words`` each class is: intp [n] each, increasing. From the last cut on is none."""
    unsigned = f"u{words.itemsize}"
    edges = [0, *(cut << 8 * words.itemsize - 8 for cut in cuts)]
    found: list[list[Array]] = [[] for _ in cuts]
    for start in range(0, words.size, _PIECE):
        sizes = words[start : start + _PIECE].view(unsigned) << 1  # without the sign
        low = where(sizes < edges[-1])
        sizes = sizes[low]
        low += start
        for parts, (least, limit) in zip(found, pairwise(edges), strict=True):
            parts.append(low[where((sizes >= least) & (sizes < limit))])
    return [np.concatenate(parts) if parts else np.empty(0, dtype=np.intp) for parts in found]


def choose(blocks: Sequence[Block], before: Callable[[int], Array]) -> list[int]:
    """Return the cuts between classes that need fewest bits: increasing sizes; none where that is no gain."""
    if sum(block.moved() for block in blocks) < _FEWEST:
        return []
    table = np.zeros((_SIZES, _SYMBOLS))
    for i, block in enumerate(blocks):
        _count(table, *block.sparse(), before(i))
    return _cheapest(table)


def sizes_of(words: Array) -> Array:
    """Return the size of each word, intp [n] of 0..255."""
    turned = words.view(f"u{words.itemsize}") << 1
    return (turned >> (8 * words.itemsize - 8)).astype(np.intp)


def _count(table: Array, positions: Array, diffs: Array, words: Array) -> None:
    """Add about how many elements of each size have each symbol."""
    sample = np.concatenate([words[s : s + _SAMPLE] for s in range(0, words.size, _STRIDE)])
    unchanged = np.bincount(sizes_of(sample), minlength=_SIZES) * (words.size / sample.size)
    step = -(-diffs.size // _MOST)
    sizes = sizes_of(words[positions[::step].astype(np.intp)])
    lengths = np.frexp(np.abs(diffs[::step].astype(np.float64)))[1]
    symbols = np.minimum(lengths, _SYMBOLS - 1)
    counts = np.bincount(sizes * _SYMBOLS + symbols, minlength=table.size).reshape(table.shape) * step
    table += counts
    table[:, 0] += np.maximum(unchanged - counts.sum(1), 0)


def _cheapest(table: Array) -> list[int]:
    """Return the best cuts by dynamic programming over their number and the last one."""
    some = np.flatnonzero(table[:, 1:].any(1))
    at = np.arange(some[0], min(some[-1] + 2, _SIZES))  # where a cut may be; the first class begins at 0
    sums = np.concatenate([np.zeros((1, _SYMBOLS)), np.cumsum(table, 0)])[at]
    sums[0] = 0
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
    total = counts.sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        each = counts * np.log2(total / counts)
    bits: Array = np.where(counts > 0, each, 0).sum(-1)
    return bits
