"""What a run learns: how blocks of samples become what a model is given and what it is to answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.runs.data import packing


@dataclass(frozen=True)
class Task:
    """Samples are the rows of one tensor: blocks [B, ``numbers``] of ``dtype``. Shapes are of one sample.

    The loss is the cross-entropy of the logits [B, ..., classes] over the targets [B, ...] that are to be
    learnt. ``hidden``: the shape of what crosses a stage boundary; empty for a model that is not cut.
    ``accuracy``: evaluations also say how many targets have the largest logit.
    """

    inputs: Callable[[Tensor], Tensor]
    targets: Callable[[Tensor], Tensor]
    numbers: int
    dtype: torch.dtype
    hidden: tuple[int, ...]
    logits: tuple[int, ...]
    accuracy: bool = False

    @property
    def values(self) -> int:
        """Values of a sample that cross each stage boundary."""
        return math.prod(self.hidden) if self.hidden else 0

    def blank(self, rows: int) -> Tensor:
        """Return a block of zeros, of which ``inputs`` and ``targets`` have the shapes of any other."""
        return torch.zeros(rows, self.numbers, dtype=self.dtype)


def language(seq: int, width: int, vocabulary: int) -> Task:
    """Return the task of predicting each next token, over blocks as ``pack`` makes them.

    >>> language(3, 8, 100).inputs(torch.tensor([[5, 6, 7, 8]])).tolist()
    [[5, 6, 7]]
    """
    return Task(packing.inputs, packing.targets, seq + 1, torch.int64, (seq, width), (seq, vocabulary))
