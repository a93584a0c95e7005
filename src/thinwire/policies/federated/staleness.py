"""Discounts: how much an update still counts that started some versions ago."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from thinwire.spec import Spec
from thinwire.types import InputError, require


@runtime_checkable
class Discount(Protocol):
    """A map from staleness, in versions, to a weight; it never rises."""

    def weight(self, staleness: int) -> float:
        """Return the weight of an update that started ``staleness`` versions ago."""
        ...


@dataclass(frozen=True, repr=False)
class Polynomial(Spec):
    """Weigh by ``scale`` (s + 1)^-``exponent``.

    FedAsync's alpha (s + 1)^-a (Xie et al. 2019, arXiv 1903.03934) [memory; the same in the framework Plato,
    second-hand]. The paper's alpha and a: .6 and .5 [memory]. With ``exponent=0`` nothing is discounted.

    >>> Polynomial(exponent=0.5, scale=0.6).weight(3)
    0.3
    """

    exponent: float = 0.5
    scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = f"exponent={self.exponent} is below 0; give one from 0 up, 0 for no discount"
        require(self.exponent >= 0, InputError, wrong)
        _check_scale(self.scale)

    def weight(self, staleness: int) -> float:
        """Return the weight of an update that started ``staleness`` versions ago."""
        return self.scale * (_checked(staleness) + 1.0) ** -self.exponent


@dataclass(frozen=True, repr=False)
class Hinge(Spec):
    """Weigh by ``scale`` up to staleness ``free``, then by ``scale`` / (``slope`` (s - ``free``) + 1).

    FedAsync's second rule, a = ``slope``, b = ``free`` (Xie et al. 2019, section 5.2) [second-hand: the
    framework Plato]. The paper's a and b: 10 and 4 [memory].

    >>> [round(Hinge().weight(s), 3) for s in (0, 4, 5)]
    [1.0, 1.0, 0.091]
    """

    slope: float = 10.0
    free: int = 4  # versions
    scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.slope >= 0, InputError, f"slope={self.slope} is below 0; give one from 0 up")
        require(self.free >= 0, InputError, f"free={self.free} is below 0; give a number of versions")
        _check_scale(self.scale)

    def weight(self, staleness: int) -> float:
        """Return the weight of an update that started ``staleness`` versions ago."""
        return self.scale / (self.slope * max(0, _checked(staleness) - self.free) + 1)


def _check_scale(scale: float) -> None:
    require(0 < scale <= 1, InputError, f"scale={scale} is not above 0 and at most 1; give such a weight")


def _checked(staleness: int) -> int:
    wrong = f"a staleness of {staleness} versions is below 0; give the versions since an update started"
    require(staleness >= 0, InputError, wrong)
    return staleness


FEDBUFF = Polynomial(exponent=0.5)  # 1/sqrt(1 + s): Nguyen et al. 2022, arXiv 2106.06639 [memory]
UNDISCOUNTED = Polynomial(exponent=0.0)
