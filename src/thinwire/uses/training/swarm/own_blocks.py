"""A member's own samples, which never leave it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from thinwire.types import InputError, require
from thinwire.uses.training.swarm.shuffled_passes import ShuffledPasses


class OwnBlocks:
    """Train on the rows of ``blocks`` [n, seq + 1] int64, ``batch`` at a time, in passes that span rounds.

    Each pass takes every sample once, in an order by ``seed``: take another one at each start, or the first
    samples are trained on more often than the last. ``samples`` is how many the last round took, and so how
    much its update counts. Errors: ``InputError`` where there are none.

    >>> own = OwnBlocks(torch.arange(12).view(4, 3), batch=2)
    >>> [b.shape for b in own.batches(3)], own.samples
    ([torch.Size([2, 3]), torch.Size([2, 3]), torch.Size([2, 3])], 6)
    """

    def __init__(self, blocks: Tensor, batch: int, seed: int = 0) -> None:
        fits = len(blocks) > 0 and batch >= 1
        require(fits, InputError, f"{len(blocks)} samples in batches of {batch}; give one at least of each")
        self._blocks, self.batch = blocks, min(batch, len(blocks))
        self._passes = ShuffledPasses(len(blocks), seed)
        self.samples = self.batch

    def batches(self, steps: int, draw: torch.Generator | None = None) -> Iterator[Tensor]:
        """Return ``steps`` batches [batch, seq + 1]; the order is by the seed, not drawn."""
        self.samples = steps * self.batch
        return (self._blocks[torch.tensor(self._passes.take(self.batch))] for _ in range(steps))
