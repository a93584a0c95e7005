"""The body of a patch <-> bytes: a section a word dtype, narrow ones first.

::

    kind u8 (1: changes, 2: whole), sections u8
    a section: bytes a word u8, length u64, data; of changes as ``changes.pack_blocks`` writes them, for the
    pieces of that word in order; of a whole state the pieces one after another: length u32, ``encode_whole``
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping

import numpy as np

from thinwire.state.changes import Block, Look, pack_parts, unpack_blocks
from thinwire.state.layout import Layout
from thinwire.state.planes import decode_whole, encode_whole
from thinwire.state.words import Words
from thinwire.types import PayloadError, require

CHANGES, WHOLE = 1, 2
HEAD = struct.Struct("<BB")
SECTION = struct.Struct("<BQ")
LENGTH = struct.Struct("<I")


def pack_changes(layout: Layout, found: Mapping[int, Block], before: Look | None = None) -> bytes:
    """Return the body for what changed in some pieces.

    ``before(piece, start, stop)`` are words before the change, as for ``changes.pack_blocks``.
    """
    sections = []
    for word, pieces in _pieces(layout).items():
        none = np.zeros(0, np.int32), np.zeros(0, word)
        blocks = [found.get(i) or Block(layout.blocks()[i].numel, *none) for i in pieces]
        sections.append((word, pack_parts(blocks, word, _of(pieces, before))))
    return _join(CHANGES, sections)


def pack_whole(layout: Layout, words: Callable[[int], np.ndarray]) -> bytes:
    """Return the body for all words; ``words(piece)`` are asked for piece by piece."""
    sections = []
    for word, pieces in _pieces(layout).items():
        parts = [encode_whole(words(i)) for i in pieces]
        sections.append((word, [p for part in parts for p in (LENGTH.pack(len(part)), part)]))
    return _join(WHOLE, sections)


def unpack_changes(layout: Layout, body: bytes, before: Look | None = None) -> dict[int, Block]:
    """Return what changed in the pieces in which something did. Errors: ``PayloadError``.

    Bodies packed with words before the change can only be read with them.
    """
    found: dict[int, Block] = {}
    for word, pieces, data in _sections(layout, body, CHANGES):
        numels = [layout.blocks()[i].numel for i in pieces]
        blocks = unpack_blocks(data, numels, word, whole=True, before=_of(pieces, before))
        found |= {i: block for i, block in zip(pieces, blocks, strict=True) if len(block.diffs)}
    return found


def unpack_whole(body: bytes, words: Words) -> None:
    """Write all words of a body into ``words``, which a ``PayloadError`` leaves partly written."""
    for word, pieces, data in _sections(words.layout, body, WHOLE):
        at = 0
        for i in pieces:
            require(at + LENGTH.size <= len(data), PayloadError, "a keyframe ends too early")
            (n,) = LENGTH.unpack_from(data, at)
            at += LENGTH.size
            require(
                at + n <= len(data), PayloadError, f"a keyframe ends {at + n - len(data)} bytes too early"
            )
            np.copyto(words[i], decode_whole(data[at : at + n], len(words[i]), word))
            at += n
        require(at == len(data), PayloadError, f"{len(data) - at} bytes too many in a keyframe")


def _pieces(layout: Layout) -> dict[np.dtype, list[int]]:
    found: dict[np.dtype, list[int]] = {word: [] for word in layout.words}
    for i, piece in enumerate(layout.blocks()):
        found[piece.word].append(i)
    return found


def _of(pieces: list[int], before: Look | None) -> Look | None:
    """Return ``before`` by the index among ``pieces``."""
    return None if before is None else lambda i, start, stop: before(pieces[i], start, stop)


def _join(kind: int, sections: list[tuple[np.dtype, list[bytes]]]) -> bytes:
    parts = [HEAD.pack(kind, len(sections))]
    for word, data in sections:
        parts += [SECTION.pack(word.itemsize, sum(map(len, data))), *data]
    return b"".join(parts)


def _sections(layout: Layout, body: bytes, kind: int) -> list[tuple[np.dtype, list[int], memoryview]]:
    view, at = memoryview(body), HEAD.size
    require(len(view) >= at, PayloadError, "a patch without a body")
    got, count = HEAD.unpack_from(view)
    pieces = _pieces(layout)
    fits = got == kind and count == len(pieces)
    require(
        fits, PayloadError, f"a body of kind {got} with {count} sections, expected {kind} with {len(pieces)}"
    )
    found = []
    for word, own in pieces.items():
        require(at + SECTION.size <= len(view), PayloadError, "the body of a patch ends too early")
        itemsize, n = SECTION.unpack_from(view, at)
        at += SECTION.size
        fits = itemsize == word.itemsize and n <= len(view) - at
        require(fits, PayloadError, f"a section of {n} bytes for words of {itemsize} does not fit the state")
        found.append((word, own, view[at : at + n]))
        at += n
    require(at == len(view), PayloadError, f"{len(view) - at} bytes too many behind the body of a patch")
    return found
