"""Read a fleet of devices: from a TOML file, or by the name of one that comes with thinwire."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from thinwire.links.profile import Profile
from thinwire.runs.options import nearest
from thinwire.types import InputError, require
from thinwire.uses.federated.run.fleet import PERIOD, Availability, Fleet, VirtualDevice
from thinwire.uses.federated.run.fleets import EQUAL, FLEETS, MOST, PHONES, SIZES, equal, phones

NUMBERS = ("step_seconds", "straggle", "slower", "drop_out")
KEYS = ("count", *NUMBERS, "link", "available", "period")
MAX_NUMBER = 1e30  # beyond it lies no time or share, and whole numbers that are no floats
GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples fill a circle evenly, however many they are
EXAMPLE = 'write [[device]], then lines such as count = 10, step_seconds = 0.1 and link = "60kbit,80ms"'


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
