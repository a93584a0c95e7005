"""Blocks that changed beyond recognition: their new words travel, coded as in a keyframe.

A difference of words says less than the word while steps are small. After a jump it says no less, and the
words alone may have a better code. A sample of both decides, tensor by tensor. Measured, in bits a bf16 word
of weights, where all changed: after a step of a tenth of their size 7.3 for differences against 10.6, of half
of it 10.4; after one as large as they are 10.9, between unrelated weights 11.2 (of fp32 28.2 against 26.6),
and 11.6 against nothing if they become zeros.

Layout: for each block that jumps the number of bytes (varint) and ``planes.encode_whole``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thinwire.state.code.blocks import Block, pack_plain
from thinwire.state.code.class_split import Look
from thinwire.state.code.planes import at_least, decode_whole, encode_whole
from thinwire.state.code.stream import PatchCursor, uvarint
from thinwire.state.layout import Array

_LEAST = 4096  # elements of a block that is looked at
_SPANS, _SPAN = 16, 1024  # runs of a block that tell of the rest, and the elements of each


def jumped(blocks: Sequence[Block], look: Look) -> list[bool]:
    """Return which blocks take fewer bytes as new words than as differences."""
    return [_jumped(block, i, look) for i, block in enumerate(blocks)]


def _jumped(block: Block, index: int, look: Look) -> bool:
    if block.positions is not None or block.numel < _LEAST:
        return False
    starts = range(0, block.numel - _SPAN + 1, max(1, (block.numel - _SPAN) // (_SPANS - 1)))
    old = np.concatenate([look(index, start, start + _SPAN).copy() for start in starts])
    diffs = np.concatenate([block.diffs[start : start + _SPAN] for start in starts])
    new, limit = old + diffs, sum(map(len, pack_plain([Block(diffs.size, None, diffs)], diffs.dtype)))
    return at_least(new) < limit and len(encode_whole(new)) < limit


def pack_jumps(blocks: Sequence[Block], jumps: Sequence[bool], look: Look) -> list[bytes]:
    """Return the new words of all blocks that jump, as bytes in parts."""
    out = list[bytes]()
    for i, (block, jumps_here) in enumerate(zip(blocks, jumps, strict=True)):
        if jumps_here:
            packed = encode_whole(look(i, 0, block.numel) + block.diffs)
            out += [uvarint(len(packed)), packed]
    return out


def unpack_jumps(reader: PatchCursor, numels: Sequence[int], word: np.dtype) -> list[Array]:
    """Return the new words of blocks of ``numels`` elements, which come next. Errors: ``PayloadError``."""
    return [decode_whole(reader.take(reader.uvarint()), n, word) for n in numels]


def differences(new: Array, index: int, look: Look) -> Block:
    """Return the block that makes ``new`` [numel] of the words that are held."""
    return Block(new.size, None, new - look(index, 0, new.size))
