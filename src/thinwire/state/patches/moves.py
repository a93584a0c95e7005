"""What a patch does to given words: computed and proved by its hash before anything is written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from thinwire.state import content
from thinwire.state.layout import Layout
from thinwire.state.patch_code import indexing
from thinwire.state.patch_code.blocks import Block, block_at
from thinwire.state.patches import body
from thinwire.state.patches.patch import Patch, Version
from thinwire.state.threads import Line, by_runs
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


class SectionReading:
    """What reads the body of a patch as it comes: each section on a thread as soon as it is here.

    Nothing that was read counts before ``finish``. Errors: ``PayloadError`` for a body that cannot be, at
    once or in ``settle``, and then it is of no more use. ``close`` it, or finish it.
    """

    def __init__(self, layout: Layout, kind: int) -> None:
        self.layout = layout
        self._sections = body.Sections(layout, kind)
        self._line: Line[body.PatchSection, int] | None = None
        self._step = 0  # by how much the hash moves, or for all words is over its start
        self._sound = True  # nothing that was read was wrong, and it was for no patch yet

    def feed(self, data: body.Body) -> None:
        """Begin to read what is here now; ``data`` is all that is here of the patch's body."""
        self._sound = False
        self._begin(self._sections.come(data))
        self._sound = True

    def settle(self) -> None:
        """Wait until all that was begun is read."""
        sound, self._sound = self._sound, False
        for step in self._line.results() if self._line is not None else ():
            self._step += step
        self._sound = sound

    def close(self) -> None:
        """Leave the rest. Harmless twice."""
        self._sound = False
        if self._line is not None:
            self._line.close()

    def _begin(self, sections: Iterable[body.PatchSection]) -> None:
        for section in sections:
            if self._line is None:
                self._line = Line(self._read, self._sections.count)
            self._line.add(section)

    def _end(self, patch: Patch, start: int) -> None:
        """Read the rest of ``patch``; ``DesyncError`` unless the hash moves from ``start`` to the patch's."""
        try:
            self._begin(self._sections.through(patch.body))
            self.settle()
        finally:
            self.close()  # it was for this patch
        require(content.add(start, self._step) == patch.hash, DesyncError, _differs(patch))

    def _read(self, section: body.PatchSection) -> int:
        """Read a section, on any thread; return by how much the hash moves."""
        raise NotImplementedError


class Reading(SectionReading):
    """What a patch, not a keyframe, changes in ``words``, which hold ``held``; nothing is written."""

    def __init__(self, words: Words, held: Version) -> None:
        super().__init__(words.layout, body.CHANGES)
        self._words, self._held = words, held
        self._found: list[Move] = []

    def of(self, words: Words, held: Version) -> bool:
        """Return whether this is what a patch changes in these words, as far as it was read."""
        return self._sound and self._words is words and self._held.hash == held.hash

    def finish(self, patch: Patch) -> list[Move]:
        """Read the rest of ``patch`` and return all it changes; ``DesyncError`` where it leads elsewhere."""
        self._end(patch, self._held.hash)
        found, self._found = self._found, []  # whoever has them lets go of them
        return sorted(found, key=lambda move: move.piece)

    def _read(self, section: body.PatchSection) -> int:
        words, made = self._words, list[Move]()
        changes = body.unpack_section(words.layout, section, lambda i, start, stop: words[i][start:stop])
        for i, block in changes.items():
            positions, diffs = block.positions, block.diffs
            old = words[i].copy() if positions is None else indexing.read(words[i], positions)
            diffs += old  # to the new words, in the same memory: fresh memory would take longer than the sum
            made.append(Move(i, positions, old, diffs))
            _check_truths(words.layout, i, made[-1].new)
        self._found += made
        return hash_of(made)


class KeyframeReading(SectionReading):
    """The words of a keyframe, in memory of their own."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout, body.WHOLE)
        self._words = Words(layout)

    def of(self, layout: Layout) -> bool:
        """Return whether this is a state of that layout, as far as it was read."""
        return self._sound and self.layout.digest == layout.digest

    def finish(self, patch: Patch) -> Words:
        """Read the rest of ``patch`` and return all words; ``DesyncError`` where they are others."""
        self._end(patch, content.START)
        return self._words

    def _read(self, section: body.PatchSection) -> int:
        step = 0
        for i in body.unpack_pieces(section, self._words):
            _check_truths(self.layout, i, self._words[i])
            step += content.whole(self._words[i], i)  # while they are in a cache
        return step


def moves(patch: Patch, words: Words, held: Version, reading: SectionReading | None = None) -> list[Move]:
    """Return what ``patch``, not a keyframe, changes in ``words``, which hold version ``held``.

    ``reading`` may have read some of it. Errors: ``PayloadError`` for a body that cannot be, ``DesyncError``
    where it leads to other contents.
    """
    if isinstance(reading, Reading) and reading.of(words, held):
        return reading.finish(patch)
    _given_up(reading)
    return Reading(words, held).finish(patch)


def whole(patch: Patch, layout: Layout, reading: SectionReading | None = None) -> Words:
    """Return the words of a keyframe, of which ``reading`` may have read some. Errors: as ``moves``."""
    if isinstance(reading, KeyframeReading) and reading.of(layout):
        return reading.finish(patch)
    _given_up(reading)
    return KeyframeReading(layout).finish(patch)


def _given_up(reading: SectionReading | None) -> None:
    """End the threads of what was read for other words: the patch is read anew."""
    if reading is not None:
        reading.close()


def between(before: Words, after: Words) -> list[Move]:
    """Return what differs between two states of one layout."""
    found = []
    for i in range(len(before.layout.blocks())):
        positions = np.flatnonzero(before[i] != after[i]).astype(np.int32)
        if len(positions):
            found.append(Move(i, positions, before[i][positions], after[i][positions]))
    return found


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
    if slot.kind == "bool" and not ((new == 0) | (new == 1)).all():
        raise PayloadError(f"a patch with numbers for {slot.name}, which is true or false")


def _differs(patch: Patch) -> str:
    return f"version {patch.version} came out different from the publisher's; ask for a keyframe"
