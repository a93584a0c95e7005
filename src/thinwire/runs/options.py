"""Options of any engine: one frozen dataclass, from which command line, TOML keys and records follow.

Each field carries its help text and its limits, so that none of these can drift apart.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import operator
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from thinwire.dtypes import among
from thinwire.links.tcp.congestion import AUTO, MEANING
from thinwire.types import InputError, require

TEXTS = tuple[str, ...]  # of an option that is given again and again
WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
BOUNDS = {
    "least": ("at least", operator.ge),
    "most": ("at most", operator.le),
    "above": ("above", operator.gt),
    "below": ("below", operator.lt),
}  # of numbers: in words, and whether a value keeps them
DTYPES = (AUTO, "fp32", "bf16", "fp16")  # of compute; longer names mean the same
FORM, TAKEN = r"auto|cpu|(cuda|xpu)(:\d{1,3})?|mps", "auto, cpu, cuda or one card, as in cuda:1"  # of devices
COUNTED = 10**9  # more than any run has, and small enough for every count that is made of it
FOREVER = 1e9  # seconds: more than anybody waits, and no more than clocks can count


def option(
    default: Any,
    panel: str,
    text: str,
    *,
    metavar: str = "",
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    unit: str = "",
    free: bool = False,
    alike: bool | None = None,
    variable: str = "",
    old: str = "",
    form: str = "",
    forms: str = "",
) -> Any:
    """Return a field of ``Options``.

    ``panel`` is its heading in the help, none that of all others; ``text`` one sentence. A number is at
    ``least``, at ``most``, ``above`` and ``below`` what is given, in a ``unit`` that its refusal names.
    ``free``: a resumed run may change it. ``alike``: all ranks must have the same; all but the free ones,
    unless told otherwise. ``variable``: the one of a rank's environment that says it, where no option does.
    ``old``: what it was called until the release before; that name still works, and the help leaves it out.
    ``form``: the regular expression that a text matches as a whole; ``forms`` says in words what that can be.
    """
    limits = {"least": least, "above": above, "most": most, "below": below}
    about: dict[str, Any] = {"panel": panel, "help": text, "metavar": metavar, "choices": choices}
    about |= {"limits": limits, "unit": unit, "free": free, "alike": not free if alike is None else alike}
    return field(default=default, metadata=about | {"variable": variable, "old": old, "form": (form, forms)})


@dataclass(frozen=True)
class Options:
    """The base of a configuration: validated when made.

    Errors: ``InputError``, one sentence that names the option, the value and the remedy.
    """

    def __post_init__(self) -> None:
        for name, value in typed(self).items():
            object.__setattr__(self, name, value)
        check_fields(self)
        self.validate()

    def validate(self) -> None:
        """Raise ``InputError`` for the first option that does not go with the others."""

    def replace(self, **changes: Any) -> Self:
        """Return a validated copy with ``changes``."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, every option by name."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def names(cls, **about: Any) -> list[str]:
        """Return the options' names: all, or those whose field says so, as in ``names(free=True)``."""
        return [f.name for f in dataclasses.fields(cls) if about.items() <= dict(f.metadata).items()]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "the configuration") -> Self:
        """Build from plain values; an unknown key is an ``InputError`` that names the nearest option."""
        values = cls.renamed(values, where)
        for key in values:
            known(key, cls.names(), where)
        return cls(**values)

    @classmethod
    def renamed(cls, values: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return values by today's names of options; ``InputError`` for one under both its names."""
        today = {f.metadata["old"]: f.name for f in dataclasses.fields(cls) if f.metadata["old"]}
        for old in today.keys() & values.keys():
            told = f"{where} has {today[old]!r} and its old name {old!r}; leave the old one out"
            require(today[old] not in values, InputError, told)
        return {today.get(key, key): value for key, value in values.items()}

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read back what ``to_json`` wrote."""
        try:
            values = json.loads(text)
        except ValueError as e:
            wrote = f"{cls.__name__}.to_json"
            raise InputError(f"the configuration is not JSON ({e}); pass what {wrote} wrote") from e
        if not isinstance(values, dict):
            raise InputError(f"the configuration is {type(values).__name__}, not an object of options")
        return cls.from_dict(values)

    @classmethod
    def read_toml(cls, path: str | Path, unused: tuple[str, ...] = ()) -> dict[str, Any]:
        """Return the options in a TOML file, keys with ``-`` or ``_``, checked to be known ones.

        Errors: ``InputError`` for a missing or broken file, for unknown keys, and for those that are
        ``unused`` where the file is read.
        """
        try:
            values = tomllib.loads(Path(path).read_text("utf-8"))
        except OSError as e:
            why = e.strerror or e
            raise InputError(f"cannot read --config {path}: {why}; give a readable TOML file") from e
        except ValueError as e:
            raise InputError(
                f"--config {path} is not valid TOML: {e}; see docs/run-record.md for an example"
            ) from e
        options = cls.renamed({k.replace("-", "_"): v for k, v in values.items()}, f"--config {path}")
        for key in options:
            known(key, cls.names(), f"--config {path}")
            wrong = f"--config {path} has {key!r}, which this command does not use; leave it out"
            require(key not in unused, InputError, wrong)
        return options


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


def typed(config: Options) -> dict[str, Any]:
    """Return every field's value in its declared type; ``InputError`` where it is of another one."""
    hints = typing.get_type_hints(type(config))
    return {f.name: _coerce(f, _meant(f, config), hints[f.name]) for f in dataclasses.fields(config)}


def _meant(f: dataclasses.Field[Any], config: Options) -> Any:
    """Return a field's value; a dtype by that of its names which the field has among its choices."""
    value, choices = getattr(config, f.name), f.metadata["choices"]
    return among(value, choices) if choices and f.name.endswith("dtype") else value


def _coerce(f: dataclasses.Field[Any], value: Any, hint: Any) -> Any:
    want, name = _plain(hint), f.name
    if value is None and want is not hint:
        return None
    if want == TEXTS:  # one alone may stand without a list
        texts = [value] if isinstance(value, str) else value
        good = isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts)
        require(good, InputError, f"{flag(name)} takes text, or a list of it, not {value!r}")
        return tuple(texts)
    if want is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, want) or (isinstance(value, bool) and want is not bool):
        raise InputError(f"{flag(name)} takes {WORDS[want]}, not {value!r}")
    if want is float and not math.isfinite(value) and not f.metadata["unit"]:  # else its limits say so
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


