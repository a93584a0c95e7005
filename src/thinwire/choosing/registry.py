"""What a recipe is, and the registry of an engine's: functions with checked parameters, by name."""

from __future__ import annotations

import difflib
import inspect
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, Generic, ParamSpec, TypeVar, get_type_hints

from thinwire import codecs, spec
from thinwire.channels import memory
from thinwire.channels.channel import Scheme
from thinwire.dtypes import among
from thinwire.types import InputError, PayloadError, require

A = ParamSpec("A")
S = TypeVar("S")  # what a role maps to: how an engine sends in that role
P = TypeVar("P")  # the engine's policy, or None where it has none
Made = Mapping[str, S] | tuple[Mapping[str, S], P]  # what a function registered returns
Value = int | float | str | None


@dataclass(frozen=True)
class Recipe(Generic[S, P]):
    """How an engine sends, by role, and the name that goes by.

    A ``policy`` says what schemes do not: which codecs replace theirs as a run goes on, or who does what.
    """

    name: str
    schemes: Mapping[str, S] = field(hash=False)
    summary: str = field(default="", compare=False)
    policy: P | None = field(default=None, repr=False)

    @property
    def spec(self) -> str:
        """All schemes, printed so that the engine's registry reads them back."""
        return ", ".join(f"{role}={scheme!r}" for role, scheme in self.schemes.items())


@dataclass(frozen=True)
class Parameter:
    """A knob of a recipe: what it does, which values it takes, and its default."""

    meaning: str
    low: float = 0
    high: float = 1
    choices: tuple[str, ...] = ()
    whole: bool = True
    default: Value = None

    @property
    def values(self) -> str:
        """The values it takes, in words."""
        if self.choices:
            return f"{', '.join(self.choices[:-1])} or {self.choices[-1]}"
        return f"{'a whole number' if self.whole else 'a number'} in {self.low:g}..{self.high:g}"

    def read(self, text: str) -> Value:
        """Return the value that ``text`` stands for; text that stands for none comes back as it is."""
        if self.choices:
            return text
        try:
            return int(text) if self.whole else float(text)
        except ValueError:
            return text

    def meant(self, value: Value) -> Value:
        """Return a value as it is called here: a dtype may have other names, or be torch's own."""
        given = value is not None and self.choices and value not in self.choices
        return among(value, self.choices) if given else value

    def accepts(self, value: Value) -> bool:
        if value is None:
            return self.default is None
        if self.choices or isinstance(value, str):
            return value in self.choices
        return self.low <= value <= self.high and (not self.whole or value == int(value))


@dataclass(frozen=True)
class RecipeInfo(Generic[S, P]):
    """What is known of a recipe before it is built."""

    name: str
    summary: str
    source: str
    parameters: dict[str, Parameter]
    build: Callable[..., Recipe[S, P]] = field(repr=False)

    def read(self, text: str) -> dict[str, Value]:
        """Return the parameters that ``k=v,...`` gives; ``InputError`` for one that there is not."""
        given: dict[str, Value] = {}
        for word in filter(None, (w.strip() for w in text.split(","))):
            key, equals, value = (part.strip() for part in word.partition("="))
            wrong = f"{self.name}: {word!r} is no parameter=value; write {self.name}:k=v,..."
            require(bool(equals), InputError, wrong)
            if key not in self.parameters:
                known = f"it takes {', '.join(self.parameters)}" if self.parameters else "it takes none"
                raise InputError(f"recipe {self.name} has no parameter {key!r}; {known}")
            require(key not in given, InputError, f"{self.name}: {key} is given twice; leave one out")
            given[key] = self.parameters[key].read(value)
        return given


class Registry(Generic[S, P]):
    """The recipes of one engine.

    ``roles`` are those in which the engine sends; a scheme is of one of ``kinds``, whose specs may name
    these, ``parts``, codecs, memories and ``Scheme``.
    """

    def __init__(
        self,
        engine: str,
        roles: tuple[str, ...],
        kinds: tuple[type[S], ...],
        parts: tuple[type, ...] = (),
    ) -> None:
        self.engine, self.roles = engine, roles
        self.entries: dict[str, RecipeInfo[S, P]] = {}
        self._kinds, self._scheme = kinds, f"{kinds[0].__name__}(...)"
        own = {kind.__name__: kind for kind in (*kinds, *parts, Scheme)}
        self._known = ChainMap[str, type](own, codecs.REGISTRY, memory.REGISTRY)

    def register(
        self, name: str, summary: str, source: str
    ) -> Callable[[Callable[A, Made[S, P]]], Callable[A, Recipe[S, P]]]:
        """Register a function that returns a scheme for each role, perhaps with a policy."""

        def decorate(function: Callable[A, Made[S, P]]) -> Callable[A, Recipe[S, P]]:
            signature, parameters = inspect.signature(function), _parameters(function)

            @wraps(function)
            def build(*args: A.args, **kwargs: A.kwargs) -> Recipe[S, P]:
                bound = signature.bind(*args, **kwargs)
                given = bound.arguments
                given.update({k: parameters[k].meant(v) for k, v in given.items()})
                _check(name, parameters, given)
                shown = [f"{k}={v}" for k, v in given.items() if v != parameters[k].default]
                made = function(*bound.args, **bound.kwargs)
                schemes, policy = made if isinstance(made, tuple) else (made, None)
                return Recipe(f"{name}:{','.join(shown)}" if shown else name, schemes, summary, policy)

            self.entries[name] = RecipeInfo(name, summary, source, parameters, build)
            return build

        return decorate

    def parse(self, text: str) -> Recipe[S, P]:
        """Return the recipe that ``name``, ``name:parameter=value,...`` or a printed ``spec`` stands for.

        Errors: ``InputError``, one sentence that names the unknown or wrong word and what would be right;
        ``MissingExtra`` where the recipe needs a package that is not installed.
        """
        if text.startswith(f"{self.roles[0]}="):
            return self._from_spec(text)
        name, colon, rest = text.strip().partition(":")
        info = self.entries.get(name)
        if info is None:
            near = difflib.get_close_matches(name, self.entries, 1, 0.5)
            hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(self.entries)}"
            raise InputError(f"there is no recipe {name!r}; {hint}")
        require(
            bool(rest.strip()) or not colon,
            InputError,
            f"recipe {text!r} has no parameters behind its colon; "
            f"write {name} alone, or {name}:parameter=value",
        )
        return info.build(**info.read(rest))

    def _from_spec(self, text: str) -> Recipe[S, P]:
        schemes, rest = dict[str, S](), text.removeprefix(f"{self.roles[0]}=")
        try:
            for role, after in zip(self.roles, (*self.roles[1:], None), strict=True):
                own, _, rest = rest.partition(f", {after}=") if after else (rest, "", "")
                schemes[role] = spec.parse(own, self._known, self._kinds, self._scheme)
        except (PayloadError, InputError) as e:
            form = ", ".join(f"{role}={self._scheme}" for role in self.roles)
            raise InputError(f"not a recipe's spec, {form}: {e}") from e
        return Recipe("custom", schemes)


def _parameters(function: Callable[..., object]) -> dict[str, Parameter]:
    hints = get_type_hints(function, include_extras=True)
    return {
        k: replace(hints[k].__metadata__[0], default=p.default)
        for k, p in inspect.signature(function).parameters.items()
    }


def _check(name: str, parameters: Mapping[str, Parameter], given: Mapping[str, Any]) -> None:
    for k, value in given.items():
        if not parameters[k].accepts(value):
            raise InputError(
                f"{name}: {k}={value} is not {parameters[k].values}; {k} is {parameters[k].meaning}"
            )
