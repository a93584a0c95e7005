"""A member of a swarm: it trains on the share that came with a version, or on texts of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from thinwire.rounds.client import Client
from thinwire.rounds.update_messages import Update, VersionMessage
from thinwire.types import PayloadError, require
from thinwire.uses.training.swarm.choosing.swarm_policy import MOST_STEPS
from thinwire.uses.training.swarm.local_adamw import AdamWTurns
from thinwire.uses.training.swarm.own_blocks import OwnBlocks
from thinwire.uses.training.swarm.shares import read_share


class Lessons(Protocol):
    """Where a member's batches come from."""

    @property
    def samples(self) -> int:
        """How many samples this round trains on."""
        ...

    @property
    def most(self) -> int:
        """How many samples a round may train on."""
        ...

    def take(self, version: VersionMessage) -> None:
        """Prepare for the steps of a version."""
        ...

    def batches(self, steps: int, draw: torch.Generator) -> Iterator[Tensor]:
        """Yield ``steps`` batches of blocks [B, seq + 1]."""
        ...


class SharedBlocks:
    """The blocks that the keeper hands out: ``batch`` a step, of ``seq`` tokens below ``vocabulary``."""

    def __init__(self, batch: int, seq: int, vocabulary: int) -> None:
        self._batch, self._vocabulary = batch, vocabulary
        self._blocks = torch.zeros(0, seq + 1, dtype=torch.int64)

    @property
    def samples(self) -> int:
        return len(self._blocks)

    @property
    def most(self) -> int:
        return MOST_STEPS * self._batch

    def forget(self) -> None:
        """Have no share, as before the first one."""
        self._blocks = self._blocks[:0]

    def take(self, version: VersionMessage) -> None:
        share = read_share(version.work, self._vocabulary)
        want = version.steps * self._batch, self._blocks.shape[1]
        fits = tuple(share.blocks.shape) == want
        wrong = f"a share of {list(share.blocks.shape)} numbers where {list(want)} are to be trained on"
        require(fits, PayloadError, wrong)
        self._blocks = share.blocks

    def batches(self, steps: int, draw: torch.Generator) -> Iterator[Tensor]:
        if len(self._blocks):
            yield from self._blocks.split(self._batch)
            return
        for _ in range(steps):  # to time a step before the first share
            yield torch.ones(self._batch, self._blocks.shape[1], dtype=torch.int64)


class PrivateBlocks:
    """Blocks of the member's own, which nobody else sees."""

    def __init__(self, blocks: Tensor, batch: int, seed: int) -> None:
        self._own, self._batch, self._steps = OwnBlocks(blocks, batch, seed), batch, 0

    @property
    def samples(self) -> int:
        return self._steps * self._batch

    @property
    def most(self) -> int:
        return MOST_STEPS * self._batch

    def take(self, version: VersionMessage) -> None:
        self._steps = version.steps

    def batches(self, steps: int, draw: torch.Generator) -> Iterator[Tensor]:
        return self._own.batches(steps, draw)


class SwarmMember(Client):
    """Train on what ``lessons`` give; see ``Client``, of which ``data`` are these."""

    data: Lessons
    moments: AdamWTurns  # what takes its local steps; set by who makes it

    @property
    def most_samples(self) -> int:
        """How many samples an update may be of, whatever the last one was of."""
        return self.data.most

    def train(self, version: VersionMessage, start: Tensor | None = None) -> Update:
        """Return the update that answers ``version``. Errors: those of ``Client.train``."""
        self.data.take(version)
        return super().train(version, start)
