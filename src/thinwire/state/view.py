"""Words of a state as tensors: views of their bits; values computed from the grid where a tensor is lossy."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from thinwire.state import grid
from thinwire.state.layout import Layout
from thinwire.state.words import Words


class View:
    """The tensors of some words by name. Lossy ones have values of their own: ``refresh`` what changed."""

    def __init__(self, words: Words) -> None:
        self.words = words
        layout = words.layout
        lossy = [(i, slot) for i, slot in enumerate(layout.slots) if slot.bound]
        self._values = {i: torch.empty(s.numel, dtype=s.dtype, device="cpu") for i, s in lossy}
        self.slots = [self._slot(layout, i) for i in range(len(layout.slots))]
        self.tensors = {name: self.slots[i] for name, i in layout.index.items()}
        for i in range(len(layout.blocks())):
            self.refresh(i)

    def _slot(self, layout: Layout, index: int) -> Tensor:
        slot, values = layout.slots[index], self._values.get(index)
        if values is None:
            values = torch.from_numpy(self.words.slot(index)).view(slot.dtype)
        return values.view(slot.shape)

    def refresh(self, piece: int, positions: np.ndarray | None = None) -> None:
        """Compute the values of a piece anew, those at ``positions`` or all."""
        p = self.words.layout.blocks()[piece]
        slot, values = self.words.layout.slots[p.slot], self._values.get(p.slot)
        if values is None or slot.bound is None:
            return
        words, into = self.words[piece], values[p.start : p.stop]
        if positions is None:
            into.copy_(grid.values(words, slot.bound))
        else:
            into[torch.from_numpy(positions.astype(np.int64))] = grid.values(
                words[positions], slot.bound, slot.dtype
            )

    def copy_from(self, other: View) -> None:
        """Take over all words and values of another view of this layout."""
        self.words.copy_from(other.words)
        for i, values in self._values.items():
            values.copy_(other._values[i])
