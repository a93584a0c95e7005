"""What a policy of federated learning decides about, and what it decides: a client, and its assignment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from thinwire.codecs import Codec, Raw
from thinwire.codecs.codec import require_codec
from thinwire.spec import Spec
from thinwire.types import InputError, require


class ClientPace(NamedTuple):
    """How fast a client is: ``step_seconds`` of each local step, and ``fixed`` seconds of a turn beside them.

    ``members``: who train behind it, and share its steps. ``least``: steps, of which fewer take as long.
    """

    step_seconds: float
    fixed: float = 0.0
    members: int = 1
    least: int = 1


@dataclass(frozen=True)
class ClientProfile:
    """One client: how fast it computes and sends, and how much data it has.

    >>> ClientProfile(id=0, step_seconds=0.2, samples=300).seconds(steps=5, up=0)
    1.0
    """

    id: int
    step_seconds: float  # of a local step
    samples: int
    up: float = math.inf  # bytes/s
    down: float = math.inf  # bytes/s
    delay: float = 0.0  # seconds, one way
    name: str = ""  # as its owner calls it
    members: int = 1  # that train behind it, and share its steps
    fixed: float = 0.0  # seconds of a turn beside its steps and its own transfers
    least: int = 1  # steps, of which fewer take as long

    def __post_init__(self) -> None:
        wrong = f"device {self.id} takes {self.step_seconds} s a step; give seconds above 0"
        require(0 < self.step_seconds < math.inf, InputError, wrong)
        for name in ("up", "down"):
            rate = getattr(self, name)
            require(rate > 0, InputError, f"device {self.id} has {name}={rate}; give bytes/s above 0")
        require(0 <= self.fixed < math.inf, InputError, f"device {self.id} takes {self.fixed} s beside steps")
        late = 0 <= self.delay < math.inf
        require(late, InputError, f"device {self.id} has a delay of {self.delay} s; give seconds from 0 up")
        require(self.samples > 0, InputError, f"device {self.id} has no samples; give each device some")
        require(
            self.members > 0 < self.least,
            InputError,
            f"device {self.id} is of {self.members} members; give 1 or more",
        )

    @property
    def pace(self) -> ClientPace:
        """How fast it is."""
        return ClientPace(self.step_seconds, self.fixed, self.members, self.least)

    def seconds(self, steps: int, up: float, down: float = 0.0) -> float:
        """Return how long a turn of ``steps`` local steps takes that sends ``up`` bytes and gets ``down``."""
        trips = (up > 0) + (down > 0)
        turn = self.fixed + steps * self.step_seconds
        return turn + up / self.up + down / self.down + trips * self.delay


@dataclass(frozen=True)
class Situation:
    """What all devices share at the moment of a choice.

    ``rate`` is the step size of local steps now; ``first_rate`` and ``last_rate`` are those of the first and
    the last version, which some methods need to be known ahead. ``last_rate`` is 0 where no end is planned.
    ``norms`` are those of the updates that made the last versions, this one's last.
    """

    values: int  # parameters of the model
    version: int = 0
    rate: float = 0.1
    first_rate: float = 0.1
    last_rate: float = 0.1
    norms: tuple[float, ...] = ()


@dataclass(frozen=True)
class Assignment:
    """How one device takes part from now on, and why: local steps, and the codec of its update."""

    steps: int
    codec: Codec = Raw()  # noqa: RUF009 -- frozen
    why: str = ""

    def __post_init__(self) -> None:
        require(self.steps >= 1, InputError, f"{self.steps} local steps; give 1 or more")


@runtime_checkable
class FederatedPolicy(Protocol):
    """A pure map from devices to assignments, one a device, in order."""

    def assign(self, devices: Sequence[ClientProfile], situation: Situation) -> Sequence[Assignment]:
        """Return an assignment for each device; one call weighs all of them."""
        ...


def data_shares(devices: Sequence[ClientProfile]) -> list[float]:
    """Return which share of all samples each device has, in order.

    >>> data_shares([ClientProfile(0, 0.1, samples=300), ClientProfile(1, 0.1, samples=100)])
    [0.75, 0.25]
    """
    total = sum(device.samples for device in devices)
    return [device.samples / total for device in devices]


def short(value: float) -> float:
    """Return ``value`` in four digits: a codec's text travels with its packets.

    >>> short(0.0123456789)
    0.01235
    """
    return float(f"{value:.4g}")


@dataclass(frozen=True, repr=False)
class Fixed(Spec):
    """Give all devices ``steps`` local steps and ``codec``, whatever they are.

    FedAvg, FedAsync, FedBuff and QAFeL do so. With ``TopK`` or ``HardThreshold`` it is what the methods that
    choose are compared with.

    >>> Fixed(steps=5).assign([ClientProfile(0, 0.1, samples=300)], Situation(values=1000))[0].steps
    5
    """

    steps: int = 5
    codec: Codec = Raw()  # noqa: RUF009 -- frozen

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.steps >= 1, InputError, f"steps={self.steps} is below 1; give a number of local steps")
        require_codec("codec", self.codec)

    def assign(self, devices: Sequence[ClientProfile], situation: Situation) -> Sequence[Assignment]:
        """Return the same assignment for each device."""
        same = Assignment(self.steps, self.codec, f"{self.steps} steps and one codec for all")
        return [same] * len(devices)
