"""DAGC: whoever has more of the data sends more of its update, at the same traffic of all.

Sources: Lu et al., INFOCOM 2023 and TMC 2024 (arXiv 2311.07324), and the released code
(Jiang-Yutong/DAGC at 3599e07). Theorems are counted as in TMC.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.codecs import Codec, HardThreshold, Raw, TopK
from thinwire.rounds.client_profile import (
    Assignment,
    ClientProfile,
    Situation,
    data_shares,
    short,
)
from thinwire.spec import Spec
from thinwire.types import InputError, require

EXPONENT = 2 / 3  # of the share of the data


def key_factor(shares: Sequence[float], ratios: Sequence[float]) -> float:
    """Return Phi = sum_i p_i / sqrt(delta_i) / sqrt(delta_min), by which ratios slow training [quoted].

    >>> key_factor([0.5, 0.5], [0.25, 0.25])
    4.0
    """
    slowed = sum(p / math.sqrt(d) for p, d in zip(shares, ratios, strict=True))
    return slowed / math.sqrt(min(ratios))


def relative_ratios(shares: Sequence[float], mean_ratio: float, power: float = EXPONENT) -> list[float]:
    """Return each device's ratio by Theorem 4: of n candidates the one of least ``key_factor``, in O(n).

    Candidate j lets device j hold the least ratio; all others go by p^(2/3), and the smallest of them is
    tied with j [quoted]. The sum is n times ``mean_ratio``. Nothing is clipped at 1. Another ``power`` than
    2/3 is ours, to measure whether that is the best.

    Two artefacts of the closed form are kept as published. The chosen j may have more data than others and
    yet the least ratio: with shares spread evenly in the logarithm it lies in the middle, and of three
    devices with 82, 9 and 9 % of the data it is the first, so all get the same. And only two are tied, which
    leaves the least ratio small: by ``key_factor`` itself equal ratios are better, 1000 against 1145 for the
    shares below and a mean of .001, and in all cases that we tried [derived].

    >>> [round(d, 4) for d in relative_ratios([0.5, 0.2, 0.15, 0.1, 0.05], 0.05)]
    [0.0935, 0.0507, 0.0419, 0.032, 0.032]
    >>> relative_ratios([0.5, 0.3, 0.2], 0.25, power=0.0)
    [0.25, 0.25, 0.25]
    """
    n = len(shares)
    if n < 2:
        return [mean_ratio] * n
    parts = [p**power for p in shares]
    last = min(reversed(range(n)), key=shares.__getitem__)
    smallest, second = heapq.nsmallest(2, shares)
    rest = sum(parts)

    def candidate(j: int) -> tuple[float, float]:
        """Return phi_j and Q_j + 1."""
        tied = second if j == last else smallest
        q = (rest - parts[j]) / tied**power
        return (1 + q) * (shares[j] + tied * q), 1 + q

    least = min(reversed(range(n)), key=candidate)  # of equal shares the last, as in the released code
    base = n * mean_ratio / candidate(least)[1]
    tied = second if least == last else smallest
    return [base if i == least else base * parts[i] / tied**power for i in range(n)]


def absolute_thresholds(shares: Sequence[float], mean_threshold: float) -> list[float]:
    """Return each device's threshold by Theorem 8: lambda_i = lbar (P / n) p_i^(-2/3), P the sum of p^(2/3).

    The sum of 1/lambda_i is n / lbar; under it, these have the least sum_i p_i^2 lambda_i^2 [derived].

    >>> [round(t, 4) for t in absolute_thresholds([0.5, 0.5], 0.01)]
    [0.01, 0.01]
    """
    parts = [p**EXPONENT for p in shares]
    return [mean_threshold * sum(parts) / len(parts) / part for part in parts]


@dataclass(frozen=True, repr=False)
class DagcR(Spec):
    """Give each device the ratio of Theorem 4, ``mean_ratio`` on average. Above 1, all values are sent.

    >>> devices = [ClientProfile(i, 0.1, samples=n) for i, n in enumerate((500, 200, 150, 100, 50))]
    >>> [a.codec.ratio for a in DagcR(0.05).assign(devices, Situation(values=1000))]
    [0.09346, 0.05074, 0.04188, 0.03196, 0.03196]
    """

    mean_ratio: float = 0.01
    steps: int = 10  # of the released code; the theory has 1
    values: Codec = Raw()  # noqa: RUF009 -- frozen
    power: float = EXPONENT

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = f"mean_ratio={self.mean_ratio} is not above 0 and at most 1; give such a share"
        require(0 < self.mean_ratio <= 1, InputError, wrong)
        require(self.steps >= 1, InputError, f"steps={self.steps} is below 1; give a number of local steps")
        TopK(self.mean_ratio, self.values)  # says what is no codec

    def assign(self, devices: Sequence[ClientProfile], situation: Situation) -> Sequence[Assignment]:
        """Return a ratio for each device by its share of the data."""
        shares = data_shares(devices)
        ratios = [short(min(1.0, r)) for r in relative_ratios(shares, self.mean_ratio, self.power)]
        return [
            Assignment(self.steps, TopK(ratio, self.values), _why(p, f"top {ratio:.3g}", self.mean_ratio))
            for p, ratio in zip(shares, ratios, strict=True)
        ]


@dataclass(frozen=True, repr=False)
class DagcA(Spec):
    """Give each device the threshold of Theorem 8, ``mean_threshold`` (lbar) as harmonic mean.

    >>> devices = [ClientProfile(i, 0.1, samples=n) for i, n in enumerate((800, 100))]
    >>> [a.codec.threshold for a in DagcA(0.01).assign(devices, Situation(values=1000))]
    [0.00625, 0.025]
    """

    mean_threshold: float = 0.005
    steps: int = 10
    values: Codec = Raw()  # noqa: RUF009 -- frozen

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = f"mean_threshold={self.mean_threshold} is not above 0; give the magnitude that is sent"
        require(self.mean_threshold > 0, InputError, wrong)
        require(self.steps >= 1, InputError, f"steps={self.steps} is below 1; give a number of local steps")
        HardThreshold(self.mean_threshold, self.values)  # says what is no codec

    def assign(self, devices: Sequence[ClientProfile], situation: Situation) -> Sequence[Assignment]:
        """Return a threshold for each device by its share of the data."""
        shares = data_shares(devices)
        levels = [short(t) for t in absolute_thresholds(shares, self.mean_threshold)]
        mean = self.mean_threshold
        return [
            Assignment(self.steps, HardThreshold(t, self.values), _why(p, f"threshold {t:.3g}", mean))
            for p, t in zip(shares, levels, strict=True)
        ]


def _why(share: float, chosen: str, mean: float) -> str:
    return f"{100 * share:.3g} % of the data: {chosen}, {mean:g} on average"
