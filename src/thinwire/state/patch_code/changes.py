"""Lossless code of what changed between two versions: positions, and differences of words modulo 2**bits.

A difference of bits is the smallest thing to send: a step to the next float is 1 or -1 whatever the exponent,
and where a value crosses zero, which is rare, no mapping of the words makes the step small. Layout:

- one bit a block, packed: whether anything changed; nothing else travels for one where not;
- one bit for each that did: whether it jumped; of those, the number of bytes (varint) and the new words as
  ``planes.encode_whole`` writes them; then, of the others:
- the number of cuts u8, the cuts u8 each, increasing, and the number of elements in each class (varints);
- the differences of the elements of each class, through all blocks, cut into ``blocks`` of ``CUT`` elements;
- all that changed elsewhere, as ``blocks``.

Errors: ``PayloadError`` for bytes that are not the whole of one valid body; nothing is allocated beyond a
fixed number of bytes an element of the declared blocks.

A difference of words says less than the word while steps are small. After a jump it says no less, and the
words alone may have a better code. A sample of both decides, block by block. Measured, in bits a bf16 word of
weights, where all changed: after a step of a tenth of their size 7.3 for differences against 10.6, of half of
it 10.4; after one as large as they are 10.9, between unrelated weights 11.2 (of fp32 28.2 against 26.6), and
11.6 against nothing if they become zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress, pairwise

import numpy as np

from thinwire.state.layout import Array
from thinwire.state.patch_code.blocks import Block, check_block, pack_plain, unpack_plain
from thinwire.state.patch_code.classes import MAX_CUTS, Look, choose, put_back, take_out
from thinwire.state.patch_code.indexing import write
from thinwire.state.patch_code.patch_stream import PatchCursor, pack_flags, uvarint
from thinwire.state.patch_code.planes import at_least, decode_whole, encode_whole
from thinwire.state.patch_code.positions import MAX_SIZE
from thinwire.state.threads import by_runs, in_order
from thinwire.types import InputError, PayloadError, require

CUT = 1 << 22
_LEAST = 4096  # elements of a block that is looked at
_SPANS, _SPAN = 16, 1024  # runs of a block that tell of the rest, and the elements of each


def pack_blocks(blocks: Sequence[Block], word: np.dtype, before: Look | None = None) -> bytes:
    """Return what changed in ``blocks`` of signed integers ``word`` as bytes.

    ``before(i, start, stop)`` are the words of block i, from ``start`` on, before the change; each is asked
    for at most twice. With them, which the other end then needs too, it is half the bytes where steps are
    small. Errors: ``InputError`` for positions out of order or range, and for a difference of zero at one.

    >>> at = np.array([3, 70], dtype=np.int32)
    >>> body = pack_blocks([Block(100, at, np.array([1, -1], dtype=np.int16))], np.dtype(np.int16))
    >>> unpack_blocks(body, [100], np.dtype(np.int16))[0].diffs.tolist()
    [1, -1]
    """
    return b"".join(
        part for parts in pack_runs(blocks, word, [slice(0, len(blocks))], before) for part in parts
    )


def pack_runs(
    blocks: Sequence[Block], word: np.dtype, runs: Sequence[slice], before: Look | None = None
) -> Iterator[list[bytes]]:
    """Yield what ``pack_blocks`` returns for each of several runs of blocks, as it is made.

    In parts: to join tens of MB takes longer than to make them. Which blocks jump and where the cuts between
    classes are is chosen once for all, before the first.
    """

    def check(run: slice) -> None:
        for block in blocks[run]:
            check_block(block, word)

    by_runs(check, [block.moved for block in blocks])
    touched = [block.moved > 0 for block in blocks]
    rest, look = list(compress(blocks, touched)), _among(before, touched)
    found = iter(jumped(rest, look) if look else [False] * len(rest))
    jumps = [some and next(found) for some in touched]
    still = [some and not jump for some, jump in zip(touched, jumps, strict=True)]
    look = _among(before, still)
    cuts = choose(list(compress(blocks, still)), look) if look else []
    yield from in_order(
        lambda run: _pack_run(blocks[run], word, _from(before, run), touched[run], jumps[run], cuts), runs
    )


def _pack_run(
    blocks: Sequence[Block],
    word: np.dtype,
    before: Look | None,
    touched: list[bool],
    jumps: list[bool],
    cuts: list[int],
) -> list[bytes]:
    rest, look = list(compress(blocks, touched)), _among(before, touched)
    jumps = list(compress(jumps, touched))
    out = [pack_flags(touched), pack_flags(jumps), *(pack_jumps(rest, jumps, look) if look else [])]
    still = [not jump for jump in jumps]
    return out + _pack_differences(list(compress(rest, still)), word, _among(look, still), cuts)


def _pack_differences(rest: list[Block], word: np.dtype, look: Look | None, cuts: list[int]) -> list[bytes]:
    classes = list[Array]()
    if not rest:  # nothing changed in this run, or all of it jumped
        cuts = []
    if look and cuts:
        classes, rest = take_out(rest, look, cuts)
    out = [bytes((len(cuts), *cuts)), *(uvarint(diffs.size) for diffs in classes)]
    for diffs in classes:
        out += pack_plain([Block(part.size, None, part) for part in _cut(diffs)], word)
    return out + pack_plain(rest, word)


def unpack_blocks(
    data: bytes | bytearray | memoryview,
    numels: Sequence[int],
    word: np.dtype,
    whole: bool = False,
    before: Look | None = None,
) -> list[Block]:
    """Return the blocks of ``numels`` elements that ``pack_blocks`` packed; their arrays are writable.

    ``before`` is as for ``pack_blocks``; each word is asked for at most once. With ``whole``, blocks of which
    most changed may have a difference for every element and no positions.
    """
    for n in numels:
        require(0 <= n <= MAX_SIZE, InputError, f"a block of {n} elements, at most {MAX_SIZE}; cut it")
    reader = PatchCursor(data, "a patch")
    touched = reader.flags(len(numels))
    found = iter(_unpack(reader, list(compress(numels, touched)), word, _among(before, touched)))
    empty = np.empty(0, dtype=np.int32), np.empty(0, dtype=word)
    blocks = [next(found) if some else Block(n, *empty) for n, some in zip(numels, touched, strict=True)]
    return blocks if whole else [Block(block.numel, *block.sparse()) for block in blocks]


def _among(before: Look | None, touched: Sequence[bool]) -> Look | None:
    """Return ``before`` by the index among the blocks that something changes in."""
    if before is None:
        return None
    look, indices = before, list(compress(range(len(touched)), touched))
    return lambda i, start, stop: look(indices[i], start, stop)


def _from(before: Look | None, run: slice) -> Look | None:
    """Return ``before`` by the index in a run of the blocks."""
    return None if before is None else lambda i, start, stop: before(run.start + i, start, stop)


def _unpack(reader: PatchCursor, numels: Sequence[int], word: np.dtype, before: Look | None) -> list[Block]:
    """Return the blocks of what changed, and leave nothing of the body."""
    jumps = reader.flags(len(numels))
    new = unpack_jumps(reader, list(compress(numels, jumps)), word)
    still = [not jump for jump in jumps]
    cuts, classes, rest = _parts(reader, list(compress(numels, still)), word)
    if before is None:
        alone = not new and not cuts
        require(alone, PayloadError, "a patch that can only be read with the words it changes; none are held")
        return rest
    if look := _among(before, still) if cuts else None:
        rest = put_back(rest, classes, look, cuts)
    others, words = iter(rest), iter(new)
    return [differences(next(words), i, before) if jump else next(others) for i, jump in enumerate(jumps)]


def _parts(
    reader: PatchCursor, numels: Sequence[int], word: np.dtype
) -> tuple[list[int], list[Array], list[Block]]:
    """Return the cuts, the differences of each class, and the blocks of what changed elsewhere."""
    cuts = list(reader.take(reader.take(1)[0]))
    rising = len(cuts) <= MAX_CUTS and all(a < b for a, b in pairwise([0, *cuts]))
    require(rising, PayloadError, f"a patch with {len(cuts)} classes out of order")
    sizes = [reader.uvarint() for _ in cuts]
    require(sum(sizes) <= sum(numels), PayloadError, f"a patch with classes of {sum(sizes)} elements")
    classes = [_unpack_class(reader, size, word) for size in sizes]
    rest = unpack_plain(reader, numels, word)
    reader.close()
    return cuts, classes, rest


def _unpack_class(reader: PatchCursor, size: int, word: np.dtype) -> Array:
    found, starts = np.zeros(size, dtype=word), range(0, size, CUT)
    for start, block in zip(
        starts, unpack_plain(reader, [min(CUT, size - s) for s in starts], word), strict=True
    ):
        write(found[start : start + block.numel], block.positions, block.diffs)
    return found


def _cut(diffs: Array) -> list[Array]:
    return [diffs[start : start + CUT] for start in range(0, diffs.size, CUT)]


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
