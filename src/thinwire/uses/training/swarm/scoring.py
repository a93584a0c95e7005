"""Losses with an update and without: gains, measured within a share of the time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Gain:
    """How much lower the loss of blocks is with an update, in nats a token: mean and standard error.

    Of one block the error is not known: it is taken to be as large as the gain.

    >>> Gain.of(torch.tensor([2.0, 2.0]), torch.tensor([1.0, 1.5]))
    Gain(mean=0.75, error=0.25)
    """

    mean: float
    error: float

    @classmethod
    def of(cls, without: Tensor, having: Tensor) -> Gain:
        """Return the gain of blocks whose losses are given; a loss that is not finite is a gain of -1e9."""
        each = (without.double() - having.double()).nan_to_num(-1e9, -1e9, -1e9).clamp(-1e9, 1e9)
        mean = float(each.mean())
        return cls(mean, float(each.std()) / math.sqrt(len(each)) if len(each) > 1 else abs(mean))

    def times(self, factor: float) -> Gain:
        """Return the gain of a step so much longer, as far as gains grow with steps."""
        return Gain(self.mean * factor, self.error * factor)

    def above(self, other: Gain) -> float:
        """Return by how many standard errors this gain is above another."""
        error = math.hypot(self.error, other.error)
        return (self.mean - other.mean) / error if error else 0.0


class ScoringTime:
    """Spend at most a ``share`` of the time that passes, by ``clock`` in seconds, on losses of blocks.

    What a version does not use is there for the next. ``credit``: seconds that may be spent now; it is below
    0 after losses that took longer than those before. ``pace``: seconds a block, once measured.
    """

    def __init__(
        self, losses: Callable[[Tensor, Tensor], Tensor], share: float, clock: Callable[[], float]
    ) -> None:
        self._losses, self._share, self._clock = losses, share, clock
        self._last, self.credit, self.pace = clock(), 0.0, 0.0

    def begin(self) -> None:
        """Count the time since this was asked last."""
        now = self._clock()
        self.credit += self._share * max(0.0, now - self._last)
        self._last = now

    def learn(self, row: Tensor, blocks: Tensor) -> None:
        """Measure the pace, where it is not known and some time is there."""
        if not self.pace and self.credit > 0:
            self.of(row, blocks)

    def affords(self, blocks: int) -> bool:
        """Return whether there is time for the losses of so many blocks."""
        return self.credit > 0 and self.pace * blocks <= self.credit

    def of(self, row: Tensor, blocks: Tensor) -> Tensor:
        """Return the loss of each block [n] under the weights ``row`` [1, N], on the CPU."""
        begun = self._clock()
        found = self._losses(row, blocks).detach().float().cpu()  # waits for a card
        took = max(0.0, self._clock() - begun)
        self.credit -= took
        self.pace = took / len(blocks) if not self.pace else 0.7 * self.pace + 0.3 * took / len(blocks)
        return found

    def state(self) -> dict[str, float]:
        """Return what is kept, as plain values."""
        return {"credit": self.credit, "pace": self.pace}

    def load(self, state: Mapping[str, float]) -> None:
        """Load what ``state`` returned."""
        self.credit, self.pace = float(state["credit"]), float(state["pace"])


class Trial:
    """Try the updates of one version, of ``weights`` [1, N], all on the same few blocks of ``heldout``."""

    def __init__(self, time: ScoringTime, weights: Tensor, heldout: Tensor, draw: torch.Generator) -> None:
        self.time, self._weights, self._heldout, self._draw = time, weights, heldout, draw
        self._held, self._without = heldout[:0], torch.zeros(0)

    def some(self, blocks: Tensor, many: int) -> Tensor:
        """Return so many of ``blocks``, or all there are, by chance."""
        return blocks[torch.randperm(len(blocks), generator=self._draw)[:many]]

    def begin(self, many: int) -> None:
        """Draw so many held-out blocks, and measure their losses without any update."""
        self._held = self.some(self._heldout, many)
        self._without = self.time.of(self._weights, self._held)

    def moved(self, change: Tensor, share: float) -> Tensor:
        """Return the weights with a share of ``change`` taken off them."""
        return self._weights - change * share

    def gains(self, moved: Tensor, own: Tensor | None) -> dict[str, Gain]:
        """Return the gains of weights on the held-out blocks and on ``own`` ones."""
        if own is None:
            return {"held": Gain.of(self._without, self.time.of(moved, self._held))}
        without = self.time.of(self._weights, own)
        having = self.time.of(moved, torch.cat((self._held, own)))
        held = len(self._held)
        return {"held": Gain.of(self._without, having[:held]), "own": Gain.of(without, having[held:])}

    def gain(self, moved: Tensor, blocks: Tensor) -> Gain:
        """Return the gain of weights on blocks."""
        return Gain.of(self.time.of(self._weights, blocks), self.time.of(moved, blocks))

    def losses(self, share: float, change: Tensor, blocks: Tensor) -> Tensor:
        """Return the losses of blocks with a share of ``change`` taken off the weights."""
        return self.time.of(self.moved(change, share) if share else self._weights, blocks)
