"""The body of a patch <-> bytes: sections of some pieces each, narrow words first, read one by one.

::

    kind u8 (1: changes, 2: whole), sections u8
    a section: bytes a word u8, pieces u32, length u64, data, which tells of the next so many pieces of that
    word: changes as ``changes.pack_blocks`` writes them; whole pieces one after another, each a length u32
    and ``encode_whole``
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from itertools import chain
from typing import NamedTuple

import numpy as np

from thinwire.state.layout import Layout
from thinwire.state.patch_code.changes import Block, Look, pack_runs, unpack_blocks
from thinwire.state.patch_code.planes import decode_whole, encode_whole
from thinwire.state.patches.pages import Pages
from thinwire.state.patches.patch import MAX_META
from thinwire.state.threads import cut, in_order
from thinwire.state.words import Words
from thinwire.types import ByteCursor, PayloadError, require

ROOM = 1 << 20  # bytes that a patch may take beyond the words of the state
FACTOR = 2  # times the words that it may take: positions may cost as much as what changed

CHANGES, WHOLE = 1, 2
HEAD = struct.Struct("<BB")
SECTION = struct.Struct("<BIQ")
LENGTH = struct.Struct("<I")
FEWEST = 1 << 18  # changes in a section, where there are several: each takes 2 ms and up to 1 kB more
# Sections of a word: they are made and read several at once, and a follower has the first when each thread
# has made one. With four kinds of words they fit a u8.
MOST = 60
PAGE = 1 << 22  # words in a section of a keyframe, at least
Plan = list[tuple[np.dtype, int]]  # the words of each section and how many pieces it tells of
Body = bytes | bytearray | memoryview | Pages


def pack_changes(layout: Layout, found: Mapping[int, Block], before: Look | None = None) -> bytes:
    """Return the body that ``changes`` yields."""
    return b"".join(part for section in changes(layout, found, before) for part in section)


def changes(layout: Layout, found: Mapping[int, Block], before: Look | None = None) -> Iterator[list[bytes]]:
    """Yield the body for what changed in some pieces: section by section, as each is made, in parts.

    ``before(piece, start, stop)`` are words before the change, as for ``changes.pack_blocks``.
    """
    plan, packed = Plan(), list[Iterator[list[bytes]]]()
    for word, own in _pieces(layout).items():
        none = np.zeros(0, np.int32), np.zeros(0, word)
        blocks = [found.get(i) or Block(layout.blocks()[i].numel, *none) for i in own]
        runs = cut([block.moved for block in blocks], FEWEST, MOST)
        packed.append(pack_runs(blocks, word, runs, before and _of(own, before)))
        plan += [(word, len(blocks[run])) for run in runs]
    return _framed(CHANGES, plan, chain.from_iterable(packed))


def whole(layout: Layout, words: Callable[[int], np.ndarray]) -> Iterator[list[bytes]]:
    """Yield the body for all words as ``changes`` does; ``words(piece)`` are asked for piece by piece."""
    runs = list[tuple[np.dtype, list[int]]]()
    for word, own in _pieces(layout).items():
        sizes = [layout.blocks()[i].numel for i in own]
        runs += [(word, own[run]) for run in cut(sizes, PAGE, MOST)]
    plan = [(word, len(pieces)) for word, pieces in runs]
    made = in_order(lambda pieces: [p for i in pieces for p in _encoded(words(i))], [own for _, own in runs])
    return _framed(WHOLE, plan, made)


def _encoded(words: np.ndarray) -> tuple[bytes, bytes]:
    packed = encode_whole(words)
    return LENGTH.pack(len(packed)), packed


def _framed(kind: int, plan: Plan, sections: Iterable[list[bytes]]) -> Iterator[list[bytes]]:
    """Yield each section behind its header, the first one, or nothing, behind that of the body."""
    head = [HEAD.pack(kind, len(plan))]
    for (word, count), parts in zip(plan, sections, strict=True):
        yield [*head, SECTION.pack(word.itemsize, count, sum(map(len, parts))), *parts]
        head = []
    if head:
        yield head


def unpack_pieces(section: PatchSection, words: Words) -> Iterator[int]:
    """Write the pieces of a section of whole words, and yield each then. Errors: ``PayloadError``."""
    cursor = ByteCursor(section.data, "a keyframe")
    for i in section.pieces:
        (n,) = cursor.unpack(LENGTH)
        np.copyto(words[i], decode_whole(cursor.take(n), len(words[i]), section.word))
        yield i
    cursor.close()


class PatchSection(NamedTuple):
    """What a body tells of some pieces of a word, in its bytes from ``start`` to ``stop``."""

    word: np.dtype
    pieces: list[int]
    body: Body
    start: int
    stop: int

    @property
    def data(self) -> memoryview:
        """The bytes, in one piece."""
        return memoryview(self.body[self.start : self.stop])


def unpack_section(layout: Layout, section: PatchSection, before: Look | None = None) -> dict[int, Block]:
    """Return what changed in those pieces of a section in which something did. Errors: ``PayloadError``.

    What was packed with words before the change can only be read with them.
    """
    pieces = section.pieces
    numels = [layout.blocks()[i].numel for i in pieces]
    look = before and _of(pieces, before)
    blocks = unpack_blocks(section.data, numels, section.word, whole=True, before=look)
    return {i: block for i, block in zip(pieces, blocks, strict=True) if len(block.diffs)}


class _Wanted(NamedTuple):
    """How many bytes of a body are read next, and what they tell of, where they are a section's."""

    nbytes: int
    word: np.dtype | None = None
    pieces: list[int] = []  # noqa: RUF012


