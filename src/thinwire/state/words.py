"""Words of a state: one flat array of integers a word dtype, in which every slot has its place."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from thinwire.state import content, intake
from thinwire.state.layout import ALIGNED, WORDS, Layout, Slot, form_of, takes_casts
from thinwire.state.tensor_kinds import check_dense
from thinwire.state.threads import by_runs
from thinwire.types import InputError, require


class Words:
    """All words of one version, zeros to begin with. ``words[i]`` is piece i, a view [n]."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.flat = {word: _zeros(n, word) for word, n in layout.words.items()}
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


def imprint(tensors: Mapping[str, Tensor], note: str) -> str:
    """Return 48 hexadecimal digits over names, shapes, dtypes and bits, in any order, and over a note.

    A state's own hash is over its publisher's order, and over multiples where a tensor has a bound: a file
    of the tensors alone does not tell these. Errors: ``InputError`` for what no state is made of.
    """
    found = {name: tensors[name] for name in sorted(tensors)}
    layout = Layout(tuple(Slot(name, tuple(x.shape), x.dtype) for name, x in found.items()))
    bits = [_bits(x) if x.numel() else None for x in found.values()]
    pieces = layout.blocks()

    def part(run: slice) -> int:
        own = [(i, pieces[i], bits[pieces[i].slot]) for i in range(len(pieces))[run]]
        return content.add(*(content.whole(x[p.start : p.stop], i) for i, p, x in own if x is not None))

    total = content.add(content.START, *by_runs(part, [piece.numel for piece in pieces]))
    known = hashlib.blake2b(layout.to_json() + note.encode(), digest_size=16)
    return f"{known.hexdigest()}{total:016x}"


def _bits(x: Tensor) -> np.ndarray:
    return intake.plain(x).contiguous().reshape(-1).view(torch.uint8).numpy().view(WORDS[x.dtype])


def _zeros(n: int, word: np.dtype) -> np.ndarray:
    """Return zeros [n] that begin at a multiple of ``ALIGNED`` bytes; pages are taken as they are written."""
    raw = np.zeros(n * word.itemsize + ALIGNED, np.uint8)
    start = -raw.ctypes.data % ALIGNED
    return raw[start : start + n * word.itemsize].view(word)


def named(layout: Layout, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the tensor of each slot.

    Errors: ``InputError`` naming the first that is missing, too many, of another shape, or not castable.
    """
    extra = next((n for n in tensors if n not in layout.index), None)
    require(extra is None, InputError, f"{extra} is not in the layout of this state; publish it anew")
    for slot in layout.slots:
        given = slot.name in tensors
        require(given, InputError, f"{slot.name} is in the layout of this state, but was not given")
        check_fits(slot, tensors[slot.name])
    for alias, target in layout.aliases:
        if alias not in tensors:
            continue
        check_dense(alias, tensors[alias])
        same = _same(tensors[alias], tensors[target])
        require(same, InputError, f"{alias} was tied to {target} and now differs; publish the state anew")
    return [tensors[s.name] for s in layout.slots]


def _same(x: Tensor, y: Tensor) -> bool:
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if x.data_ptr() == y.data_ptr() and form_of(x) == form_of(y):
        return True
    ours, theirs = (intake.plain(z).contiguous().reshape(-1).view(torch.uint8) for z in (x, y))
    return torch.equal(ours, theirs.to(ours.device))


def check_fits(slot: Slot, x: Tensor) -> None:
    """Raise ``InputError`` unless ``x`` has the slot's shape, can be cast to its dtype and is dense."""
    check_dense(slot.name, x)
    if x.shape != slot.shape:  # not by require: names of dtypes take longer than all the rest
        raise InputError(f"{slot.name}: shape {tuple(x.shape)}, expected {slot.shape}")
    if x.dtype != slot.dtype and not (takes_casts(x.dtype) and takes_casts(slot.dtype)):
        raise InputError(f"{slot.name}: {x.dtype} cannot stand for {slot.dtype}")
