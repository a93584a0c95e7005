"""gamma-FedHT: a hard threshold that follows the step size of local steps.

Source: arXiv 2505.12479, INFOCOM 2025; Algorithm 1 was read as a picture on its authors' page [quoted].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from thinwire.codecs import Codec, HardThreshold, Raw
from thinwire.rounds.client_profile import Assignment, ClientProfile, Situation, short
from thinwire.spec import Spec
from thinwire.types import InputError, require


def paper_scale(alpha: float, rate: float, first: float, last: float) -> float:
    """Return what Algorithm 1 multiplies lambda_0 with at step size ``rate``, at most 1/sqrt(2).

    With x = (rate / sqrt(first last))^alpha it is sqrt(x / (1 + x^2)), which is the published
    sqrt(g^a (g0 gT)^(a/2) / (g^(2a) + (g0 gT)^a)) with numerator and denominator over (g0 gT)^a [derived].
    So it rises until the step size is sqrt(first last), then falls to the value it began with [derived].

    >>> [round(paper_scale(2.0, rate, first=0.4, last=0.1), 3) for rate in (0.4, 0.2, 0.1)]
    [0.485, 0.707, 0.485]
    """
    away = abs(alpha * (math.log(rate) - (math.log(first) + math.log(last)) / 2))  # |ln x|
    return math.exp(-away / 2) / math.sqrt(1 + math.exp(-2 * away))


def linear_scale(alpha: float, rate: float, first: float, last: float) -> float:
    """Return the step size over the first one: our rule, not the paper's. The density stays flat [derived].

    What is not sent is below the threshold, so residuals stay within the step size's order. Neither
    ``alpha`` nor ``last`` counts.

    >>> linear_scale(2.0, rate=0.1, first=0.4, last=0.1)
    0.25
    """
    return rate / first


RULES: Mapping[str, Callable[[float, float, float, float], float]] = MappingProxyType(
    {"paper": paper_scale, "linear": linear_scale}
)


@dataclass(frozen=True, repr=False)
class GammaFedHT(Spec):
    """Send what reaches a threshold that follows the step size; the same for all devices.

    ``threshold`` is lambda_0; ``values`` codes what is sent; use it with error feedback. The paper's values
    of lambda_0 and alpha are not known to us. ``alpha=2`` is the least that keeps the threshold within the
    step size's order as that goes to 0 [derived]. The rule of the paper needs the last step size ahead:
    that of the situation, or ``last_rate`` where that is given. Errors: ``InputError`` where neither is.

    >>> situation = Situation(values=1000, rate=0.1, first_rate=0.4, last_rate=0.1)
    >>> policy = GammaFedHT(threshold=0.01, rule="linear")
    >>> policy.assign([ClientProfile(0, 0.1, samples=300)], situation)[0].codec
    HardThreshold(threshold=0.0025)
    """

    threshold: float
    alpha: float = 2.0
    rule: str = "paper"
    steps: int = 5
    values: Codec = Raw()  # noqa: RUF009 -- frozen
    last_rate: float = 0.0  # gamma_T; 0: as planned

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = f"threshold={self.threshold} is not above 0; give the magnitude from which values are sent"
        require(self.threshold > 0, InputError, wrong)
        require(self.alpha > 0, InputError, f"alpha={self.alpha} is not above 0; give the rule's exponent")
        known = " or ".join(RULES)
        require(self.rule in RULES, InputError, f"rule={self.rule!r} is no rule of a threshold; give {known}")
        require(self.steps >= 1, InputError, f"steps={self.steps} is below 1; give a number of local steps")
        wrong = f"last_rate={self.last_rate} is below 0; give the last step size, or 0 for the planned one"
        require(self.last_rate >= 0, InputError, wrong)
        HardThreshold(self.threshold, self.values)  # says what is no codec

    def assign(self, devices: Sequence[ClientProfile], situation: Situation) -> Sequence[Assignment]:
        """Return the same assignment for each device: the threshold of this moment."""
        scale = self._scale(situation)
        codec = HardThreshold(short(self.threshold * scale), self.values)
        why = f"threshold {codec.threshold:g}: {scale:.3g} of the first, at step size {situation.rate:.3g}"
        return [Assignment(self.steps, codec, why)] * len(devices)

    def _scale(self, situation: Situation) -> float:
        last = self.last_rate or situation.last_rate
        if self.rule == "paper":
            wrong = f"a run without a planned end has no last step size, got {last}; give last_rate"
            require(0 < last < math.inf, InputError, wrong)
        check_rates(situation)
        return RULES[self.rule](self.alpha, situation.rate, situation.first_rate, last)


def check_rates(situation: Situation) -> None:
    """Raise ``InputError`` unless the step sizes of now and of the start are above 0."""
    for name in ("rate", "first_rate"):
        rate = getattr(situation, name)
        require(0 < rate < math.inf, InputError, f"{name}={rate} is no step size; give one above 0")
