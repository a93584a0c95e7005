"""The policy behind ``thinwire``, ours: FedLuck's choice from what a turn truly costs, by data and step size.

Costs are bits a kept value, both directions, ways there and back, and waiting. Each part has a parameter that
switches it off, so that each can be measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from thinwire.codecs import Codec, HardThreshold, TopK, Uniform
from thinwire.rounds.client_profile import (
    Assignment,
    ClientProfile,
    Situation,
    data_shares,
    short,
)
from thinwire.spec import Spec
from thinwire.types import InputError, TensorSpec, require
from thinwire.uses.federated.choosing.dagc import EXPONENT
from thinwire.uses.federated.choosing.fedluck import FULL, Floats, check_period, check_steps, phi
from thinwire.uses.federated.choosing.gamma import check_rates, linear_scale

FINENESS = 1.1  # of a ratio to the next on the grid
HALVINGS = 64
FRAMING = 110.0  # bytes of a message beside its values, about: 95 to 118 [measured]
MARGIN = 0.05  # of a turn that is kept free, so that a version is not just missed
_SAMPLE = TensorSpec((4096,))  # of values, to count a codec's bits


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
    | an update counts only at the end of a period, so a turn lasts whole periods | ``waits`` | False |
    | what a ratio is worth: its power in ``phi`` | ``ratio_power`` | .5: the released code's |
    | data: the ratio goes by p^``data_power`` at an equal sum of all ratios, as DAGC's | ``data_power`` | 0 |
    | data: at least so many samples for each local step of a turn | ``samples_a_step`` | 0 |
    | step size: a threshold, from ``threshold`` at the first one on | ``threshold`` | 0: Top-k |

    Two percent a version is what low-bit deltas of a shared model took [measured, one seed]. Ratios lie on a
    grid from ``least_ratio`` on, each a tenth above the last at most; those by data lie between. Once data
    moved a ratio, steps are chosen again for it.

    A turn takes at most ``most_periods``; where even the quickest takes longer than one, that many times the
    quickest. Without this, ``phi`` often picks a dense code and ten periods of staleness, since a kept value
    costs ever fewer bits the more are kept [derived]. ``ratio_power`` is low because error feedback makes a
    small ratio cost less than ``phi`` says: at .1, ten devices uploaded .29 and .46 of the bytes that they
    did at .5, to 76 % on Fashion-MNIST, in .8 and 1.27 of the time [measured, two seeds].

    Bytes have no part in ``phi``; two parameters save them. A longer ``period`` has fewer versions to
    download: 6 s instead of 1.5 s took .8 and .63 of the time and .24 and .19 of all bytes, together with
    ``most_ratio``, which keeps a device whose steps are at their most from filling its time with upload
    [measured, two seeds, the download simulated as exact].

    With a threshold, that of a device is ``threshold`` gamma_t/gamma_0 (mean ratio / its ratio)^(2/3): the
    linear rule, and DAGC's delta ~ lambda^(-3/2) [quoted] to turn ratios into thresholds [derived].

    >>> device = ClientProfile(0, step_seconds=0.1, samples=300, up=5e3, down=20e3, delay=0.05)
    >>> chosen = Thinwire().assign([device], Situation(values=46_730))[0]
    >>> chosen.steps, chosen.codec
    (50, TopK(ratio=0.03, values=Uniform()))
    """

    period: float = 6.0  # seconds between two versions
    values: Codec = Uniform(bits=4)  # noqa: RUF009 -- frozen
    kept_bits: float = 0.0
    down_ratio: float = 0.02
    trips: int = 2
    waits: bool = True
    ratio_power: float = 0.1
    data_power: float = EXPONENT
    samples_a_step: float = 5.0
    threshold: float = 0.0
    least_steps: int = 1
    most_steps: int = 100
    least_ratio: float = 0.001
    most_ratio: float = 0.03
    most_periods: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_period(self.period)
        check_steps(self.least_steps, self.most_steps)
        least, most = self.least_ratio, self.most_ratio
        wrong = f"least_ratio={least} and most_ratio={most} are not 0 < least <= most <= 1; give two shares"
        require(0 < least <= most <= 1, InputError, wrong)
        for name in ("kept_bits", "down_ratio", "trips", "data_power", "samples_a_step", "threshold"):
            value = getattr(self, name)
            require(value >= 0, InputError, f"{name}={value} is below 0; give a number from 0 up, 0 for off")
        require(self.ratio_power > 0, InputError, f"ratio_power={self.ratio_power} is not above 0; give .5")
        wrong = f"most_periods={self.most_periods} is below 1; give the periods that a turn may take"
        require(self.most_periods >= 1, InputError, wrong)
        TopK(most, self.values)  # says what is no codec

    def assign(self, devices: Sequence[ClientProfile], situation: Situation) -> Sequence[Assignment]:
        """Return steps and codec for each device; the ratios of all are weighed together."""
        if self.threshold:
            return self._assigned(devices, situation)
        return _assigned(self, tuple(devices), situation.values)

    def _assigned(self, devices: Sequence[ClientProfile], situation: Situation) -> Sequence[Assignment]:
        if not devices:
            return []
        shares, cost = data_shares(devices), self._cost(situation)
        grid = self._grid()
        free = np.array([self._best(device, grid, cost)[1] for device in devices])
        weights = np.array(shares) ** self.data_power
        moved = at_equal_budget(free, weights, self.least_ratio, self.most_ratio) if self.data_power else free
        ratios = [short(ratio) for ratio in moved]
        codecs = self._codecs(ratios, situation)
        chosen = zip(devices, ratios, codecs, shares, strict=True)
        return [self._assignment(d, ratio, codec, share, cost) for d, ratio, codec, share in chosen]

    def _cost(self, situation: Situation) -> TurnCost:
        return TurnCost(
            situation.values, self.kept_bits, self.values, self.down_ratio, self.trips, self.period
        )

    def _grid(self) -> Floats:
        count = math.ceil(math.log(self.most_ratio / self.least_ratio) / math.log(FINENESS))
        return np.geomspace(self.least_ratio, self.most_ratio, count + 1)

    def _most(self, device: ClientProfile) -> int:
        """Return the most steps for a device's data: many passes over few samples lead away from others."""
        fit = int(device.samples / self.samples_a_step) if self.samples_a_step else self.most_steps
        return max(self.least_steps, min(self.most_steps, fit))

    def _best(self, device: ClientProfile, ratios: Floats, cost: TurnCost) -> tuple[int, float]:
        """Return the steps and the one of ``ratios`` of least phi."""
        steps = np.arange(self.least_steps, self._most(device) + 1, dtype=np.float64)
        with np.errstate(over="ignore"):  # a link of no speed: the least of both
            turns = cost.seconds(device, steps, ratios)
            turns = with_waiting(turns, self.period) if self.waits else turns
            scores = phi(steps[:, None], ratios[None, :], turns, self.period, self.ratio_power)
            scores[turns > self.most_periods * max(self.period, turns.min())] = np.inf
        at, place = np.unravel_index(np.argmin(scores), scores.shape)
        return int(steps[at]), float(ratios[place])

    def _codecs(self, ratios: Sequence[float], situation: Situation) -> list[Codec]:
        if not self.threshold:
            return [TopK(ratio, self.values) for ratio in ratios]
        check_rates(situation)
        now = self.threshold * linear_scale(1.0, situation.rate, situation.first_rate, situation.last_rate)
        mean = sum(ratios) / len(ratios)
        return [HardThreshold(short(now * (mean / ratio) ** (2 / 3)), self.values) for ratio in ratios]

    def _assignment(
        self, device: ClientProfile, ratio: float, codec: Codec, share: float, cost: TurnCost
    ) -> Assignment:
        one = np.array([ratio])
        steps = self._best(device, one, cost)[0]
        turn = float(cost.seconds(device, np.array([float(steps)]), one)[0, 0])
        why = (
            f"{steps} steps of {device.step_seconds:.3g} s and {float(cost.upload(one)[0]):.0f} bytes at "
            f"{device.up:.3g} bytes/s, top {ratio:.3g} for {100 * share:.3g} % of the data: "
            f"{turn:.3g} s of {self.period:g} s"
        )
        return Assignment(steps, codec, why)


