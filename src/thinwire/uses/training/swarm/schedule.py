"""The learning rate of a round: it comes with the version, so that no member's own clock counts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from thinwire.spec import Spec
from thinwire.types import InputError, require

SHAPES = ("constant", "linear", "cosine")


@dataclass(frozen=True, repr=False)
class RoundRates(Spec):
    """Rise to ``first`` over ``warmup`` rounds, then keep it, or fall to zero at the ``horizon``.

    >>> rates = RoundRates(1e-3, warmup=1, horizon=4, shape="linear")
    >>> [round(rates.at(v), 6) for v in range(5)]
    [0.0005, 0.001, 0.000667, 0.000333, 2e-05]
    """

    first: float
    warmup: int = 0
    horizon: int = 0
    shape: str = "constant"
    FLOOR = 0.02  # of the peak: a version asks for some step size above zero

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.first > 0, InputError, f"first={self.first} is no learning rate; give one above 0")
        require(self.warmup >= 0, InputError, f"warmup={self.warmup} is below 0; give a number of rounds")
        known = ", ".join(SHAPES)
        require(self.shape in SHAPES, InputError, f"shape={self.shape!r} is unknown; give one of {known}")

    def at(self, version: int) -> float:
        """Return the learning rate of the local steps that start from ``version``."""
        rise = min(1.0, (version + 1) / (self.warmup + 1))
        return self.first * rise * max(self.FLOOR, self._fall(version))

    def _fall(self, version: int) -> float:
        length = self.horizon - self.warmup
        if self.shape == "constant" or length <= 0:
            return 1.0
        done = min(1.0, max(0, version - self.warmup) / length)
        return 1 - done if self.shape == "linear" else (1 + math.cos(math.pi * done)) / 2

    @property
    def last(self) -> float:
        """The learning rate at the horizon."""
        return self.at(self.horizon)
