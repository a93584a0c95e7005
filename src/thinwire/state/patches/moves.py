"""What a patch does to given words: computed and proved by its hash before anything is written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from thinwire.state import content
from thinwire.state.layout import Layout
from thinwire.state.patch_code import indexing
from thinwire.state.patch_code.blocks import Block, block_at
from thinwire.state.patches import body
from thinwire.state.patches.patch import Patch, Version
from thinwire.state.threads import by_runs, in_order
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


class Reading:
    """What a patch, not a keyframe, changes in ``words``, which hold ``held``: worked out as it comes.

    Nothing is written, and nothing that was read counts before ``finish``. Errors: ``PayloadError`` for a
    body that cannot be, and then it is of no more use.
    """

    def __init__(self, words: Words, held: Version) -> None:
        self._words, self._held = words, held
        self._sections = body.Sections(words.layout, body.CHANGES)
        self._found: list[Move] = []
        self._step = 0  # by how much the hash moves
        self._sound = True  # nothing that was read was wrong, and it was for no patch yet

    def of(self, words: Words, held: Version) -> bool:
        """Return whether this is what a patch changes in these words, as far as it was read."""
        return self._sound and self._words is words and self._held.hash == held.hash

    def feed(self, data: bytearray) -> None:
        """Read what can be read; ``data`` is all that is here of the patch's body."""
        here, self._sound = len(data), False
        came = list[body.PatchSection]()
        while self._sections.wanted:
            start = self._sections.at
            stop = start + self._sections.wanted
            if stop > here:
                break
            section = self._sections.take(data[start:stop])  # a copy: more may be appended meanwhile
            if section is not None:
                came.append(section)
        self._note(came)
        self._sound = True

    def finish(self, patch: Patch) -> list[Move]:
        """Read the rest of ``patch`` and return all it changes; ``DesyncError`` where it leads elsewhere."""
        self._sound = False  # it was for this patch
        self._note(list(self._sections.through(patch.body)))
        require(content.add(self._held.hash, self._step) == patch.hash, DesyncError, _differs(patch))
        found, self._found = self._found, []  # whoever has them lets go of them
        return found

    def _note(self, sections: list[body.PatchSection]) -> None:
        for made, step in in_order(self._made, sections):
            self._found += made
            self._step += step

    def _made(self, section: body.PatchSection) -> tuple[list[Move], int]:
        """Return what a section changes, and by how much the hash moves."""
        words, made = self._words, list[Move]()
        changes = body.unpack_section(words.layout, section, lambda i, start, stop: words[i][start:stop])
        for i, block in changes.items():
            positions, diffs = block.positions, block.diffs
            old = words[i].copy() if positions is None else indexing.read(words[i], positions)
            diffs += old  # to the new words, in the same memory: fresh memory would take longer than the sum
            made.append(Move(i, positions, old, diffs))
            _check_truths(words.layout, i, made[-1].new)
        return made, hash_of(made)


def moves(patch: Patch, words: Words, held: Version, reading: Reading | None = None) -> list[Move]:
    """Return what ``patch``, not a keyframe, changes in ``words``, which hold version ``held``.

    ``reading`` may have read some of it. Errors: ``PayloadError`` for a body that cannot be, ``DesyncError``
    where it leads to other contents.
    """
    if reading is None or not reading.of(words, held):
        reading = Reading(words, held)
    return reading.finish(patch)


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
    """Make the moves, of which no two are of one piece."""
    moves = list(found)

    def make(run: slice) -> None:
        for m in moves[run]:
            indexing.write(words[m.piece], m.positions, m.new)

    by_runs(make, [len(m.new) for m in moves])


def _check_truths(layout: Layout, piece: int, new: np.ndarray) -> None:
    """Raise unless words of a bool tensor are 0 or 1: what others mean is not defined."""
    slot = layout.slots[layout.blocks()[piece].slot]
    if slot.dtype is torch.bool and not ((new == 0) | (new == 1)).all():
        raise PayloadError(f"a patch with numbers for {slot.name}, which is true or false")


def _differs(patch: Patch) -> str:
    return f"version {patch.version} came out different from the publisher's; ask for a keyframe"
