"""What a server asks before updates make a version: how far each is trusted, and why one is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Candidate:
    """An update that waits: who sent it, and what it takes off the weights, [1, N], as it was decoded."""

    client: int
    change: Tensor
    samples: int
    staleness: int = 0
    members: int = 1  # whose mean it is


@dataclass(frozen=True)
class Judgement:
    """How much an update counts, from 0 to 1 of its share, and in a sentence why it does not."""

    trust: float = 1.0
    reason: str = ""


class Judge(Protocol):
    """Weigh the updates of a version together. It may keep what it learnt of clients, under their numbers."""

    def weigh(
        self, version: int, weights: Tensor, candidates: Sequence[Candidate]
    ) -> Mapping[int, Judgement]:
        """Return a verdict by client; of one that is not named, full trust.

        ``version`` is the one that the updates are to be taken off, of ``weights`` [1, N].
        """
        ...

    def state(self) -> dict[str, Any]:
        """Return what is kept, as plain values."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what ``state`` returned."""
        ...
