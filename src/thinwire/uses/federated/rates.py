"""The step size of local steps, by version: known in advance, as some methods need it."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.spec import Spec
from thinwire.types import InputError, require


@dataclass(frozen=True, repr=False)
class Decay(Spec):
    """Take ``first / (1 + decay * version)``; ``horizon`` is the last version that is planned for.

    >>> Decay(0.1, decay=0.5).at(2)
    0.05
    """

    first: float = 0.1
    decay: float = 0.0
    horizon: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.first > 0, InputError, f"first={self.first} is no step size; give one above 0")
        for name in ("decay", "horizon"):
            value = getattr(self, name)
            require(value >= 0, InputError, f"{name}={value} is below 0; give 0 or more")

    def at(self, version: int) -> float:
        """Return the step size of the local steps that start from ``version``."""
        return self.first / (1 + self.decay * version)

    @property
    def last(self) -> float:
        """The step size at the horizon."""
        return self.at(self.horizon)
