"""How updates become a version: rules that are values, and a sum that does not depend on who was first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from thinwire.rounds.parameters import pieces
from thinwire.spec import Spec
from thinwire.types import InputError, ThinwireError, require

SCALINGS = ("answered", "participants")
WEIGHTS = ("samples", "equal")


@dataclass(frozen=True)
class ArrivedUpdate:
    """What a rule knows of an update; ``staleness``: versions since the one that it started from."""

    client: int
    sequence: int
    samples: int
    staleness: int = 0


@dataclass(frozen=True)
class Federation:
    """What a rule knows of all: clients and their samples, and how many were asked in this round."""

    clients: int
    samples: int
    asked: int = 0


@runtime_checkable
class Rule(Protocol):
    """When updates make a version, and which share of each is taken off the weights."""

    @property
    def in_rounds(self) -> bool:
        """Whether only those are heard who were asked, and only about the newest version."""
        ...

    @property
    def mixes(self) -> bool:
        """Whether shares are of the distance to what a client ended at, not of how far it went."""
        ...

    @property
    def seconds(self) -> float:
        """How long a period lasts, at whose end ``Server.close`` is called; 0 where there are none."""
        ...

    def is_due(self, arrived: int, missing: int) -> bool:
        """Return whether the updates that ``arrived`` make a version, where ``missing`` are to come."""
        ...

    def shares(self, arrivals: Sequence[ArrivedUpdate], federation: Federation) -> list[float]:
        """Return the share of each update. Errors: ``ThinwireError`` where all weights are zero."""
        ...


@dataclass(frozen=True, repr=False)
class Synchronous(Spec):
    """Average over a round, by samples: over those who ``answered``, or scaled for all ``participants``.

    The latter takes n / S of each client's share p of all samples, with n clients of which S were asked, so
    that the step is smaller where some do not answer. Sources: FedAvg (arXiv 1602.05629); the scaling n / |S|
    of gamma-FedHT (arXiv 2505.12479, Algorithm 1) [quoted]. ``rate``: the server's step size.

    >>> Synchronous().shares([ArrivedUpdate(0, 1, 30), ArrivedUpdate(1, 1, 10)], Federation(4, 80, 2))
    [0.75, 0.25]
    >>> Synchronous("participants").shares([ArrivedUpdate(0, 1, 30)], Federation(4, 80, 2))
    [0.75]
    """

    scaling: str = "answered"
    rate: float = 1.0
    in_rounds = True
    mixes = False
    seconds = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _one_of("scaling", self.scaling, SCALINGS)
        _above_zero("rate", self.rate)

    def is_due(self, arrived: int, missing: int) -> bool:
        return arrived > 0 and not missing

    def shares(self, arrivals: Sequence[ArrivedUpdate], federation: Federation) -> list[float]:
        total: float = _total([float(a.samples) for a in arrivals], arrivals)
        if self.scaling == "participants":
            total = federation.samples * federation.asked / federation.clients
        return [self.rate * a.samples / total for a in arrivals]


@dataclass(frozen=True, repr=False)
class FedAsync(Spec):
    """Mix the model that each client ends at into the weights: alpha (staleness + 1)^-a of it.

    Source: FedAsync (arXiv 1903.03934), with its polynomial discount; the weights mixed are the start less
    the update as it was decoded.

    >>> FedAsync(0.5, a=1.0).shares([ArrivedUpdate(0, 1, 30, staleness=1)], Federation(4, 80))
    [0.25]
    """

    alpha: float = 0.6
    a: float = 0.5
    in_rounds = False
    mixes = True
    seconds = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.alpha <= 1, InputError, f"alpha={self.alpha} is not in (0, 1]")
        _not_negative("a", self.a)

    def is_due(self, arrived: int, missing: int) -> bool:
        return arrived > 0

    def shares(self, arrivals: Sequence[ArrivedUpdate], federation: Federation) -> list[float]:
        return [self.alpha * discount(a.staleness, self.a) for a in arrivals]


@dataclass(frozen=True, repr=False)
class FedBuff(Spec):
    """Take the mean of every ``size`` updates, each times (staleness + 1)^-a and the server's ``rate``.

    Source: FedBuff (arXiv 2106.06639), whose discount is that of a = 0.5.
    """

    size: int = 10
    a: float = 0.5
    rate: float = 1.0
    in_rounds = False
    mixes = False
    seconds = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.size >= 1, InputError, f"size={self.size} is no number of updates; give 1 or more")
        _not_negative("a", self.a)
        _above_zero("rate", self.rate)

    def is_due(self, arrived: int, missing: int) -> bool:
        return arrived >= self.size

    def shares(self, arrivals: Sequence[ArrivedUpdate], federation: Federation) -> list[float]:
        return [self.rate * discount(a.staleness, self.a) / len(arrivals) for a in arrivals]


@dataclass(frozen=True, repr=False)
class Periodic(Spec):
    """Every ``seconds``, take the mean of what arrived, by ``samples`` or ``equal``; ``rate``: the server's.

    Whoever keeps the time calls ``Server.close`` then. ``a`` discounts stale updates by (staleness + 1)^-a;
    by default they count in full. Source: FedLuck (arXiv 2407.05125), whose text takes the plain mean and
    whose released code weighs by samples [quoted].
    """

    seconds: float = 1.5
    weights: str = "samples"
    rate: float = 1.0
    a: float = 0.0
    in_rounds = False
    mixes = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _above_zero("seconds", self.seconds)
        _one_of("weights", self.weights, WEIGHTS)
        _above_zero("rate", self.rate)
        _not_negative("a", self.a)

    def is_due(self, arrived: int, missing: int) -> bool:
        return False

    def shares(self, arrivals: Sequence[ArrivedUpdate], federation: Federation) -> list[float]:
        weights = [float(x.samples) if self.weights == "samples" else 1.0 for x in arrivals]
        total = _total(weights, arrivals)
        return [
            self.rate * discount(x.staleness, self.a) * w / total
            for x, w in zip(arrivals, weights, strict=True)
        ]


def discount(staleness: int, a: float) -> float:
    """Return (staleness + 1)^-a.

    >>> discount(3, 0.5)
    0.5
    """
    return float((staleness + 1.0) ** -a)


def summed(weights: Tensor, changes: Iterable[tuple[float, Tensor]]) -> Tensor:
    """Return the sum of the changes of ``weights`` [1, N], each times its share, in float64.

    On the device of all of them, to the same bits on each: products are rounded before they are added, so
    that no processor's fused arithmetic makes a difference.
    """
    total = torch.zeros(weights.numel(), dtype=torch.float64, device=weights.device)
    for share, change in changes:
        row = change.reshape(-1)
        for part in pieces(row):
            total[part] += row[part].double().mul_(share)
    return total.view(weights.shape)


def _total(weights: Sequence[float], arrivals: Sequence[ArrivedUpdate]) -> float:
    total = sum(weights)
    if not total > 0:
        who = ", ".join(str(a.client) for a in arrivals[:8]) or "none"
        raise ThinwireError(f"the updates of clients {who} have no weight together; give each some samples")
    return total


def _one_of(name: str, value: str, known: Sequence[str]) -> None:
    require(value in known, InputError, f"{name}={value!r} is not one of {', '.join(known)}")


def _above_zero(name: str, value: float) -> None:
    require(value > 0, InputError, f"{name}={value} is not above 0")


def _not_negative(name: str, value: float) -> None:
    require(value >= 0, InputError, f"{name}={value} is below 0; give 0 or more")
