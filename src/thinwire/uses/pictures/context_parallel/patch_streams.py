"""What of a model's streams goes from rank to rank with a patch: its own tokens, and those beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.uses.pictures.context_parallel.kept_keys import TokenLayout, windows
from thinwire.uses.pictures.context_parallel.patches import TokenPatch


@dataclass(frozen=True, eq=False)
class PatchStreams:
    """The streams [B, tokens, width] of one patch.

    ``beside``: names of streams that go whole with each patch, as a text's does. ``cut``: whether the others
    are of this patch alone, and not of the whole picture. Words that stand in a stream with the picture's
    tokens go beside as well.
    """

    patch: TokenPatch
    layout: TokenLayout
    beside: Sequence[str]
    cut: bool

    def parts(self, streams: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the patch's tokens [1, rows, width], and what is beside them, if anything is."""
        groups = self._groups(streams)
        return [torch.cat([self._taken(*each).reshape(1, -1, _width(g)) for each in g], 1) for g in groups]

    def shapes(self, streams: Mapping[str, Tensor]) -> list[tuple[int, ...]]:
        """Return the shapes of ``parts``."""
        groups = self._groups(streams)
        return [(1, sum(map(self._count, g)) // _width(g), _width(g)) for g in groups]

    def put(self, streams: Mapping[str, Tensor], parts: Sequence[Tensor]) -> None:
        """Write what ``parts`` has returned elsewhere into streams of the same shapes."""
        for group, part in zip(self._groups(streams), parts, strict=True):
            flat = part.flatten().split(list(map(self._count, group)))
            for (window, ours), mine in zip(group, flat, strict=True):
                if ours:
                    self.patch.put(window, mine.view(window.shape[0], -1, window.shape[2]))
                else:
                    window.copy_(mine.view(window.shape))

    def _groups(self, streams: Mapping[str, Tensor]) -> list[list[tuple[Tensor, bool]]]:
        """Return windows on the picture's tokens, and on those beside them, where there are any.

        With each: whether the patch is yet to be taken from it.
        """
        ours, beside = [], []
        for name, x in streams.items():
            picture, words = self._windows(name, x)
            ours += [(picture, not self.cut)] if picture.shape[1] else []
            beside += [(words, False)] if words.shape[1] else []
        return [group for group in (ours, beside) if group]

    def _windows(self, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        if name in self.beside:
            return x.narrow(1, 0, 0), x
        tokens = self.patch.tokens if self.cut else self.layout.tokens
        return windows(x, tokens, self.layout.text_after, 1)

    def _taken(self, window: Tensor, ours: bool) -> Tensor:
        return self.patch.take(window) if ours else window

    def _count(self, each: tuple[Tensor, bool]) -> int:
        window, ours = each
        return window.numel() // window.shape[1] * self.patch.tokens if ours else window.numel()


def _width(group: Sequence[tuple[Tensor, bool]]) -> int:
    """Return the width that all have in common: of streams of several widths, their greatest divisor."""
    return math.gcd(*(window.shape[2] for window, _ in group))
