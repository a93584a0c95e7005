"""FedLuck: local steps and a ratio for each device, chosen together from its speed and its link.

Source: arXiv 2407.05125, Euro-Par 2024, and the released code (Aegsteh-T/FedLuck_Euro_Par at 9e1edc2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from thinwire.codecs import Codec, Raw, TopK
from thinwire.rounds.client_profile import Assignment, ClientProfile, Situation
from thinwire.spec import Spec
from thinwire.types import InputError, require

Floats = NDArray[np.float64]
Numbers = TypeVar("Numbers", float, Floats)
HUNDREDTH = 0.01
FULL = 4.0  # bytes a value of a whole model: fp32


def phi(steps: Numbers, ratio: Numbers, seconds: Numbers, period: float, power: float = 0.5) -> Numbers:
    """Return what the released code makes least: [d^2 (2 - delta) + T^2] / (k sqrt(delta) T^2) [source].

    ``seconds`` is d, how long a turn takes, ``period`` T, how often the server aggregates; ``power`` is the
    root's. Where small ratios are best, d comes to 1.22 T: 0.816 T of steps and 0.408 T of upload [derived].
    The form in the appendix has 1 for T^2 and no root; it always picks ratio 1 [measured].

    >>> round(phi(3, 0.04, 3 * 0.4 + 0.04 * 17, period=1.5), 4)
    6.7981
    """
    late = seconds / period
    return (late * late * (2 - ratio) + 1) / (steps * ratio**power)


@dataclass(frozen=True, repr=False)
class FedLuck(Spec):
    """Give each device the steps and the ratio of least ``phi``, on the released code's grid.

    A turn counts as k a + delta b: a is the seconds of a step, b those of sending the whole model in fp32.
    So the download, the way there, and the bytes that say which values are sent are left out [source].
    The grid has ``least_steps`` to ``most_steps`` and each hundredth from ``least_ratio`` to ``most_ratio``;
    with a least that is the most, that part is fixed, as in the code's ablations.

    >>> device = ClientProfile(0, step_seconds=0.4, samples=300, up=4e6 / 17)
    >>> chosen = FedLuck(period=1.5).assign([device], Situation(values=10**6))[0]
    >>> chosen.steps, chosen.codec
    (3, TopK(ratio=0.04))
    """

    period: float = 1.5  # seconds; the code's for Fashion-MNIST
    least_steps: int = 2
    most_steps: int = 60
    least_ratio: float = HUNDREDTH
    most_ratio: float = 1.0
    values: Codec = Raw()  # noqa: RUF009 -- frozen

    def __post_init__(self) -> None:
        super().__post_init__()
        check_period(self.period)
        check_steps(self.least_steps, self.most_steps)
        least, most = self.least_ratio, self.most_ratio
        wrong = f"least_ratio={least} and most_ratio={most} leave no hundredth in (0, 1]; give such shares"
        require(0 < least <= most <= 1 and bool(self._ratios().size), InputError, wrong)
        TopK(most, self.values)  # says what is no codec

    def assign(self, devices: Sequence[ClientProfile], situation: Situation) -> Sequence[Assignment]:
        """Return steps and ratio for each device, by its own speed and uplink alone."""
        return _assigned(self, tuple(devices), situation.values)

    def _assignment(self, device: ClientProfile, values: int) -> Assignment:
        whole = FULL * values / device.up
        steps, ratio, seconds = self._best(device.step_seconds, whole)
        why = (
            f"{steps} steps of {device.step_seconds:.3g} s and top {ratio:g} of {whole:.3g} s "
            f"take {seconds:.3g} s of {self.period:g} s"
        )
        return Assignment(steps, TopK(ratio, self.values), why)

    def _best(self, step: float, whole: float) -> tuple[int, float, float]:
        """Return steps, ratio and seconds of the least phi; of equal ones the first, as in the code."""
        steps = np.arange(self.least_steps, self.most_steps + 1, dtype=np.float64)[:, None]
        ratios = self._ratios()[None, :]
        with np.errstate(over="ignore"):  # a link of no speed: the least ratio
            seconds = steps * step + ratios * whole
            scores = phi(steps, ratios, seconds, self.period)
        at, place = np.unravel_index(np.argmin(scores), scores.shape)
        return int(steps[at, 0]), float(ratios[0, place]), float(seconds[at, place])

    def _ratios(self) -> Floats:
        """Return the hundredths within the limits."""
        ratios = np.arange(1, 101) / 100
        return ratios[(ratios >= self.least_ratio - 1e-9) & (ratios <= self.most_ratio + 1e-9)]


@lru_cache(maxsize=8)
def _assigned(policy: FedLuck, devices: tuple[ClientProfile, ...], values: int) -> tuple[Assignment, ...]:
    """Choose anew for other devices alone, not at each version."""
    return tuple(policy._assignment(device, values) for device in devices)


def check_period(period: float) -> None:
    """Raise ``InputError`` unless ``period`` is above 0."""
    wrong = f"period={period} s is not above 0; give the seconds between two versions"
    require(period > 0, InputError, wrong)


def check_steps(least: int, most: int) -> None:
    """Raise ``InputError`` unless ``least`` and ``most`` bound a number of steps."""
    wrong = f"least_steps={least} and most_steps={most} are not 1 <= least <= most; give two such numbers"
    require(1 <= least <= most, InputError, wrong)
