"""ACCORDION: two ratios, and which one holds follows how fast the norm of updates changes.

Source: Agarwal et al., MLSys 2021 (arXiv 2010.16248); its code (uw-mad-dash/Accordion, auto_scale_topk.py),
and DAGC's code, which has it as a baseline (Jiang-Yutong/DAGC, SyncClient.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.codecs import Codec, Raw, TopK
from thinwire.rounds.client_profile import Assignment, ClientProfile, Situation
from thinwire.spec import Spec
from thinwire.types import InputError, require


def relative_change(norms: Sequence[float], version: int, every: int) -> float:
    """Return by what share the norm changed between the last two checks; infinite if that is not known.

    ``norms`` end with that of ``version``; checks are at multiples of ``every``. A norm of 0 or one that is
    not finite counts as unknown, as a 0 does in the released code.

    >>> relative_change((4.0, 9.0, 2.0, 8.0), version=7, every=2)
    0.5
    """
    newest = len(norms) - 1 - version % every
    if newest < every:
        return math.inf
    before, now = norms[newest - every], norms[newest]
    return abs(now - before) / before if 0 < before < math.inf and math.isfinite(now) else math.inf


@dataclass(frozen=True, repr=False)
class Accordion(Spec):
    """Give all devices ``high`` while the norm of updates changes much, else ``low``.

    Much: by ``eta`` or more since the last check; at the first check, ``high``. Both codes have eta = .5
    [source], and DAGC's has ratios .01 and .1 [source]. ACCORDION checks every 10 epochs, layer by layer,
    DAGC's code every round, whole updates of each client [source]; here the whole aggregated update is
    checked every ``every`` versions, since the server knows it without asking. ACCORDION's second rule,
    ``high`` at once where the step size drops by its schedule [source], is left out, as in DAGC's code: with
    a step size that shrinks at each version it would always hold.

    >>> situation = Situation(values=1000, version=2, norms=(4.0, 2.1))
    >>> Accordion(low=0.01, high=0.1).assign([ClientProfile(0, 0.1, samples=300)], situation)[0].codec
    TopK(ratio=0.01)
    """

    low: float = 0.01
    high: float = 0.1
    eta: float = 0.5
    every: int = 1  # versions
    steps: int = 10
    values: Codec = Raw()  # noqa: RUF009 -- frozen

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = f"low={self.low} and high={self.high} are not 0 < low <= high <= 1; give two such shares"
        require(0 < self.low <= self.high <= 1, InputError, wrong)
        require(self.eta > 0, InputError, f"eta={self.eta} is not above 0; give a relative change")
        for name in ("every", "steps"):
            value = getattr(self, name)
            require(value >= 1, InputError, f"{name}={value} is below 1; give a whole number from 1 up")
        TopK(self.low, self.values)  # says what is no codec

    def assign(self, devices: Sequence[ClientProfile], situation: Situation) -> Sequence[Assignment]:
        """Return the same assignment for each device: one of the two ratios."""
        change = relative_change(situation.norms, situation.version, self.every)
        ratio = self.low if change < self.eta else self.high
        known = "is not known yet" if change == math.inf else f"changed by {100 * change:.3g} %"
        why = f"the norm of updates {known}: top {ratio:g}"
        return [Assignment(self.steps, TopK(ratio, self.values), why)] * len(devices)
