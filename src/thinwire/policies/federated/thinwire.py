"""The policy behind ``thinwire``, ours: FedLuck's choice from what a turn truly costs, by data and step size.

Each part has a parameter that switches it off, so that each can be measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from thinwire.codecs import Codec, HardThreshold, TopK, Uniform
from thinwire.policies.federated.cost import (
    FRAMING,
    Floats,
    position_bits,
    turn_seconds,
    upload_bytes,
    value_bits,
    with_waiting,
)
from thinwire.policies.federated.dagc import EXPONENT
from thinwire.policies.federated.device import Assignment, Device, Situation
from thinwire.policies.federated.fedluck import FULL, check_period, check_steps, phi
from thinwire.policies.federated.gamma import check_rates, linear_scale
from thinwire.policies.federated.shares import data_shares, short
from thinwire.spec import Spec
from thinwire.types import InputError, require

FINENESS = 1.1  # of a ratio to the next on the grid
HALVINGS = 64


def at_equal_budget(ratios: Floats, weights: Floats, least: float, most: float) -> Floats:
    """Return ``ratios`` times ``weights``, scaled and kept within ``least`` and ``most``: the same sum.

    >>> at_equal_budget(np.array([0.1, 0.1, 0.1]), np.array([1.0, 1.0, 4.0]), 0.01, 1.0).round(3).tolist()
    [0.05, 0.05, 0.2]
    """
    wanted = ratios * weights
    low, high = np.log(least / wanted.max()), np.log(most / wanted.min())  # of the scale: all at a limit
    for _ in range(HALVINGS):
        scale = (low + high) / 2
        enough = np.clip(wanted * np.exp(scale), least, most).sum() >= ratios.sum()
        low, high = (low, scale) if enough else (scale, high)
    return np.clip(wanted * np.exp(high), least, most)


@dataclass(frozen=True, repr=False)
class Thinwire(Spec):
    """Give each device the steps and the ratio of least ``phi`` for the turn that they truly take.

    | part | parameter | off |
    |---|---|---|
    | bits a kept value: those of ``values``, and the entropy of positions | ``kept_bits`` | 32: as FedLuck |
    | the code of kept values | ``values`` | ``Raw()`` |
    | the download: ``down_ratio`` of the fp32 model a version | ``down_ratio`` | 0: free, 1: whole |
    | the ways there and back: ``trips`` times the delay | ``trips`` | 0 |
    | data: the ratio goes by p^``data_power`` at an equal sum of all ratios, as DAGC's | ``data_power`` | 0 |
    | step size: a threshold, from ``threshold`` at the first one on | ``threshold`` | 0: Top-k |

    Two percent a version is what low-bit deltas of a shared model took [measured, one seed]. Ratios lie on a
    grid from ``least_ratio`` on, each a tenth above the last at most; those by data lie between. Once data moved a
    ratio, steps are chosen again for it. ``ratio_power`` is that of the ratio in ``phi``: at .5, the
    released code's, the upload takes .41 periods where small ratios are best, at .25 it takes .18 [derived];
    error feedback makes a small ratio cost less than ``phi`` says.

    Steps and upload take at most ``most_periods``; where even the fewest last longer than one period, that
    many times the fewest. Without this, ``phi`` often picks a dense code and ten periods of staleness, since
    a kept value costs ever fewer bits the more are kept.

    With a threshold, that of a device is ``threshold`` gamma_t/gamma_0 (mean ratio / its ratio)^(2/3): the
    linear rule, and DAGC's delta ~ lambda^(-3/2) [quoted] to turn ratios into thresholds [derived].

    >>> device = Device(0, step_seconds=0.1, samples=300, up=5e3, down=20e3, delay=0.05)
    >>> chosen = Thinwire(period=1.5).assign([device], Situation(values=46_730))[0]
    >>> chosen.steps, chosen.codec
    (10, TopK(ratio=0.03345, values=Uniform()))
    """

    period: float = 1.5  # seconds between two versions
    values: Codec = Uniform(bits=4)  # noqa: RUF009 -- frozen
    kept_bits: float = 0.0
    down_ratio: float = 0.02
    trips: int = 2
    data_power: float = EXPONENT
    threshold: float = 0.0
    ratio_power: float = 0.5
    least_steps: int = 1
    most_steps: int = 60
    least_ratio: float = 0.001
    most_ratio: float = 1.0
    most_periods: float = 2.0
    waits: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_period(self.period)
        check_steps(self.least_steps, self.most_steps)
        least, most = self.least_ratio, self.most_ratio
        wrong = f"least_ratio={least} and most_ratio={most} are not 0 < least <= most <= 1; give two shares"
        require(0 < least <= most <= 1, InputError, wrong)
        for name in ("kept_bits", "down_ratio", "trips", "data_power", "threshold"):
            value = getattr(self, name)
            require(value >= 0, InputError, f"{name}={value} is below 0; give a number from 0 up, 0 for off")
        require(self.ratio_power > 0, InputError, f"ratio_power={self.ratio_power} is not above 0; give .5")
        wrong = f"most_periods={self.most_periods} is below 1; give the periods that a turn may take"
        require(self.most_periods >= 1, InputError, wrong)
        TopK(most, self.values)  # says what is no codec

    def assign(self, devices: Sequence[Device], situation: Situation) -> Sequence[Assignment]:
        """Return steps and codec for each device; ratios and steps of all are weighed together."""
        if not devices:
            return []
        shares = np.array(data_shares(devices))
        grid = self._grid()
        ratios = np.array([grid[self._best(device, grid, situation)[1]] for device in devices])
        if self.data_power:
            weights = shares**self.data_power
            ratios = at_equal_budget(ratios, weights, self.least_ratio, self.most_ratio)
        chosen = [short(ratio) for ratio in ratios]
        codecs = self._codecs(chosen, situation)
        both = zip(devices, chosen, codecs, shares, strict=True)
        return [self._assignment(d, r, codec, share, situation) for d, r, codec, share in both]

    def _assignment(
        self, device: Device, ratio: float, codec: Codec, share: float, situation: Situation
    ) -> Assignment:
        ratios = np.array([ratio])
        steps = self.least_steps + self._best(device, ratios, situation)[0]
        turn = float(self._seconds(device, np.array([[float(steps)]]), ratios, situation)[1][0, 0])
        nbytes = float(self._upload(ratios, situation)[0])
        why = (
            f"{steps} steps of {device.step_seconds:.3g} s and {nbytes:.0f} bytes at {device.up:.3g} "
            f"bytes/s, top {ratio:.3g} for {100 * share:.3g} % of the data: {turn:.3g} s of {self.period:g} s"
        )
        return Assignment(steps, codec, why)

    def _codecs(self, ratios: Sequence[float], situation: Situation) -> list[Codec]:
        if not self.threshold:
            return [TopK(ratio, self.values) for ratio in ratios]
        check_rates(situation)
        now = self.threshold * linear_scale(1.0, situation.rate, situation.first_rate, situation.last_rate)
        mean = sum(ratios) / len(ratios)
        return [HardThreshold(short(now * (mean / ratio) ** (2 / 3)), self.values) for ratio in ratios]

    def _best(self, device: Device, ratios: Floats, situation: Situation) -> tuple[int, int]:
        """Return where on the grid of steps and on ``ratios`` the least phi is."""
        steps = np.arange(self.least_steps, self.most_steps + 1, dtype=np.float64)[:, None]
        with np.errstate(over="ignore"):  # a link of no speed: the least ratio
            busy, turns = self._seconds(device, steps, ratios, situation)
            turns = with_waiting(turns, self.period) if self.waits else turns
            scores = phi(steps, ratios[None, :], turns, self.period, self.ratio_power)
            scores[turns > self.most_periods * max(self.period, turns.min())] = np.inf
        at, place = np.unravel_index(np.argmin(scores), scores.shape)
        return int(at), int(place)

    def _seconds(
        self, device: Device, steps: Floats, ratios: Floats, situation: Situation
    ) -> tuple[Floats, Floats]:
        """Return the seconds of steps and upload, and those of a whole turn, [steps, ratios] each."""
        whole = FULL * situation.values
        version = self.down_ratio * whole + FRAMING if self.down_ratio else 0.0
        busy = steps * device.step_seconds + (self._upload(ratios, situation) / device.up)[None, :]
        away = busy + self.trips * device.delay
        return busy, turn_seconds(away, version / device.down, whole / device.down, self.period)

    def _upload(self, ratios: Floats, situation: Situation) -> Floats:
        bits = self.kept_bits or value_bits(self.values) + position_bits(ratios)
        return upload_bytes(ratios, situation.values, bits)

    def _grid(self) -> Floats:
        count = math.ceil(math.log(self.most_ratio / self.least_ratio) / math.log(FINENESS))
        return np.geomspace(self.least_ratio, self.most_ratio, count + 1)
