"""What a model's layers of experts call, and what they say of themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer of experts: its number among them, its name, how many experts, and what one makes of rows.

    ``chosen``: how many experts each token has; 0 where experts choose tokens.
    """

    number: int
    name: str
    experts: int
    chosen: int
    compute: Callable[[int, Tensor], Tensor]


class Session(Protocol):
    """What stands in for the layers of experts."""

    def choose(self, layer: Layer, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return for tokens ``x`` [T, width] the weighted sum over their experts ``chosen`` [T, k]."""
        ...

    def every(self, layer: Layer, x: Tensor, tokens: Tensor) -> Tensor:
        """Return what each expert makes of its ``tokens`` [experts, n]: [experts * n, width]."""
        ...
