"""A fleet of virtual devices: what each computes, sends and misses, and how it is read or made by name."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from thinwire.links.profile import Profile, one_way
from thinwire.rounds.client_profile import ClientProfile
from thinwire.runs.options import nearest
from thinwire.types import InputError, require

PERIOD = 600.0  # seconds, after which a share of time begins anew
NUMBERS = ("step_seconds", "straggle", "slower", "drop_out")
KEYS = ("count", *NUMBERS, "link", "available", "period")
MAX_NUMBER = 1e30  # beyond it lies no time or share, and whole numbers that are no floats
GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples fill a circle evenly, however many they are
EXAMPLE = 'write [[device]], then lines such as count = 10, step_seconds = 0.1 and link = "60kbit,80ms"'
EQUAL, PHONES = "equal", "phones-1000"
SIZES = {EQUAL: 10, PHONES: 1000}  # devices, where nobody says how many
MOST = 100_000  # devices
PHONES_SEED = 1000
MBIT = 125e3  # bytes/s
# Ten devices of FedLuck's kind: uplinks that differ by three, one far slower, step times that differ by four,
# and slow links with slow processors, as in its released code [source].
# Rates are for a model of 47,000 values: a whole one takes a straggler 4 minutes, the others 25 to 75 s.
FLEETS = {
    "ten-one-straggler": """\
[[device]]
step_seconds = 0.4
link = "up=6kbit,down=24kbit,80ms"

