"""The bit-width scheduler: layers whose weights waver most between two codes go without their lowest width.

Weights near a rounding edge change their code with every small update, the more so the fewer bits there are,
and carry that into the other widths which share them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.uses.models.oneshot.layers import SharedConv
from thinwire.uses.models.oneshot.quantiser import limits

NEAR = 1 / 8  # of a step to either side of an edge [code]
Widths = tuple[int, ...]


def wavering(weight: Tensor, step: Tensor, bits: int) -> float:
    """Return the share of weights within an eighth of a step of an edge between two codes.

    >>> wavering(torch.tensor([0.0, 0.45, 0.55, 0.7]), torch.tensor(1.0), 3)
    0.5
    """
    low, high = limits(bits, signed=True)
    relative = weight.detach() / step
    edges = (relative - 0.5).round().clamp_(low, high - 1) + 0.5
    return float(((relative - edges).abs() < NEAR).float().mean())


def turbulence(layer: SharedConv, widths: Sequence[int]) -> float:
    """Return the mean over widths of the share of wavering weights over the bits."""
    found = [wavering(layer.weight, layer.weights.of(bits), bits) / bits for bits in widths]
    return sum(found) / len(found)


@dataclass(frozen=True)
class Freezing:
    """When layers are frozen, and how many. Times are shares of the training [code: of 150 epochs].

    >>> freezing = Freezing()
    >>> [round(freezing.ratio(t), 2) for t in (0.0, 0.5, 1.0)]
    [0.5, 0.35, 0.2]
    >>> freezing.candidates([0.1, 0.3, 0.2, 0.0], 0.5, (2, 3, 4))
    [(2, 3, 4), (3, 4), (3, 4), (2, 3, 4)]
    """

    most: float = 0.5  # of the layers, at first
    least: float = 0.2
    start: float = 5 / 150
    every: float = 2 / 150
    late: float = 0.72  # from here on more rarely
    late_every: float = 15 / 150

    def ratio(self, done: float) -> float:
        """Return the share of layers to freeze: along half a cosine."""
        return self.least + (self.most - self.least) * (1 + math.cos(math.pi * done)) / 2

    def due(self, step: int, steps: int) -> bool:
        """Return whether layers are chosen anew before this step."""
        done = step / steps
        every = max(1, round(steps * (self.every if done <= self.late else self.late_every)))
        return done > self.start and step % every == 0

    def candidates(self, turbulences: Sequence[float], ratio: float, widths: Widths) -> list[Widths]:
        """Return the widths of each layer's weights: the most turbulent lose the lowest, the others none."""
        by_rank = sorted(range(len(turbulences)), key=lambda i: -turbulences[i])
        frozen = set(by_rank[: int(len(by_rank) * ratio)]) if len(widths) > 1 else set[int]()
        return [widths[1:] if i in frozen else widths for i in range(len(turbulences))]


FREEZING = Freezing()


@torch.no_grad()
def chosen(
    layers: Sequence[SharedConv], held: Sequence[Widths], freezing: Freezing, done: float
) -> list[Widths]:
    """Return the candidates of all layers by how turbulent they are at those that they hold."""
    turbulences = [turbulence(layer, own) for layer, own in zip(layers, held, strict=True)]
    return freezing.candidates(turbulences, freezing.ratio(done), layers[0].widths)
