"""The file that says which machines there are and how they are linked: what ``thinwire plan`` reads."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from thinwire.links.profile import plain_shape
from thinwire.links.shape import MTU, SEGMENT
from thinwire.runs.options import FORM, TAKEN
from thinwire.types import InputError, require
from thinwire.uses.training.pipeline.choosing.pipeline_plan import Way, Ways

EXAMPLE = "see docs/planning.md for an example"
LEAST, MOST = 1e-12, 1e12  # of a number: seconds, tokens or speeds beyond it are no machine's
OPTIONAL = ("embed", "lora", "threads", "device")  # of what was measured: 0, or cpu, if not given


@dataclass(frozen=True)
class MachineSpeed:
    """What one micro-batch took on a machine, in seconds, and of what."""

    model: str
    tokens: int
    layer: float  # forward and backward
    head: float
    update: float  # a layer's optimiser step
    embed: float = 0.0  # forward and backward of the embedding, which adapters leave frozen
    lora: int = 0  # the adapters' rank
    threads: int = 0  # compute threads; 0: one for each core
    device: str = "cpu"  # what it was measured on; cuda: one card

    def toml(self, name: str) -> str:
        """Return it as the entry of a machine.

        >>> print(MachineSpeed("gpt2-lab", 256, 0.01, 0.03, 0.002).toml("desk"))
        [[machine]]
        name = "desk"
        model = "gpt2-lab"
        tokens = 256
        layer = 0.01
        head = 0.03
        update = 0.002
        """
        values = {"name": name} | {f.name: getattr(self, f.name) for f in fields(self)}
        return "[[machine]]\n" + "\n".join(
            f'{k} = "{v}"' if isinstance(v, str) else f"{k} = {v:.6g}"
            for k, v in values.items()
            if k not in OPTIONAL or v not in (0, "cpu")
        )


@dataclass(frozen=True)
class MachineEntry:
    """One machine of the file: its speed against the one that plans, or what was measured on it."""

    name: str
    speed: float | None = None
    measured: MachineSpeed | None = None
    address: str | None = None


@dataclass(frozen=True)
class MachinesFile:
    """The machines in the order of the file, and the ways between them."""

    machines: tuple[MachineEntry, ...]
    ways: Ways = field(default_factory=dict)


def read_machines(path: str | Path) -> MachinesFile:
    """Read a file of ``[[machine]]`` and ``[[link]]`` entries.

    A link counts both ways unless the way back has an entry of its own. Errors: ``InputError``, one sentence
    that names the entry and what is wrong with it.
    """
    try:
        values = tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as e:
        raise InputError(f"cannot read {path}: {e.strerror or e}; give a readable TOML file") from e
    except ValueError as e:
        raise InputError(f"{path} is not valid TOML: {e}; {EXAMPLE}") from e
    _known(values, ("machine", "link"), str(path))
    machines = tuple(
        _machine(v, f"machine {i} of {path}") for i, v in enumerate(_list(values, "machine", path), 1)
    )
    names = [m.name for m in machines]
    for name in names:
        require(names.count(name) == 1, InputError, f"{path} has two machines named {name!r}; rename one")
    links = [_link(v, names, f"link {i} of {path}") for i, v in enumerate(_list(values, "link", path), 1)]
    return MachinesFile(machines, _ways(links, str(path)))


def _list(values: Mapping[str, Any], key: str, path: str | Path) -> list[dict[str, Any]]:
    found = values.get(key, [])
    fine = isinstance(found, list) and all(isinstance(v, dict) for v in found)
    require(fine, InputError, f"{key} in {path} is no list of tables; write [[{key}]], {EXAMPLE}")
    require(bool(found), InputError, f"{path} has no [[{key}]]; {EXAMPLE}")
    return list(found)


def _known(values: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    for key in values:
        if key not in names:
            near = difflib.get_close_matches(key, names, 1, 0.5)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(names)}"
            raise InputError(f"{where} has an unknown {key!r}; {hint}")


def _text(values: Mapping[str, Any], key: str, where: str) -> str:
    require(key in values, InputError, f"{where} has no {key}; {EXAMPLE}")
    value = values[key]
    good = isinstance(value, str) and value.strip() and value.isprintable()
    require(bool(good), InputError, f"{where} has {key} = {value!r}; give it as text")
    return str(value)


def _number(values: Mapping[str, Any], key: str, where: str) -> float:
    require(
        key in values, InputError, f"{where} has no {key}; give all that --measure prints, or a speed alone"
    )
    value = values[key]
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
    require(good, InputError, f"{where} has {key} = {value!r}, which is not a number above zero; correct it")
    wrong = (
        f"{where} has {key} = {ascii(value)[:40]}, which no machine has; give one from {LEAST:g} to {MOST:g}"
    )
    require(LEAST <= value <= MOST, InputError, wrong)
    return float(value)


def _whole(values: Mapping[str, Any], key: str, where: str) -> int:
    number = _number(values, key, where)
    good = number.is_integer()
    require(good, InputError, f"{where} has {key} = {values[key]!r}, which is no whole number; correct it")
    return int(number)


def _flag(values: Mapping[str, Any], key: str, where: str, default: bool) -> bool:
    value = values.get(key, default)
    require(isinstance(value, bool), InputError, f"{where} has {key} = {value!r}; give true or false")
    return bool(value)


def _machine(values: Mapping[str, Any], where: str) -> MachineEntry:
    parts = [f.name for f in fields(MachineSpeed)]
    _known(values, ["name", "speed", "address", *parts], where)
    name = _text(values, "name", where)
    where = f"machine {name!r}"
    address = _text(values, "address", where) if "address" in values else None
    given = [p for p in parts if p in values]
    require(
        not (given and "speed" in values),
        InputError,
        f"{where} has both speed and {', '.join(given)}; leave the speed out",
    )
    if not given:
        speed = _number(values, "speed", where) if "speed" in values else 1.0
        return MachineEntry(name, speed, None, address)
    tokens = _whole(values, "tokens", where)
    layer, head, update = (_number(values, p, where) for p in ("layer", "head", "update"))
    embed = _number(values, "embed", where) if "embed" in values else 0.0
    lora, threads = (_whole(values, p, where) if p in values else 0 for p in ("lora", "threads"))
    require(
        bool(embed or lora), InputError, f"{where} says nothing of its embedding, embed; measure it again"
    )
    model, device = _text(values, "model", where), _device(values, where)
    measured = MachineSpeed(model, tokens, layer, head, update, embed, lora, threads, device)
    return MachineEntry(name, None, measured, address)


def _device(values: Mapping[str, Any], where: str) -> str:
    text = _text(values, "device", where) if "device" in values else "cpu"
    good = re.fullmatch(FORM, text)
    require(good is not None, InputError, f"{where} has device = {text!r}; it can be {TAKEN}")
    return text


def _link(values: Mapping[str, Any], names: Sequence[str], where: str) -> tuple[str, str, Way]:
    _known(values, ("from", "to", "link", "line", "restarts"), where)
    source, target = (_text(values, key, where) for key in ("from", "to"))
    for name in (source, target):
        if name not in names:
            near = difflib.get_close_matches(name, names, 1, 0.5)
            hint = f"did you mean {near[0]}?" if near else f"the machines are {', '.join(names)}"
            raise InputError(f"{where} names the machine {name!r}; {hint}")
    require(source != target, InputError, f"{where} leads from {source} to itself; name two machines")
    return source, target, _way(values, where)


def _way(values: Mapping[str, Any], where: str) -> Way:
    """Return a link by what TCP carries on it: ``link`` says that, ``line`` what it carries with headers."""
    require(
        not ("link" in values and "line" in values),
        InputError,
        f"{where} has both link and line; give the rate without headers as link, or with them as line",
    )
    raw = "line" in values
    text = _text(values, "line" if raw else "link", where)
    shape = plain_shape(text, "a plan takes one rate and one delay, as in 100mbit,20ms")
    rate = shape.rate * SEGMENT / MTU if raw and shape.rate else shape.rate
    return Way(rate, shape.delay + shape.jitter / 2, _flag(values, "restarts", where, True))


def _ways(links: Sequence[tuple[str, str, Way]], path: str) -> dict[tuple[str, str], Way]:
    ways: dict[tuple[str, str], Way] = {}
    for source, target, way in links:
        require(
            (source, target) not in ways,
            InputError,
            f"{path} has two links from {source} to {target}; leave one out",
        )
        ways[source, target] = way
    for source, target, way in links:
        ways.setdefault((target, source), way)
    return ways