class Sections:
    """Take a body apart, in order, as it comes; ``count``: its sections, 0 before that is known.

    Errors: ``PayloadError`` for what is no body of this kind for the layout, and then it is of no more use.
    """

    def __init__(self, layout: Layout, kind: int) -> None:
        self.count = 0
        self._steps = self._parse(_pieces(layout), kind)
        self._at, self._wanted = 0, next(self._steps)

    def come(self, body: Body) -> Iterator[PatchSection]:
        """Yield the sections that are here and were not taken yet; ``body`` is all that is here."""
        here = len(body)
        while self._wanted.nbytes and self._at + self._wanted.nbytes <= here:
            (nbytes, word, pieces), start = self._wanted, self._at
            self._at += nbytes
            # nobody looks at a section's bytes here
            self._wanted = self._steps.send(b"" if word else body[start : self._at])
            if word is not None:
                yield PatchSection(word, pieces, body, start, self._at)

    def through(self, body: Body) -> Iterator[PatchSection]:
        """Yield the sections of the whole ``body`` that were not taken yet."""
        body = memoryview(body) if isinstance(body, bytes) else body  # whose slices are no copies
        yield from self.come(body)
        short = self._at + self._wanted.nbytes - len(body)
        early = self._wanted.nbytes and short > 0
        require(not early, PayloadError, f"the body of a patch ends {short} bytes too early")
        require(not short, PayloadError, f"{-short} bytes too many behind the body of a patch")

    def _parse(
        self, pieces: dict[np.dtype, list[int]], kind: int
    ) -> Generator[_Wanted, bytes | bytearray | memoryview, None]:
        """Yield what is read next, and be sent it where it is no section."""
        got, count = HEAD.unpack((yield _Wanted(HEAD.size)))
        self.count = count
        require(got == kind, PayloadError, f"a body of kind {got}, expected {kind}")
        for word, own in pieces.items():
            done = 0
            while done < len(own):
                require(count > 0, PayloadError, f"a body without {len(own) - done} pieces of {word}")
                itemsize, n, nbytes = SECTION.unpack((yield _Wanted(SECTION.size)))
                fits = itemsize == word.itemsize and 0 < n <= len(own) - done and nbytes > 0
                what = f"a section of {nbytes} bytes for {n} pieces of {itemsize}-byte words"
                require(fits, PayloadError, f"{what} does not fit the state")
                yield _Wanted(nbytes, word, own[done : done + n])
                done, count = done + n, count - 1
        require(not count, PayloadError, f"{count} sections too many in the body of a patch")
        yield _Wanted(0)


def _pieces(layout: Layout) -> dict[np.dtype, list[int]]:
    found: dict[np.dtype, list[int]] = {word: [] for word in layout.words}
    for i, piece in enumerate(layout.blocks()):
        found[piece.word].append(i)
    return found


def _of(pieces: list[int], before: Look) -> Look:
    """Return ``before`` by the index among ``pieces``."""
    return lambda i, start, stop: before(pieces[i], start, stop)


def most(layout: Layout) -> int:
    """Return the bytes of the largest patch that is taken for a state."""
    words = sum(n * word.itemsize for word, n in layout.words.items())
    return FACTOR * words + MAX_META + ROOM
