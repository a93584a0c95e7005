"""Blocks of changes <-> bytes, with nothing known of the words that change.

Layout: one bit a block, packed: whether a difference for every element travels, zeros too, as where most
changed; the ``positions`` of all other blocks and their ``diffs``, for as many blocks at a time as have at
most ``MOST`` elements together; then the first ones' differences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress

import numpy as np

from thinwire.state import native
from thinwire.state.layout import Array
from thinwire.state.patch_code.diffs import fits_whole, pack_diffs, pack_whole, unpack_diffs, unpack_whole
from thinwire.state.patch_code.indexing import where, write
from thinwire.state.patch_code.patch_stream import PatchCursor, pack_flags
from thinwire.state.patch_code.positions import MAX_SIZE, Bitmap, many, pack_positions, unpack_positions
from thinwire.types import InputError, require

_WHOLE = 0.4  # share of changes from which on a symbol an element costs less than positions and symbols
_LEAST = 4096  # elements that are worth streams of their own
MOST = MAX_SIZE  # elements of the blocks that share streams: no stream tells of more


@dataclass(frozen=True, eq=False)
class Block:
    """What changed in ``numel`` elements: at ``positions`` (int32 [n], increasing), by ``diffs`` (words [n]).

    Without positions there is a difference for each element, which may be zero.
    """

    numel: int
    positions: Array | None
    diffs: Array

    @cached_property
    def moved(self) -> int:
        """How many elements changed."""
        return self.diffs.size if self.positions is not None else int(np.count_nonzero(self.diffs))

    def sparse(self) -> tuple[Array, Array]:
        """Return positions int32 [n] and differences [n]."""
        if self.positions is not None:
            return self.positions, self.diffs
        if native.there(self.diffs):
            return native.nonzero(self.diffs, self.moved)
        at = where(self.diffs != 0)
        return at.astype(np.int32), self.diffs[at]

    def listed(self, diffs: Array) -> Array | Bitmap:
        """Write the differences that are not zero into ``diffs`` [n] and return where they are."""
        if self.positions is None and native.there(self.diffs) and many(self.moved, self.numel):
            return Bitmap(native.marked(self.diffs, diffs), diffs.size)
        at, diffs[:] = self.sparse()
        return at

    def dense(self) -> Array:
        """Return a difference for each element [numel], in memory of its own."""
        if self.positions is None:
            return self.diffs.copy()
        diffs = np.zeros(self.numel, dtype=self.diffs.dtype)
        write(diffs, self.positions, self.diffs)
        return diffs


def block_at(numel: int, positions: Array, diffs: Array) -> Block:
    """Return changes at ``positions``, those by nothing left out: words that are back to what they were."""
    if not diffs.all():
        still = np.flatnonzero(diffs)
        positions, diffs = positions[still], diffs[still]
    return Block(numel, positions, diffs)


def pack_plain(blocks: Sequence[Block], word: np.dtype) -> list[bytes]:
    """Return what changed in ``blocks`` of signed integers ``word`` as bytes, in parts."""
    whole = [_mostly_changed(block) for block in blocks]
    some = [block for block, all_travel in zip(blocks, whole, strict=True) if not all_travel]
    out = [pack_flags(whole)]
    for run in _runs([block.numel for block in some]):
        out += _pack_sparse(some[run], word)
    for block in compress(blocks, whole):
        out.append(pack_whole(block.diffs if block.positions is None else block.dense()))
    return out


def unpack_plain(reader: PatchCursor, numels: Sequence[int], word: np.dtype) -> list[Block]:
    """Return the blocks of ``numels`` elements that come next; without positions those that came whole."""
    all_travel = reader.flags(len(numels))
    some = _unpack_sparse(reader, [n for n, w in zip(numels, all_travel, strict=True) if not w], word)
    return [
        Block(n, None, unpack_whole(reader, n, word)) if w else next(some)
        for n, w in zip(numels, all_travel, strict=True)
    ]


def check_block(block: Block, word: np.dtype) -> None:
    """Raise ``InputError`` unless positions are in order and range, and the differences are as many."""
    n, at, diffs = block.numel, block.positions, block.diffs
    right = diffs.dtype == word and diffs.shape == ((n,) if at is None else at.shape) and n <= MAX_SIZE
    if not right:
        raise InputError(f"{diffs.size} differences of {diffs.dtype} do not fit a block of {n} {word}")
    if at is not None and at.size:
        ordered = bool(at[0] >= 0) and bool(at[-1] < n) and bool((at[1:] > at[:-1]).all())
        require(ordered, InputError, f"positions that are not increasing within 0..{n - 1}; sort them")


def _runs(numels: Sequence[int]) -> Iterator[slice]:
    """Yield the runs of blocks that share streams; one if there are no blocks."""
    start = total = 0
    for i, n in enumerate(numels):
        if total + n > MOST and i > start:
            yield slice(start, i)
            start, total = i, 0
        total += n
    yield slice(start, len(numels))


def _pack_sparse(blocks: Sequence[Block], word: np.dtype) -> list[bytes]:
    diffs, sets, done = np.empty(sum(block.moved for block in blocks), dtype=word), [], 0
    for block in blocks:
        sets.append(block.listed(diffs[done : done + block.moved]))
        done += block.moved
    return [pack_positions(sets, [block.numel for block in blocks]), pack_diffs(diffs)]


def _unpack_sparse(reader: PatchCursor, numels: Sequence[int], word: np.dtype) -> Iterator[Block]:
    blocks: list[Block] = []
    for run in _runs(numels):
        sets = unpack_positions(reader, numels[run])
        diffs = unpack_diffs(reader, sum(positions.size for positions in sets), word)
        stops = np.cumsum([positions.size for positions in sets])
        parts = np.split(diffs, stops[:-1]) if sets else []
        blocks += [Block(n, p, d) for n, p, d in zip(numels[run], sets, parts, strict=True)]
    return iter(blocks)


def _mostly_changed(block: Block) -> bool:
    large = block.numel >= _LEAST and block.moved > _WHOLE * block.numel
    return large and fits_whole(block.diffs)
