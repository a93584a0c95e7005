"""Every check of a configuration, in one place. Each refusal is one sentence: option, value, remedy."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import types
import typing
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from thinwire.links import congestion
from thinwire.links.security import is_loopback
from thinwire.types import InputError

if TYPE_CHECKING:
    from thinwire.lab.config import TrainConfig

MAX_STAGES = 4
MEASURED = "measured"  # a cut by what each machine's layers take
LEAST = {
    "seq": 2,
    "microbatches": 1,
    "batch": 1,
    "steps": 1,
    "epochs": 1,
    "warmup": 0,
    "eval_samples": 0,
    "eval_every": 0,
    "checkpoint_every": 0,
    "save_every": 0,
    "threads": 0,
    "lora": 0,
    "port": 0,
    "seed": 0,
    "weight_decay": 0.0,
    "grad_clip": 0.0,
}
COUNTED = 10**9  # more than any run has, and small enough for every count that is made of it
EVERY = ("eval_every", "checkpoint_every", "save_every")  # options of what is done every so many steps
MOST = dict.fromkeys(("steps", "epochs", "warmup", "eval_samples", *EVERY), COUNTED)
MOST |= {"microbatches": 2**16 - 1, "threads": 1024, "deadline": 10**6}
MOST["seed"] = 10**12  # times a million and a pass's number, it is still a seed to torch
WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def flag(name: str) -> str:
    """Return the command line's spelling of a field."""
    return "--" + name.replace("_", "-")


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean X`` for the closest known word, or an empty string."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {found[0]}" if found else ""


def known(key: str, names: list[str], where: str) -> None:
    """Raise ``InputError`` unless ``key`` is one of ``names``."""
    if key not in names:
        hint = nearest(key, names) or f"; the options are {', '.join(sorted(names))}"
        raise InputError(f"{where} has the unknown option {key!r}{hint}")


def typed(config: TrainConfig) -> dict[str, Any]:
    """Return every field's value in its declared type; ``InputError`` where it is of another one."""
    hints = typing.get_type_hints(type(config))
    return {
        f.name: _coerce(f.name, getattr(config, f.name), hints[f.name]) for f in dataclasses.fields(config)
    }


def _coerce(name: str, value: Any, hint: Any) -> Any:
    want = _plain(hint)
    if value is None and want is not hint:
        return None
    if want is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, want) or (isinstance(value, bool) and want is not bool):
        raise InputError(f"{flag(name)} takes {WORDS[want]}, not {value!r}")
    if want is float and not math.isfinite(value):
        raise InputError(f"{flag(name)} is {value}; give a finite number")
    return value


def from_text(cls: type, name: str, text: Any) -> Any:
    """Return an option's text in its field's type; flags come as they are."""
    want = _plain(typing.get_type_hints(cls)[name])
    if not isinstance(text, str) or want is str:
        return text
    try:
        return want(text)
    except ValueError as e:
        raise InputError(f"{flag(name)} takes {WORDS[want]}, not {text!r}") from e


def _plain(hint: Any) -> Any:
    if isinstance(hint, types.UnionType):
        return next(h for h in typing.get_args(hint) if h is not type(None))
    return hint


def check(config: TrainConfig) -> None:
    """Raise ``InputError`` for the first option that cannot work."""
    _choices(config)
    _ranges(config)
    _pipeline(config)
    _counts(config)
    _kept(config)
    _specs(config)


def _choices(config: TrainConfig) -> None:
    for f in dataclasses.fields(config):
        allowed, value = f.metadata["choices"], getattr(config, f.name)
        if allowed and value is not None and value not in allowed:
            hint = nearest(str(value), allowed) or f"; it can be {', '.join(allowed)}"
            raise InputError(f"{flag(f.name)} {value!r} is unknown{hint}")


def _ranges(config: TrainConfig) -> None:
    for name, least in LEAST.items():
        value = getattr(config, name)
        if value is not None and value < least:
            raise InputError(f"{flag(name)} is {value}; it must be at least {least}")
    for name, most in MOST.items():
        value = getattr(config, name)
        if value is not None and value > most:
            raise InputError(f"{flag(name)} is {value}; it must be at most {most}")
    for name in ("lr", "deadline"):
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise InputError(f"{flag(name)} is {value}; it must be above 0")
    if not 0 <= config.dropout < 1:
        raise InputError(f"--dropout is {config.dropout}; it must be at least 0 and below 1")
    for name in ("recipe", "model", "data", "text_field", "out", "host", "advertise"):
        value = getattr(config, name)
        if value is not None and not value.strip():
            raise InputError(f"{flag(name)} is empty; give a value or leave the option out")


