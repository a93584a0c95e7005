"""What a policy of replicas decides about, and what it chooses: one site and one choice a rank."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.choosing.difference_codes import Sides, dense_bits, factor_bits
from thinwire.choosing.policy import Policy
from thinwire.types import InputError, require

KEPT_BITS = 21.0  # a kept value of a sparse message: 8 of the value, 12 of its position, the chunk's scale
EXACT_BITS = 32.0


@dataclass(frozen=True)
class ReplicaChoice:
    """How a rank exchanges from now on, and why.

    A message is sparse where it has a ``ratio``, a dense code where it has ``bits``, factors of each matrix
    where it has a ``rank``, exact with none of these.
    ``staleness`` and ``local_steps`` are the same on all ranks. With ``local_steps`` 1 the gradient of each
    step travels, and is applied ``staleness`` steps late; with more, the difference of the parameters, and
    ``staleness`` counts the steps behind which the exchange hides.

    >>> ReplicaChoice(ratio=None, bits=1.2, staleness=0, local_steps=10, reason="").nbytes(4_470_272)
    603486
    """

    ratio: float | None  # the share of the values that is sent
    bits: float | None  # a value, as ``step_for`` takes them; real differences take fewer
    staleness: int
    local_steps: int
    reason: str
    predicted: float | None = None  # seconds a step; None while nothing was measured
    rank: int | None = None  # directions of each matrix

    def __post_init__(self) -> None:
        ratio, bits, rank = self.ratio, self.bits, self.rank
        one = [ratio, bits, rank].count(None) >= 2
        wrong = f"ratio={ratio}, bits={bits} and rank={rank} exclude each other; give one of them"
        require(one, InputError, wrong)
        wrong = f"ratio={ratio} is not above 0 and at most 1; give such a share"
        require(ratio is None or 0 < ratio <= 1, InputError, wrong)
        require(bits is None or bits > 0, InputError, f"bits={bits} is not above 0; give bits a value")
        late, steps = self.staleness, self.local_steps
        require(late >= 0, InputError, f"staleness={late} is below 0; give a number of steps")
        require(steps >= 1, InputError, f"local_steps={steps} is below 1; give a number of steps")

    def bits_per_value(self, values: int, sides: Sides | None = None) -> float:
        """Return the bits of a message for each of the ``values`` of a model with such matrices."""
        if self.ratio is not None:
            return self.ratio * KEPT_BITS
        if self.rank is not None and sides is not None:
            return factor_bits(self.rank, sides) / values
        return EXACT_BITS if self.bits is None else dense_bits(self.bits)

    @property
    def is_exact(self) -> bool:
        """Whether the values travel as they are, by a ring."""
        return self.ratio is None and self.bits is None and self.rank is None

    def nbytes(self, values: int, sides: Sides | None = None) -> int:
        """Return the bytes of a message that stands for ``values`` values."""
        return int(values * self.bits_per_value(values, sides) / 8)


@dataclass(frozen=True)
class ReplicaSite:
    """One rank: what it exchanges, and what was measured there. ``None``: not measured yet.

    ``last`` is the choice in use, so that a policy needs no memory of its own.
    """

    values: int  # of the model, as exchanged
    replicas: int
    compute: float = 0.0  # seconds a step; 0: not measured yet
    coding: float = 0.0  # seconds an exchange: of the last coded one
    rate: float | None = None  # bytes/s of the uplink
    delay: float | None = None  # seconds, one way
    last: ReplicaChoice | None = None
    step: int = 0  # steps done
    steps: int = 0  # steps of the run; 0: not known
    sides: Sides | None = None  # of its matrices, if it has any
    restarts: bool = False  # whether its TCP begins with a small window after each pause

    @property
    def is_measured(self) -> bool:
        """Whether compute and uplink are known."""
        return self.compute > 0 and bool(self.rate) and self.delay is not None

    def is_due(self, every: int) -> bool:
        """Say whether to choose anew: every so many steps, and once the first choice was measured."""
        last = self.last
        return last is None or last.predicted is None or self.step % every < last.local_steps


# Asked between two exchanges: it returns what is in use until it is time to change.
ReplicaPolicy = Policy[ReplicaSite, ReplicaChoice]
