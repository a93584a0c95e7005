"""Words of a state: one flat array of integers a word dtype, in which every slot has its place."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from thinwire.state import content
from thinwire.state.layout import ALIGNED, Array, Layout
from thinwire.state.threads import by_runs


class Words:
    """All words of one version, zeros to begin with. ``words[i]`` is piece i, a view [n]."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.flat = {word: zeros(n, word) for word, n in layout.words.items()}
        self._pieces = [self.flat[p.word][p.at : p.at + p.numel] for p in layout.blocks()]

    def __getitem__(self, piece: int) -> np.ndarray:
        return self._pieces[piece]

    def slot(self, index: int) -> np.ndarray:
        """Return all words of a slot, a view [n]."""
        slot, at = self.layout.slots[index], self.layout.places[index]
        return self.flat[slot.word][at : at + slot.count] if slot.count else np.zeros(0, slot.word)

    def copy_from(self, other: Words) -> None:
        """Take over all words of another state of this layout."""
        by_runs(lambda run: self._copy(other, run), [words.size for words in self._pieces])

    def _copy(self, other: Words, run: slice) -> None:
        for i in range(len(self._pieces))[run]:
            np.copyto(self[i], other[i])

    def copy(self) -> Words:
        found = Words(self.layout)
        found.copy_from(self)
        return found

    def hash(self) -> int:
        """Return the content hash, from all words: about 1 ns each, on one core."""

        def part(run: slice) -> int:
            own = range(len(self._pieces))[run]
            return content.add(*(content.whole(self[i], i) for i in own))

        return content.add(content.START, *by_runs(part, [words.size for words in self._pieces]))


def imprint(layout: Layout, found: Sequence[Array], note: str) -> str:
    """Return 48 hexadecimal digits over the names, shapes, dtypes and bits of a state, and over a note.

    ``found`` are the bits of each slot, as words [n]. A state's own hash is over its publisher's order, and
    over multiples where a tensor has a bound: a file of the tensors alone does not tell these. So the slots
    have no bounds here, and are in the order of their names.
    """
    pieces = layout.blocks()

    def part(run: slice) -> int:
        own = [(i, pieces[i], found[pieces[i].slot]) for i in range(len(pieces))[run]]
        return content.add(*(content.whole(x[p.start : p.stop], i) for i, p, x in own))

    total = content.add(content.START, *by_runs(part, [piece.numel for piece in pieces]))
    known = hashlib.blake2b(layout.to_json() + note.encode(), digest_size=16)
    return f"{known.hexdigest()}{total:016x}"


def zeros(n: int, word: np.dtype) -> np.ndarray:
    """Return zeros [n] that begin at a multiple of ``ALIGNED`` bytes; pages are taken as they are written."""
    raw = np.zeros(n * word.itemsize + ALIGNED, np.uint8)
    start = -raw.ctypes.data % ALIGNED
    return raw[start : start + n * word.itemsize].view(word)