def _pipeline(config: TrainConfig) -> None:
    if not 2 <= config.stages <= MAX_STAGES:
        raise InputError(f"--stages is {config.stages}; a pipeline here has 2 to {MAX_STAGES} stages")
    if config.schedule == "interleaved1f1b" and config.stages != 4:
        raise InputError(
            f"--schedule interleaved1f1b puts two stages on each of two processes; "
            f"set --stages 4 instead of {config.stages}"
        )
    if config.schedule != "gpipe" and config.microbatches < config.stages:
        raise InputError(
            f"--schedule {config.schedule} needs at least as many micro-batches as stages; "
            f"raise --microbatches from {config.microbatches} to {config.stages} or take --schedule gpipe"
        )
    if config.schedule == "interleaved1f1b" and config.microbatches % config.ranks:
        raise InputError(
            f"--microbatches is {config.microbatches}; "
            f"--schedule interleaved1f1b needs a multiple of {config.ranks}"
        )
    if config.cut is not None:
        _cut(config.cut, config.stages)


def _cut(cut: str, stages: int) -> None:
    if cut == MEASURED:
        return
    parts = [p.strip() for p in cut.split(",")]
    if not all(p.isdecimal() and int(p) > 0 for p in parts):
        raise InputError(
            f"--cut {cut!r} is no list of layer counts; write one positive number a stage, as in 19,11"
        )
    if len(parts) != stages:
        raise InputError(f"--cut {cut} names {len(parts)} stages, but --stages is {stages}; make them agree")


def _counts(config: TrainConfig) -> None:
    if config.batch % config.microbatches:
        fits = -(-config.batch // config.microbatches) * config.microbatches
        raise InputError(
            f"--batch {config.batch} does not split into {config.microbatches} equal micro-batches; "
            f"take --batch {fits} or change --microbatches"
        )
    if config.steps is not None and config.epochs is not None and config.steps % config.epochs:
        below = max(1, config.steps // config.epochs) * config.epochs
        raise InputError(
            f"--steps {config.steps} does not split into {config.epochs} equal epochs; take --steps {below}"
        )
    if config.planned_steps is not None and config.warmup > config.planned_steps:
        raise InputError(
            f"--warmup is {config.warmup} steps, more than the run's {config.planned_steps}; "
            "lower it or raise --steps"
        )


def _kept(config: TrainConfig) -> None:
    if config.save_every and not (config.save_model or config.lora):
        raise InputError(
            f"--save-every is {config.save_every}, but --no-save-model leaves nothing to save; drop one"
        )


def _specs(config: TrainConfig) -> None:
    # Imported here, because a reader of records needs none of them.
    from thinwire.disk_store import open_store
    from thinwire.lab.emulator.profile import plain_shape
    from thinwire.links.address import Route
    from thinwire.links.relayed import check_relay
    from thinwire.links.security import check_host, read_token
    from thinwire.recipes import parse_recipe

    if config.emulate:
        _emulated(config)
    else:
        plain_shape(config.link, "add --emulate")
        congestion.resolve(config.congestion)
    parse_recipe(config.recipe)
    open_store(config.references)
    token = read_token(config.token_file)
    if config.relay is not None:
        Route.parse(config.relay)
        check_relay(token)
        return  # nobody reaches this machine, so its addresses do not matter
    check_host(config.host, token)
    _addresses(config)


def _emulated(config: TrainConfig) -> None:
    from thinwire.lab.emulator.profile import profiles

    profiles(config.link.split(";"), config.ranks)
    told = [name for name in ("relay", "advertise") if getattr(config, name) is not None]
    if not is_loopback(config.host) and congestion.EMULATED not in os.environ:  # inside ranks have theirs
        told.append("host")
    if told:
        raise InputError(
            f"--emulate gives every process an address of its own; leave {flag(told[0])} out, or --emulate"
        )


def _addresses(config: TrainConfig) -> None:
    from thinwire.links.address import MAX_PORT, parse_address
    from thinwire.links.mesh import EVERYWHERE, pair_number

    shown, mapped = parse_address(config.advertise or config.host)
    if shown in EVERYWHERE:
        raise InputError(f"others cannot reach {shown}; give the address by which they do as --advertise")
    if mapped is not None and not config.port:
        raise InputError(f"--advertise {config.advertise} names a port that leads to --port; give both")
    last = pair_number(config.ranks - 2, config.ranks - 1, config.ranks)
    for name, first in (("port", config.port), ("advertise", mapped or 0)):
        if first + last >= MAX_PORT:
            many = f" for {last + 1} in a row" if last else ""
            raise InputError(f"--{name} {first} is too high{many}; take one below {MAX_PORT - last}")
