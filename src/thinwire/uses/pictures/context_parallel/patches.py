"""How the tokens of a picture or video are cut into patches: along the tokens' order, or each frame alike."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.types import InputError, require

_TURN, MOST_SUITED = 128, 64  # what a turn costs, in tokens; the most patches by themselves


@dataclass(frozen=True, eq=False)
class TokenPatch:
    """The tokens of one patch: a range, or places among all tokens [n]."""

    tokens: int
    places: slice | Tensor

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return the patch's tokens of ``x``, which has all along ``dim``.

        >>> TokenPatch(2, slice(1, 3)).take(torch.arange(4), 0)
        tensor([1, 2])
        """
        if isinstance(self.places, slice):
            return x.narrow(dim, self.places.start, self.tokens)
        return x.index_select(dim, self.places.to(x.device))

    def put(self, x: Tensor, part: Tensor, dim: int = 1) -> None:
        """Write the patch's tokens into ``x``."""
        if isinstance(self.places, slice):
            x.narrow(dim, self.places.start, self.tokens).copy_(part)
        else:
            x.index_copy_(dim, self.places.to(x.device), part)


def suited(tokens: int, beside: int, ranks: int) -> int:
    """Return into how many patches ``tokens`` are cut so that a step takes least time, and 64 at most.

    A step has ``patches + ranks - 1`` turns, each of a patch, of the tokens ``beside`` it, and of what a turn
    costs by itself, as much as 128 tokens [derived, and a guess at the last].

    >>> suited(32_760, 0, ranks=2), suited(32_760, 0, ranks=4), suited(4096, 512, ranks=2)
    (16, 28, 3)
    """
    least = round(math.sqrt((ranks - 1) * tokens / (beside + _TURN)))
    return max(1, min(max(least, ranks), MOST_SUITED, tokens))


class Patches(Sequence[TokenPatch]):
    """All tokens in patches, as even as they go.

    ``frames``: in how many frames the tokens are, one after the other, each of which is then cut alike; 0
    cuts the whole sequence, so a patch of a video is some frames of it. Errors: ``InputError``.

    >>> [patch.tokens for patch in Patches(10, 4)]
    [2, 3, 2, 3]
    >>> Patches(8, 2, frames=2)[0].places
    tensor([0, 1, 4, 5])
    """

    def __init__(self, tokens: int, number: int, frames: int = 0) -> None:
        self.tokens = tokens
        held, what = (tokens // frames, "each frame's") if frames else (tokens, "the picture's")
        text = f"{number} patches are more than {what} {held} tokens; give fewer patches"
        require(held >= number, InputError, text)
        text = f"{tokens} tokens are not {frames} frames of equal size; cut it along time instead"
        require(not frames or tokens % frames == 0, InputError, text)
        ends = [held * (m + 1) // number for m in range(number)]
        ranges = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        self._patches = [_patch(each, tokens, frames) for each in ranges]

    def __len__(self) -> int:
        return len(self._patches)

    def __getitem__(self, number: int) -> TokenPatch:  # type: ignore[override]  # no slices of them
        return self._patches[number]

    def __iter__(self) -> Iterator[TokenPatch]:
        return iter(self._patches)


def _patch(part: slice, tokens: int, frames: int) -> TokenPatch:
    if not frames:
        return TokenPatch(part.stop - part.start, part)
    places = torch.arange(tokens).view(frames, -1)[:, part].flatten()
    return TokenPatch(len(places), places)
