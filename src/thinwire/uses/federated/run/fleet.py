"""A fleet of virtual devices: what each computes, sends and misses, on a clock that nobody waits for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from thinwire.links.profile import Profile, one_way
from thinwire.types import InputError, require
from thinwire.uses.federated.choosing.device import Device

PERIOD = 600.0  # seconds, after which a share of time begins anew


@dataclass(frozen=True)
class Availability:
    """When a device takes part: in ``windows`` of time, from begin to below end, anew every ``period``.

    Without windows, always. Errors: ``InputError`` for windows that are empty, overlap, are out of order or
    do not fit into the period.

    >>> Availability(((0.0, 60.0),), period=100.0).since(170.0)
    200.0
    """

    windows: tuple[tuple[float, float], ...] = ()  # seconds
    period: float = PERIOD  # seconds

    def __post_init__(self) -> None:
        whole = 0 < self.period < math.inf
        require(whole, InputError, f"a period of {self.period} s is not above zero; give seconds")
        last = 0.0
        for begin, end in self.windows:
            fits = last <= begin < end <= self.period
            wrong = f"the window from {begin} to {end} s is empty, out of order or beyond {self.period} s"
            require(fits, InputError, f"{wrong}; give windows within the period, the earliest first")
            last = end

    @classmethod
    def share(cls, share: float, phase: float = 0.0, period: float = PERIOD) -> Availability:
        """Return one window a period, as long as ``share`` of it, that begins at ``phase`` of it (0 to 1)."""
        require(0 < share <= 1, InputError, f"a share of time of {share} is not above 0 and up to 1")
        if share == 1:
            return cls(period=period)
        begin, end = phase % 1 * period, (phase % 1 + share) * period
        sliver = 1e-9 * period  # of a window that rounding alone would leave
        if end <= period + sliver:
            return cls(((begin, min(end, period)),), period)
        if period - begin <= sliver:
            return cls(((0.0, end - period),), period)
        rest = min(end - period, begin)  # rounding could make the two overlap
        return cls(((0.0, rest), (begin, period)), period)

    def since(self, time: float) -> float:
        """Return the first moment from ``time`` [s] on at which it takes part, which may be ``time``."""
        cycle = math.floor(time / self.period)
        for start in (cycle * self.period, (cycle + 1) * self.period):
            for begin, end in self.windows:
                if time < start + end:
                    return max(time, start + begin)
        return time


class Turn(NamedTuple):
    """How one turn of a device goes."""

    step_seconds: float
    drops: bool  # its update is lost


@dataclass(frozen=True)
class VirtualDevice:
    """A device of the virtual clock; the default of a link takes no time.

    ``straggle`` is the probability that a turn's local steps take ``slower`` times as long, ``drop_out`` that
    a turn ends without an update. Errors: ``InputError``.
    """

    step_seconds: float  # of a local step
    link: Profile = Profile()  # noqa: RUF009 -- frozen
    available: Availability = Availability()
    straggle: float = 0.0
    slower: float = 1.0
    drop_out: float = 0.0

    def __post_init__(self) -> None:
        takes = 0 < self.step_seconds < math.inf
        require(takes, InputError, f"step_seconds = {self.step_seconds} is not above zero; give seconds")
        often = 0 <= self.straggle <= 1
        require(often, InputError, f"straggle = {self.straggle} is no probability; give 0 to 1")
        factor = 1 <= self.slower < math.inf
        require(factor, InputError, f"slower = {self.slower} is below 1; give how many times a step takes")
        ends = 0 <= self.drop_out < 1
        require(ends, InputError, f"drop_out = {self.drop_out}; give a probability from 0 to below 1")

    def turn(self, *key: int) -> Turn:
        """Return how a turn goes: drawn from ``key`` alone, such as seed, client and number of the turn.

        >>> VirtualDevice(0.5, straggle=1.0, slower=4.0).turn(0, 7, 1)
        Turn(step_seconds=2.0, drops=False)
        """
        if not self.straggle and not self.drop_out:
            return Turn(self.step_seconds, False)
        slow, lost = np.random.default_rng(key).random(2)
        factor = self.slower if slow < self.straggle else 1.0
        return Turn(self.step_seconds * factor, bool(lost < self.drop_out))


@dataclass(frozen=True)
class Fleet:
    """The devices, by client, and the server's own link, which all transfers share; None is without limit.

    Between a device and a server with a link of its own, the delay is the mean of the two, as between two
    emulated ranks; without one, it is the device's.
    """

    name: str
    devices: tuple[VirtualDevice, ...]
    server: Profile | None = None

    def __post_init__(self) -> None:
        require(bool(self.devices), InputError, f"{self.name} has no devices; give one or more")

    def __len__(self) -> int:
        return len(self.devices)

    def delay(self, client: int, time: float = 0.0) -> float:
        """Return the one-way delay [s] between a device and the server at ``time`` [s]."""
        link = self.devices[client].link
        return link.delay_at(time) if self.server is None else one_way(link, self.server, time)

    def to_policy(self, samples: Sequence[int]) -> tuple[Device, ...]:
        """Return what a policy is told, by client: means where a link changes, and each one's ``samples``.

        Errors: ``InputError`` for numbers of samples of other devices than these.

        >>> Fleet("toy", (VirtualDevice(0.5, Profile.parse("up=60kbit,80ms")),)).to_policy([300])
        (Device(id=0, step_seconds=0.5, samples=300, up=7500.0, down=inf, delay=0.08),)
        """
        fits = len(samples) == len(self)
        require(fits, InputError, f"samples of {len(samples)} clients for {len(self)} devices; give as many")
        return tuple(
            Device(i, d.step_seconds, n, d.link.uplink.mean, d.link.downlink.mean, self._mean_delay(i))
            for i, (d, n) in enumerate(zip(self.devices, samples, strict=True))
        )

    def _mean_delay(self, client: int) -> float:
        ends = [link for link in (self.devices[client].link, self.server) if link is not None]
        return sum(_own_delay(link) for link in ends) / len(ends)


def _own_delay(link: Profile) -> float:
    if link.delay is None and link.trace is not None:
        return link.trace.mean_delay
    return link.delay or 0.0