@lru_cache(maxsize=8)
def _assigned(policy: Thinwire, devices: tuple[ClientProfile, ...], values: int) -> tuple[Assignment, ...]:
    """Choose anew for other devices alone, not at each version: a thousand take a quarter of a second."""
    return tuple(policy._assigned(devices, Situation(values)))


def position_bits(ratio: Floats) -> Floats:
    """Return the bits that say which values are kept, a kept value: H(d)/d for a share d [derived].

    This is the entropy of a mask whose bits are independent; coded gaps take somewhat more.

    >>> position_bits(np.array([0.01, 0.5, 1.0])).round(2).tolist()
    [8.08, 2.0, 0.0]
    """
    rest = 1 - ratio
    gone = rest * np.log2(np.maximum(rest, np.finfo(np.float64).tiny))
    return -np.log2(ratio) - gone / ratio


def value_bits(values: Codec) -> float:
    """Return the bits that ``values`` takes a value, its scales included.

    >>> from thinwire.codecs import Uniform
    >>> value_bits(Uniform(bits=4))
    4.5
    """
    return 8 * values.nbytes(_SAMPLE) / _SAMPLE.numel


def turn_seconds(busy: Floats, version: float, whole: float, period: float) -> Floats:
    """Return the seconds of a turn: ``busy`` with steps, upload and ways, the rest with the download.

    A new version comes each ``period`` seconds, and its message takes ``version`` seconds to download. A
    turn that lasts several periods downloads as many messages, or the model in ``whole`` seconds where that
    is less. So t = busy + min(whole, version max(1, t / period)), solved for t [derived].

    >>> turn_seconds(np.array([1.0, 4.0, 40.0]), version=0.5, whole=10.0, period=2.0).round(2).tolist()
    [1.5, 5.33, 50.0]
    """
    many = busy / (1 - version / period) if version < period else np.full_like(busy, math.inf)
    return np.minimum(np.maximum(busy + version, many), busy + whole)


