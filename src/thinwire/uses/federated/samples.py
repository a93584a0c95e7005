"""The data of one client, and the batches that it draws from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from thinwire.types import InputError, require


class Data(Protocol):
    """What a client trains on."""

    @property
    def samples(self) -> int:
        """How many samples there are."""
        ...

    def batches(self, steps: int, draw: torch.Generator) -> Iterator[Any]:
        """Yield ``steps`` batches; all that is random comes from ``draw``."""
        ...


def as_they_are(inputs: Tensor) -> Tensor:
    """Return ``inputs``."""
    return inputs


@dataclass(frozen=True, eq=False)
class Samples:
    """Inputs and labels, [n, ...] each, drawn in a new order at each turn, ``batch`` at a time (0: all).

    Each pass takes every sample once; where fewer are left than a batch takes, the next pass begins. Many
    clients may share the tensors: ``rows`` [m] int64 says which samples are this one's (None: all).
    ``prepare`` makes of a batch of inputs what the model takes, so that bytes need not be kept as floats.

    >>> data = Samples(torch.arange(5.0)[:, None], torch.zeros(5), batch=2)
    >>> [len(labels) for _, labels in data.batches(3, torch.Generator())]
    [2, 2, 2]
    """

    inputs: Tensor
    labels: Tensor
    batch: int = 20
    rows: Tensor | None = None
    prepare: Callable[[Tensor], Tensor] = as_they_are

    def __post_init__(self) -> None:
        n, many = len(self.inputs), len(self.labels)
        fits = n == many and self.samples > 0
        require(fits, InputError, f"{n} inputs for {many} labels; give as many, one at least")
        require(self.batch >= 0, InputError, f"batch={self.batch} is below 0; give samples, or 0 for all")

    @property
    def samples(self) -> int:
        """How many samples there are."""
        return len(self.labels if self.rows is None else self.rows)

    def batches(self, steps: int, draw: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ``steps`` batches of inputs and labels."""
        size = min(self.batch or self.samples, self.samples)
        order = torch.empty(0, dtype=torch.int64)
        for _ in range(steps):
            if len(order) < size:
                order = torch.randperm(self.samples, generator=draw)
            taken, order = order[:size], order[size:]
            rows = taken if self.rows is None else self.rows[taken]
            yield self.prepare(self.inputs[rows]), self.labels[rows]
