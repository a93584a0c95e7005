"""Words from this machine's memory to a model on another device: what changed, together, in one copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from thinwire.staging import put_together, to_host
from thinwire.state.devices.tensor_words import INTEGERS
from thinwire.state.layout import Array, Layout
from thinwire.state.patch_code.indexing import read
from thinwire.state.threads import by_runs
from thinwire.state.values import Place

MOST = 1 << 28  # bytes that cross at once: they are pinned


class _Load(NamedTuple):
    """Words of a slot for ``target``: all, those from ``start`` on, or those at ``at`` from there."""

    target: Tensor
    slot: int
    new: Array
    start: int | None
    at: Array | None = None
    prove: bool = False  # look whether the target took them

    @property
    def arrays(self) -> list[Array]:
        return [self.new] if self.at is None else [self.at, self.new]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def land(self, parts: Iterator[Tensor]) -> Tensor | None:
        """Write what has crossed; return, where that is to be proved, whether the target differs from it."""
        at = None if self.at is None else next(parts)
        new, target = next(parts), self.target
        if self.start is None:
            target.copy_(new.view(target.dtype).view(target.shape))
            held = bits(target.contiguous()) if self.prove else new
        elif at is not None:
            bits(target).index_copy_(0, at.long().add_(self.start), new)
            return None
        else:
            held = bits(target)[self.start : self.start + new.numel()]
            held.copy_(new)
        return (held != new).any() if self.prove else None


class Crossing:
    """What tensors of one device are to be brought up to: ``slots``, tensors of a layout in this memory.

    ``places``: where these differ from what the tensors hold; None: anywhere.
    """

    def __init__(self, layout: Layout, slots: Sequence[Tensor], places: Sequence[Place] | None) -> None:
        self._slots, self._places = slots, dict[int, list[Place]]()
        self._anywhere, self._blocks = places is None, layout.blocks()
        for place in places or ():
            self._places.setdefault(self._blocks[place[0]].slot, []).append(place)
        self._whole = list[tuple[Tensor, int, bool]]()
        self._some = list[tuple[Tensor, int]]()

    def add(self, x: Tensor, index: int, whole: bool, prove: bool) -> None:
        """Bring ``x``, which is to be the tensor of a slot, up to that; ``whole``: wherever it differs."""
        if whole or self._anywhere or not _plain(x):
            self._whole.append((x.detach(), index, prove))
        else:
            self._some.append((x.detach(), index))

    def go(self) -> list[tuple[Tensor, int]]:
        """Copy; return the tensors, of those to be proved, that did not take it, and their slots."""
        proofs = list[tuple[_Load, Tensor]]()
        for group in _groups([*self._all(), *self._changed()]):
            arrays = [array for load in group for array in load.arrays]
            layout = [(INTEGERS[array.dtype], array.size) for array in arrays]
            raw = [array.view(np.uint8).data for array in arrays]
            parts = iter(put_together(raw, layout, group[0].target.device))
            with torch.no_grad():
                found = [(load, load.land(parts)) for load in group]
            proofs += [(load, proof) for load, proof in found if proof is not None]
        wrong = to_host([torch.stack([proof for _, proof in proofs])]).tensors()[0] if proofs else ()
        return [(load.target, load.slot) for (load, _), told in zip(proofs, wrong, strict=True) if told]

    def _all(self) -> Iterator[_Load]:
        for x, index, prove in self._whole:
            words = _words(self._slots[index])
            if not _plain(x):
                yield _Load(x, index, words, None, prove=prove)
                continue
            step = max(1, MOST // words.itemsize)
            for start in range(0, words.size, step):
                yield _Load(x, index, words[start : start + step], start, prove=prove)

    def _changed(self) -> Iterator[_Load]:
        wanted = [(x, place) for x, index in self._some for place in self._places.get(index, ())]
        sizes = [0 if at is None else at.size for _, (_, at) in wanted]
        loads = by_runs(lambda run: [self._load(x, *place) for x, place in wanted[run]], sizes)
        return chain.from_iterable(loads)

    def _load(self, x: Tensor, piece: int, at: Array | None) -> _Load:
        known = self._blocks[piece]
        words = _words(self._slots[known.slot])[known.start : known.stop]
        return _Load(x, known.slot, read(words, at), known.start, at)


def bits(x: Tensor) -> Tensor:
    """Return the bits of a tensor without gaps as integers [n], the same memory."""
    x = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
    return x.reshape(-1).view(INTEGERS[np.dtype(f"i{x.element_size()}")])


def _plain(x: Tensor) -> bool:
    return x.is_contiguous() and not (x.is_conj() or x.is_neg())


def _words(x: Tensor) -> Array:
    words: Array = bits(x).numpy()
    return words


def _groups(loads: Iterable[_Load]) -> Iterator[list[_Load]]:
    """Yield them in groups that cross together."""
    group, total = list[_Load](), 0
    for load in loads:
        if group and total + load.nbytes > MOST:
            yield group
            group, total = [], 0
        group.append(load)
        total += load.nbytes
    if group:
        yield group