def with_waiting(turn: Floats, period: float) -> Floats:
    """Return the seconds of a turn and of the wait behind it: whole periods, a twentieth of the turn free.

    What arrives during a period counts at its end, so a turn just longer than a period costs two.

    >>> with_waiting(np.array([0.1, 1.8, 2.0]), period=2.0).tolist()
    [2.0, 2.0, 4.0]
    """
    return np.ceil(turn * (1 + MARGIN) / period) * period


@dataclass(frozen=True)
class TurnCost:
    """The bytes and the seconds of turns, for one model and one way to send it.

    >>> from thinwire.codecs import Uniform
    >>> cost = TurnCost(values=50_000, bits=0, kept=Uniform(bits=4), down_ratio=0.02, trips=2, period=1.5)
    >>> cost.upload(np.array([0.01])).round().tolist()
    [896.0]
    """

    values: int  # of the model
    bits: float  # a kept value; 0: those of ``kept``, and the entropy of positions
    kept: Codec
    down_ratio: float  # of the model in fp32 a version; 0: the download is free
    trips: int  # how often a turn goes one way
    period: float  # seconds between two versions

    def upload(self, ratio: Floats) -> Floats:
        """Return the bytes of an update that keeps ``ratio`` of all values."""
        bits = self.bits or value_bits(self.kept) + position_bits(ratio)
        return FRAMING + ratio * self.values * bits / 8

    def seconds(self, device: ClientProfile, steps: Floats, ratio: Floats) -> Floats:
        """Return the seconds of a turn of ``device``, by each of ``steps`` and each ``ratio``: a grid."""
        whole = FULL * self.values
        version = self.down_ratio * whole + FRAMING if self.down_ratio else 0.0
        busy = steps[:, None] * device.step_seconds + (self.upload(ratio) / device.up)[None, :]
        busy += self.trips * device.delay
        return turn_seconds(busy, version / device.down, whole / device.down, self.period)
