"""Lossless code of what changed between two versions: positions, and differences of words modulo 2**bits.

A difference of bits is the smallest thing to send: a step to the next float is 1 or -1 whatever the exponent,
and where a value crosses zero, which is rare, no mapping of the words makes the step small. Layout of a body:
one bit a block, packed: whether a difference for every element travels, zeros too, as where most changed;
the ``positions`` of all other blocks, and their ``diffs``; then the differences of each of the first.

Errors: ``PayloadError`` for bytes that are not the whole of one valid body; nothing is allocated beyond a
fixed number of bytes an element of the declared blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from thinwire.state.diffs import fits_whole, pack_diffs, pack_whole, unpack_diffs, unpack_whole
from thinwire.state.positions import MAX_SIZE, pack_positions, unpack_positions
from thinwire.state.stream import Array, Reader
from thinwire.types import InputError, require

_WHOLE = 0.4  # share of changes from which on a symbol an element costs less than positions and symbols
_LEAST = 4096  # elements that are worth streams of their own


class Block(NamedTuple):
    """What changed in ``numel`` elements: at ``positions`` (int32 [n], increasing), by ``diffs`` (words [n]).

    Without positions there is a difference for each element, which may be zero.
    """

    numel: int
    positions: Array | None
    diffs: Array

    def add_to(self, words: Array) -> None:
        """Take ``words`` [numel] from the one version to the other, in place."""
        if self.positions is None:
            words += self.diffs
        else:
            words[self.positions.astype(np.intp)] += self.diffs  # twice as fast as by int32

    def sparse(self) -> tuple[Array, Array]:
        """Return positions int32 [n] and differences [n], none zero where there were no positions."""
        if self.positions is not None:
            return self.positions, self.diffs
        at = np.flatnonzero(self.diffs)
        return at.astype(np.int32), self.diffs[at]


def pack_blocks(blocks: Sequence[Block], word: np.dtype) -> bytes:
    """Return what changed in ``blocks`` of signed integers ``word`` as bytes.

    Errors: ``InputError`` for positions out of order or range, and for a difference of zero at one.

    >>> at = np.array([3, 70], dtype=np.int32)
    >>> body = pack_blocks([Block(100, at, np.array([1, -1], dtype=np.int16))], np.dtype(np.int16))
    >>> unpack_blocks(body, [100], np.dtype(np.int16))[0].diffs.tolist()
    [1, -1]
    """
    for block in blocks:
        _check(block, word)
    whole = [_mostly_changed(block) for block in blocks]
    some = [block for block, all_travel in zip(blocks, whole, strict=True) if not all_travel]
    changes = [block.sparse() for block in some]
    diffs = [d for _, d in changes] or [np.empty(0, dtype=word)]
    out = [np.packbits(np.array(whole, dtype=np.bool_)).tobytes()]
    out.append(pack_positions([p for p, _ in changes], [block.numel for block in some]))
    out.append(pack_diffs(np.concatenate(diffs)))
    out += [pack_whole(_dense(block)) for block, all_travel in zip(blocks, whole, strict=True) if all_travel]
    return b"".join(out)


def unpack_blocks(
    data: bytes | bytearray | memoryview, numels: Sequence[int], word: np.dtype, whole: bool = False
) -> list[Block]:
    """Return the blocks of ``numels`` elements that ``pack_blocks`` packed; their arrays are writable.

    With ``whole``, those with a difference for every element keep them and have no positions.
    """
    for n in numels:
        require(0 <= n <= MAX_SIZE, InputError, f"a block of {n} elements, at most {MAX_SIZE}; cut it")
    reader = Reader(data)
    flags = np.frombuffer(reader.take(-(-len(numels) // 8)), dtype=np.uint8)
    all_travel = np.unpackbits(flags, count=len(numels)).tolist()
    some = _unpack_sparse(reader, [n for n, w in zip(numels, all_travel, strict=True) if not w], word)
    blocks = []
    for n, w in zip(numels, all_travel, strict=True):
        block = Block(n, None, unpack_whole(reader, n, word)) if w else next(some)
        blocks.append(block if whole else Block(n, *block.sparse()))
    reader.close()
    return blocks


def encode(positions: Array, diffs: Array, numel: int, word: np.dtype) -> bytes:
    """Return one block as bytes."""
    return pack_blocks([Block(numel, positions, diffs)], word)


def decode(data: bytes | bytearray | memoryview, numel: int, word: np.dtype) -> tuple[Array, Array]:
    """Return positions and differences of the one block in ``data``."""
    (block,) = unpack_blocks(data, [numel], word)
    return block.sparse()


def _unpack_sparse(reader: Reader, numels: Sequence[int], word: np.dtype) -> Iterator[Block]:
    sets = unpack_positions(reader, numels)
    diffs = unpack_diffs(reader, sum(positions.size for positions in sets), word)
    stops = np.cumsum([positions.size for positions in sets])
    parts = np.split(diffs, stops[:-1]) if sets else []
    return iter([Block(n, p, d) for n, p, d in zip(numels, sets, parts, strict=True)])


def _mostly_changed(block: Block) -> bool:
    if block.numel < _LEAST:
        return False
    count = block.diffs.size if block.positions is not None else int(np.count_nonzero(block.diffs))
    return count > _WHOLE * block.numel and fits_whole(block.diffs)


def _dense(block: Block) -> Array:
    if block.positions is None:
        return block.diffs
    diffs = np.zeros(block.numel, dtype=block.diffs.dtype)
    diffs[block.positions.astype(np.intp)] = block.diffs
    return diffs


def _check(block: Block, word: np.dtype) -> None:
    n, at, diffs = block.numel, block.positions, block.diffs
    right = diffs.dtype == word and diffs.shape == ((n,) if at is None else at.shape) and n <= MAX_SIZE
    require(right, InputError, f"{diffs.size} differences of {diffs.dtype} do not fit a block of {n} {word}")
    if at is not None and at.size:
        ordered = bool(at[0] >= 0) and bool(at[-1] < n) and bool((at[1:] > at[:-1]).all())
        require(ordered, InputError, f"positions that are not increasing within 0..{n - 1}; sort them")