[[device]]
count = 9
step_seconds = [0.3667, 0.1]
link = ["up=20kbit,down=80kbit,80ms", "up=60kbit,down=240kbit,80ms"]
"""
}


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


class TurnDraw(NamedTuple):
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

    def turn(self, *key: int) -> TurnDraw:
        """Return how a turn goes: drawn from ``key`` alone, such as seed, client and number of the turn.

        >>> VirtualDevice(0.5, straggle=1.0, slower=4.0).turn(0, 7, 1)
        TurnDraw(step_seconds=2.0, drops=False)
        """
        if not self.straggle and not self.drop_out:
            return TurnDraw(self.step_seconds, False)
        slow, lost = np.random.default_rng(key).random(2)
        factor = self.slower if slow < self.straggle else 1.0
        return TurnDraw(self.step_seconds * factor, bool(lost < self.drop_out))


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

    def to_policy(self, samples: Sequence[int]) -> tuple[ClientProfile, ...]:
        """Return what a policy is told, by client: means where a link changes, and each one's ``samples``.

        Errors: ``InputError`` for numbers of samples of other devices than these.

        >>> (told,) = Fleet("toy", (VirtualDevice(0.5, Profile.parse("up=60kbit,80ms")),)).to_policy([300])
        >>> told.step_seconds, told.samples, told.up, told.down, told.delay
        (0.5, 300, 7500.0, inf, 0.08)
        """
        fits = len(samples) == len(self)
        require(fits, InputError, f"samples of {len(samples)} clients for {len(self)} devices; give as many")
        return tuple(
            ClientProfile(i, d.step_seconds, n, d.link.uplink.mean, d.link.downlink.mean, self._mean_delay(i))
            for i, (d, n) in enumerate(zip(self.devices, samples, strict=True))
        )

    def _mean_delay(self, client: int) -> float:
        ends = [link for link in (self.devices[client].link, self.server) if link is not None]
        return sum(_own_delay(link) for link in ends) / len(ends)


def _own_delay(link: Profile) -> float:
    if link.delay is None and link.trace is not None:
        return link.trace.mean_delay
    return link.delay or 0.0


def load_fleet(name: str, clients: int | None = None) -> Fleet:
    """Return the devices that ``--devices`` names, as many as ``clients`` where that is given.

    ``ten-one-straggler``; ``phones-1000``, or the first of them; ``equal``, any number, by default ten; or a
    TOML file. Errors: ``InputError``, one sentence that names file and key, and for another number.

    >>> [len(load_fleet(name)) for name in ("ten-one-straggler", "phones-1000", "equal")]
    [10, 1000, 10]
    """
    if name == EQUAL:
        return equal(clients if clients is not None else SIZES[EQUAL])
    if name == PHONES and (clients is None or 1 <= clients <= SIZES[PHONES]):
        return phones(clients if clients is not None else SIZES[PHONES])
    if name == PHONES:
        raise InputError(
            f"--devices {name} has {SIZES[name]} devices, not {clients}; give --clients up to that"
        )
    fleet = parse_fleet(FLEETS[name] if name in FLEETS else _read(name), name)
    other = f"--devices {name} has {len(fleet)} devices, not {clients}; give --clients {len(fleet)}"
    require(clients is None or clients == len(fleet), InputError, other)
    return fleet


def parse_fleet(text: str, name: str) -> Fleet:
    """Read a device file: ``[[device]]`` entries, and perhaps ``server``, its own link.

    An entry stands for ``count`` devices. Of a number, or of a link, it may give two values: then these are
    the first and the last device's, and the others lie evenly between. Errors: ``InputError``.

    >>> fleet = parse_fleet('[[device]]\\ncount = 3\\nstep_seconds = [0.1, 0.3]\\nlink = "1mbit"', "toy")
    >>> [round(d.step_seconds, 3) for d in fleet.devices]
    [0.1, 0.2, 0.3]
    """
    try:
        values = tomllib.loads(text)
    except ValueError as e:
        raise InputError(f"{name} is not valid TOML: {e}; {EXAMPLE}") from e
    _known(values, ("server", "device"), name)
    server = _link(values["server"], f"server of {name}") if "server" in values else None
    entries = values.get("device")
    listed = isinstance(entries, list) and bool(entries) and all(isinstance(e, dict) for e in entries)
    require(listed, InputError, f"{name} has no list of [[device]] entries; {EXAMPLE}")
    devices: list[VirtualDevice] = []
    for number, entry in enumerate(entries or [], 1):
        devices += _devices(entry, len(devices), f"device {number} of {name}")
    return Fleet(name, tuple(devices), server)


def _read(name: str) -> str:
    path = Path(name)
    if not path.exists() and path.suffix != ".toml":
        known = (*FLEETS, EQUAL, PHONES)
        hint = nearest(name, known) or f"; give {', '.join(known)}, or a TOML file"
        raise InputError(f"--devices {name!r} is unknown{hint}")
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as e:
        why = getattr(e, "strerror", None) or e
        raise InputError(f"cannot read --devices {name}: {why}; give a readable TOML file") from e


def _known(values: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    for key in values:
        hint = nearest(key, names) or f"; it takes {', '.join(names)}"
        require(key in names, InputError, f"{where} has an unknown {key!r}{hint}")


def _devices(entry: Mapping[str, Any], first: int, where: str) -> list[VirtualDevice]:
    _known(entry, KEYS, where)
    count = entry.get("count", 1)
    whole = isinstance(count, int) and not isinstance(count, bool) and 1 <= count <= MOST
    require(whole, InputError, f"{where} has count = {count!r}; give a whole number from 1 to {MOST}")
    fits = first + count <= MOST
    require(
        fits, InputError, f"{where} makes {first + count} devices of {MOST} at most; give a smaller count"
    )
    require("step_seconds" in entry, InputError, f"{where} has no step_seconds; give seconds a local step")
    given = [key for key in NUMBERS if key in entry]
    numbers = {key: _spread(entry[key], count, f"{key} in {where}") for key in given}
    links = _links(entry.get("link", "none"), count, f"link in {where}")
    times = _availability(entry, count, first, where)
    try:
        return [
            VirtualDevice(link=links[i], available=times[i], **{key: numbers[key][i] for key in given})
            for i in range(count)
        ]
    except InputError as e:
        raise InputError(f"{where}: {e}") from e


def _spread(value: Any, count: int, what: str) -> list[float]:
    ends = value if isinstance(value, list) else [value]
    good = len(ends) in (1, 2) and all(_number(end) for end in ends)
    require(
        good, InputError, f"{what} is {value!r}; give a number, or two, for the first device and the last"
    )
    require(len(ends) == 1 or count > 1, InputError, f"{what} has two values for one device; give a count")
    return [ends[0] + (ends[-1] - ends[0]) * _share(i, count) for i in range(count)]


def _share(i: int, count: int) -> float:
    return i / (count - 1) if count > 1 else 0.0


def _number(value: Any) -> bool:
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and -MAX_NUMBER < value < MAX_NUMBER
    )


def _links(value: Any, count: int, what: str) -> list[Profile]:
    ends = value if isinstance(value, list) else [value]
    require(len(ends) in (1, 2), InputError, f"{what} is {value!r}; give one text, or two for a range")
    profiles = [_link(end, what) for end in ends]
    if len(ends) == 1:
        return profiles * count
    require(count > 1, InputError, f"{what} has two values for one device; give a count")
    return [_between(profiles[0], profiles[1], _share(i, count), what) for i in range(count)]


def _link(text: Any, what: str) -> Profile:
    require(isinstance(text, str), InputError, f"{what} is {text!r}; give it as text, as 60kbit,80ms")
    try:
        return Profile.parse(text)
    except InputError as e:
        raise InputError(f"{what}: {e}") from e


def _between(a: Profile, b: Profile, share: float, what: str) -> Profile:
    """Return the link that lies ``share`` of the way from one to another."""
    found: dict[str, Any] = {}
    for part in (f.name for f in fields(Profile)):
        x, y = getattr(a, part), getattr(b, part)
        between = x == y or (_number(x) and _number(y))
        require(
            between, InputError, f"{what} has {part} at one end of its range alone; give both the same parts"
        )
        found[part] = x if x == y else type(x)(x + (y - x) * share)
    return Profile(**found)


def _availability(entry: Mapping[str, Any], count: int, first: int, where: str) -> list[Availability]:
    """Return when each device takes part; those with a share of time alone do so at different times."""
    period, value = entry.get("period", PERIOD), entry.get("available", 1.0)
    require(_number(period), InputError, f"{where} has period = {period!r}; give seconds")
    windows = isinstance(value, list) and any(isinstance(v, list) for v in value)
    pairs = windows and all(isinstance(v, list) and len(v) == 2 and all(map(_number, v)) for v in value)
    wrong = (
        f"{where} has available = {value!r}; give a share of time, or windows [[begin, end], ...] in seconds"
    )
    require(pairs or not windows, InputError, wrong)
    try:
        if pairs:
            return [Availability(tuple((float(b), float(e)) for b, e in value), float(period))] * count
        shares = _spread(value, count, f"available in {where}")
        phases = [(first + i) * GOLDEN for i in range(count)]
        return [Availability.share(s, p, float(period)) for s, p in zip(shares, phases, strict=True)]
    except InputError as e:
        raise InputError(str(e) if where in str(e) else f"{where}: {e}") from e


def equal(clients: int) -> Fleet:
    """Return devices that are alike: 0.1 s a step, 1 Mbit/s up and 4 down, 80 ms.

    >>> len(equal(3))
    3
    """
    require(1 <= clients <= MOST, InputError, f"{clients} clients; give 1 to {MOST}")
    device = VirtualDevice(0.1, Profile(up=MBIT, down=4 * MBIT, delay=0.08))
    return Fleet(EQUAL, (device,) * clients)


def phones(clients: int) -> Fleet:
    """Return the first of a thousand phones, drawn once and for all, evenly over the logarithms.

    0.5 to 10 Mbit/s up and four times that down, 50 ms; 0.05 to 1 s a step; there for 80 % of the time;
    5 % of their turns end without an update.
    """
    draws = np.random.default_rng(PHONES_SEED).random((SIZES[PHONES], 3))[:clients]
    return Fleet(PHONES, tuple(_phone(*map(float, draw)) for draw in draws))


def _phone(rate: float, speed: float, phase: float) -> VirtualDevice:
    up = 0.5 * MBIT * 20**rate
    link = Profile(up=up, down=4 * up, delay=0.05)
    return VirtualDevice(0.05 * 20**speed, link, Availability.share(0.8, phase), drop_out=0.05)
