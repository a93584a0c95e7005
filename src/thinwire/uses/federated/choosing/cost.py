"""What a turn of a device truly costs: bits a kept value, both directions, ways there and back, waiting."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thinwire.codecs import Codec
from thinwire.types import TensorSpec
from thinwire.uses.federated.choosing.device import Device

Floats = NDArray[np.float64]
FULL = 4.0  # bytes a value of a whole model: fp32
FRAMING = 110.0  # bytes of a message beside its values, about: 95 to 118 [measured]
MARGIN = 0.05  # of a turn that is kept free, so that a version is not just missed
_SAMPLE = TensorSpec((4096,))  # of values, to count a codec's bits


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

    def seconds(self, device: Device, steps: Floats, ratio: Floats) -> Floats:
        """Return the seconds of a turn of ``device``, by each of ``steps`` and each ``ratio``: a grid."""
        whole = FULL * self.values
        version = self.down_ratio * whole + FRAMING if self.down_ratio else 0.0
        busy = steps[:, None] * device.step_seconds + (self.upload(ratio) / device.up)[None, :]
        busy += self.trips * device.delay
        return turn_seconds(busy, version / device.down, whole / device.down, self.period)
