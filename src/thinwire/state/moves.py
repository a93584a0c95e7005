"""What a patch does to given words: computed and proved by its hash before anything is written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from thinwire.state import body, content, gather
from thinwire.state.blocks import Block, block_at
from thinwire.state.layout import Layout
from thinwire.state.patch import Patch, Version
from thinwire.state.words import Words
from thinwire.types import DesyncError, PayloadError, require


class Move(NamedTuple):
    """The words of a piece at ``positions`` [n], rising, before and after; all its words if that is None."""

    piece: int
    positions: np.ndarray | None
    old: np.ndarray
    new: np.ndarray
    moved: int | None = None  # how many words change, where that is known

    @property
    def changed(self) -> int:
        """How many words change."""
        if self.moved is not None:
            return self.moved
        return len(self.old) if self.positions is not None else int(np.count_nonzero(self.old != self.new))

    def difference(self, numel: int) -> Block:
        """Return it as what changed in a piece of so many elements."""
        diffs = self.new - self.old
        return Block(numel, None, diffs) if self.positions is None else block_at(numel, self.positions, diffs)


def check_follows(patch: Patch, layout: Layout, held: Version) -> None:
    """Raise unless ``patch`` is for this layout and newer than ``held``, and starts there or from nothing."""
    if patch.layout != layout.digest:
        raise PayloadError("a patch for a state of other names, shapes or dtypes; ask for its layout first")
    if patch.version <= held.number:
        raise DesyncError(f"version {patch.version} is not newer than {held.number}, which is held")
    starts = not patch.base or patch.base_hash == held.hash != 0
    require(
        starts, DesyncError, f"a patch from version {patch.base}, held is {held.number}; ask for a keyframe"
    )


def moves(patch: Patch, words: Words, held: Version) -> list[Move]:
    """Return what ``patch``, not a keyframe, changes in ``words``, which hold version ``held``.

    Errors: ``PayloadError`` for a body that cannot be, ``DesyncError`` where it leads to other contents.
    """
    found = []
    changes = body.unpack_changes(words.layout, patch.body, lambda i, start, stop: words[i][start:stop])
    for i, block in changes.items():
        positions, diffs = block.positions, block.diffs
        old = words[i].copy() if positions is None else gather.read(words[i], positions)
        diffs += old  # to the new words, in the same memory: fresh memory would take longer than the sum
        found.append(Move(i, positions, old, diffs))
        _check_truths(words.layout, i, found[-1].new)
    reached = content.add(held.hash, hash_of(found))
    require(reached == patch.hash, DesyncError, _differs(patch))
    return found


def between(before: Words, after: Words) -> list[Move]:
    """Return what differs between two states of one layout."""
    found = []
    for i in range(len(before.layout.blocks())):
        positions = np.flatnonzero(before[i] != after[i]).astype(np.int32)
        if len(positions):
            found.append(Move(i, positions, before[i][positions], after[i][positions]))
    return found


def whole(patch: Patch, layout: Layout) -> Words:
    """Return the words of a keyframe. Errors: as ``moves``."""
    words = Words(layout)
    body.unpack_whole(patch.body, words)
    for i in range(len(layout.blocks())):
        _check_truths(layout, i, words[i])
    require(words.hash() == patch.hash, DesyncError, _differs(patch))
    return words


def hash_of(found: Iterable[Move]) -> int:
    """Return by how much the content hash moves."""
    return content.add(*(content.moved(m.positions, m.old, m.new, m.piece) for m in found))


def write(words: Words, found: Iterable[Move]) -> None:
    """Make the moves."""
    for m in found:
        gather.write(words[m.piece], m.positions, m.new)


def _check_truths(layout: Layout, piece: int, new: np.ndarray) -> None:
    """Raise unless words of a bool tensor are 0 or 1: what others mean is not defined."""
    slot = layout.slots[layout.blocks()[piece].slot]
    if slot.dtype is torch.bool and not ((new == 0) | (new == 1)).all():
        raise PayloadError(f"a patch with numbers for {slot.name}, which is true or false")


def _differs(patch: Patch) -> str:
    return f"version {patch.version} came out different from the publisher's; ask for a keyframe"
