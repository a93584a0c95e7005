"""The order in which a run sees its samples."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.types import InputError, require


@dataclass(frozen=True)
class Batches:
    """The sample ids of each step: an iterable of LongTensor [batch], fixed by its fields.

    - ``steps`` and ``epochs``: E passes over the samples of N/E steps (rounded up; the last may be short)
    - ``steps`` alone: through all samples, reshuffled at each wrap
    - ``epochs`` alone, or neither (one epoch): whole passes, the last partial batch dropped

    Every pass holds the same samples in another order. ``InputError`` if there are too few for it.

    >>> [b.tolist() for b in Batches(n_samples=10, batch=2, steps=4, epochs=2, seed=1)]
    [[8, 4], [6, 1], [6, 4], [8, 1]]
    """

    n_samples: int
    batch: int
    steps: int | None = None
    epochs: int | None = None
    seed: int = 0
    seq: int | None = None  # tokens a block, for messages only

    def __post_init__(self) -> None:
        for name in ("batch", "steps", "epochs"):
            value = getattr(self, name)
            require(value is None or value > 0, InputError, f"{name} is {value}; it must be 1 or more")
        self._require_samples(self.batch, "a batch")
        if self.steps is not None and self.epochs is not None:
            require(
                self.epochs <= self.steps,
                InputError,
                f"{self.steps} steps cannot hold {self.epochs} epochs; use more --steps or fewer --epochs",
            )
            self._require_samples(self.distinct, f"{self.steps_per_pass} steps a pass of batch {self.batch}")

    def _require_samples(self, needed: int, what: str) -> None:
        size = f" of {self.seq} tokens" if self.seq else ""
        require(
            self.n_samples >= needed,
            InputError,
            f"data has {self.n_samples} blocks{size}, {what} needs {needed}; "
            "use a longer text, a smaller --batch or --seq",
        )

    @property
    def steps_per_pass(self) -> int:
        """Steps of one pass over the samples in use."""
        if self.steps is not None and self.epochs is not None:
            return math.ceil(self.steps / self.epochs)
        return self.n_samples // self.batch

    @property
    def distinct(self) -> int:
        """How many samples one pass holds."""
        return self.steps_per_pass * self.batch

    def __len__(self) -> int:
        """Return the number of steps of the run."""
        return self.steps if self.steps is not None else (self.epochs or 1) * self.steps_per_pass

    def __iter__(self) -> Iterator[Tensor]:
        return self.starting_at(0)

    def starting_at(self, step: int) -> Iterator[Tensor]:
        """Yield the ids of step ``step`` and on, as a run from the start sees them (for resuming)."""
        for number in range(step // self.steps_per_pass, math.ceil(len(self) / self.steps_per_pass)):
            order = self._pass(number)
            base = number * self.steps_per_pass
            for k in range(max(step - base, 0), min(self.steps_per_pass, len(self) - base)):
                yield order[k * self.batch : (k + 1) * self.batch]

    def samples(self) -> Tensor:
        """Return the ids that the run visits at least once, sorted, if it gets through one pass."""
        if self.steps is not None and self.epochs is not None:
            return self._shuffled(0, self.n_samples)[: self.distinct].sort().values
        return torch.arange(self.n_samples)

    def _pass(self, number: int) -> Tensor:
        pool = self.samples()
        return pool[self._shuffled(number + 1, len(pool))]

    def _shuffled(self, number: int, n: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        return torch.randperm(n, generator=generator)
