"""What a patch does to given words: computed and proved by its hash before anything is written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from thinwire.state import body, content
from thinwire.state.layout import Layout
from thinwire.state.patch import Patch, Version
from thinwire.state.words import Words
from thinwire.types import DesyncError, PayloadError, require


class Move(NamedTuple):
    """The words of a piece at ``positions`` [n], before and after."""

    piece: int
    positions: np.ndarray
    old: np.ndarray
    new: np.ndarray


def check_follows(patch: Patch, layout: Layout, held: Version) -> None:
    """Raise unless ``patch`` is for this layout and newer than ``held``, and starts there or from nothing."""
    if patch.layout != layout.digest:
        raise PayloadError("a patch for a state of other names, shapes or dtypes; ask for its layout first")
    if patch.version <= held.number:
        raise DesyncError(f"version {patch.version} is not newer than {held.number}, which is held")
    starts = not patch.base or patch.base_hash == held.hash
    require(
        starts, DesyncError, f"a patch from version {patch.base}, held is {held.number}; ask for a keyframe"
    )


def moves(patch: Patch, words: Words, held: Version) -> list[Move]:
    """Return what ``patch``, not a keyframe, changes in ``words``, which hold version ``held``.

    Errors: ``PayloadError`` for a body that cannot be, ``DesyncError`` where it leads to other contents.
    """
    found = []
    for i, (positions, diffs) in body.unpack_changes(words.layout, patch.body).items():
        old = words[i][positions]
        found.append(Move(i, positions, old, old + diffs))
    reached = content.add(held.hash, hash_of(found))
    require(reached == patch.hash, DesyncError, _differs(patch))
    return found


def whole(patch: Patch, layout: Layout) -> Words:
    """Return the words of a keyframe. Errors: as ``moves``."""
    words = Words(layout)
    body.unpack_whole(patch.body, words)
    require(words.hash() == patch.hash, DesyncError, _differs(patch))
    return words


def hash_of(found: Iterable[Move]) -> int:
    """Return by how much the content hash moves."""
    return content.add(*(content.moved(m.positions, m.old, m.new, m.piece) for m in found))


def write(words: Words, found: Iterable[Move]) -> None:
    """Make the moves."""
    for m in found:
        words[m.piece][m.positions] = m.new


def _differs(patch: Patch) -> str:
    return f"version {patch.version} came out different from the publisher's; ask for a keyframe"