def check_fields(config: Options) -> None:
    """Raise ``InputError`` for the first value that is unknown to its field, out of its limits, or blank."""
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if value is not None:
            _check_value(flag(f.name), value, f)


def _check_value(name: str, value: Any, f: dataclasses.Field[Any]) -> None:
    choices, limits = f.metadata["choices"], f.metadata["limits"]
    if choices and value not in choices:
        hint = nearest(str(value), choices) or f"; it can be {', '.join(choices)}"
        raise InputError(f"{name} {value!r} is unknown{hint}")
    if isinstance(value, str) and not value.strip() and f.default != "":
        raise InputError(f"{name} is empty; give a value or leave the option out")
    form, forms = f.metadata["form"]
    if form and not re.fullmatch(form, value):
        raise InputError(f"{name} {value!r} is unknown; it can be {forms}")
    given = {BOUNDS[bound]: limit for bound, limit in limits.items() if limit is not None}
    for (words, fits), limit in given.items():
        if fits(value, limit):
            continue
        if not f.metadata["unit"]:
            raise InputError(f"{name} is {value}; it must be {words} {limit}")
        first, *more = [f"{words} {limit:g}" for (words, _), limit in given.items()]
        told = ", and ".join([first + f.metadata["unit"], *more])
        raise InputError(f"{name} is {value:g}; it must be {told}")


def seconds(default: float | None, text: str, most: float = FOREVER, **more: Any) -> Any:
    """Return an option of seconds, above 0 unless ``more`` says otherwise."""
    bounds: dict[str, Any] = {"most": most, "unit": " seconds"} | ({} if "least" in more else {"above": 0})
    return option(default, "", text, metavar="SECONDS", **bounds, **more)


def token_file(panel: str = "", text: str = "File with the token that all machines share") -> Any:
    """Return the option that several commands have under this name."""
    return option(None, panel, f"{text} (or set THINWIRE_TOKEN).", metavar="FILE", free=True)


def listen_host(default: str, panel: str = "", more: str = "", **about: Any) -> Any:
    """Return the option of where to listen."""
    return option(default, panel, f"Address to listen at{more}.", metavar="ADDRESS", free=True, **about)


def listen_port(default: int | None, panel: str = "", more: str = "") -> Any:
    """Return the option of the port to listen at."""
    text = f"Port to listen at{more}; 0 takes a free one."
    return option(default, panel, text, metavar="PORT", least=0, most=65535, free=True)


def force() -> Any:
    """Return the option of what replaces what is there."""
    return option(False, "", "Put it in the place of what is there.")


def quiet(panel: str = "", text: str = "No progress display.") -> Any:
    """Return the option of what says nothing on the way."""
    return option(False, panel, text, free=True)


def congestion() -> Any:
    """Return the option of TCP's congestion control."""
    return option(AUTO, "", MEANING, metavar="NAME")


def max_gb() -> Any:
    """Return the option of the largest state to take."""
    text = "Take no larger state, so that no stranger fills the memory."
    return option(None, "", text, metavar="GB", above=0, unit=" GB")


def device(panel: str = "") -> Any:
    """Return the option of what a command computes on: what ``machine.devices.choose`` takes."""
    text = f"Where to compute: {TAKEN}; auto: a GPU where there is one. Ranks take a machine's cards in turn."
    return option(AUTO, panel, text, metavar="DEVICE", free=True, form=FORM, forms=TAKEN)


def compute_dtype(panel: str = "", default: str = AUTO, **about: Any) -> Any:
    """Return the option of what a command computes in: what ``machine.devices.pick_dtype`` takes."""
    text = "What to compute in: float32, bfloat16, float16, or bf16 for short; auto: bf16 where that is fast."
    return option(default, panel, text, metavar="NAME", choices=DTYPES, **about)


def printed(what: str, panel: str = "") -> Any:
    """Return the option of what prints a record alone."""
    return option(False, panel, f"Print {what}, and nothing else, on stdout.", free=True)
