"""What a recipe is, and the list of all: functions with checked parameters, registered by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, ParamSpec, get_type_hints

from thinwire.channels.channel import Scheme
from thinwire.policies.base import Policy
from thinwire.types import InputError

P = ParamSpec("P")
Value = int | float | str | None
Schemes = tuple[Scheme, Scheme] | tuple[Scheme, Scheme, Policy]


@dataclass(frozen=True)
class Recipe:
    """A scheme for activations, one for gradients, and the name they go by.

    Where there is a ``policy``, it replaces the schemes' codecs as the run goes on.
    """

    name: str
    forward: Scheme
    backward: Scheme
    summary: str = field(default="", compare=False)
    policy: Policy | None = field(default=None, repr=False)

    @property
    def spec(self) -> str:
        """Both schemes, printed so that ``parse_recipe`` reads them back."""
        return f"forward={self.forward!r}, backward={self.backward!r}"


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

    def accepts(self, value: Value) -> bool:
        if self.choices or isinstance(value, str):
            return value in self.choices
        if value is None:
            return self.default is None
        return self.low <= value <= self.high and (not self.whole or value == int(value))


@dataclass(frozen=True)
class RecipeInfo:
    """What is known of a recipe before it is built."""

    name: str
    summary: str
    source: str
    parameters: dict[str, Parameter]
    build: Callable[..., Recipe] = field(repr=False)


RECIPES: dict[str, RecipeInfo] = {}


def register(name: str, summary: str, source: str) -> Callable[[Callable[P, Schemes]], Callable[P, Recipe]]:
    """Register a function that returns two schemes, perhaps a policy, with its parameters checked."""

    def decorate(schemes: Callable[P, Schemes]) -> Callable[P, Recipe]:
        signature, parameters = inspect.signature(schemes), _parameters(schemes)

        @wraps(schemes)
        def build(*args: P.args, **kwargs: P.kwargs) -> Recipe:
            given = signature.bind(*args, **kwargs).arguments
            _check(name, parameters, given)
            shown = [f"{k}={v}" for k, v in given.items() if v != parameters[k].default]
            forward, backward, *policy = schemes(*args, **kwargs)
            text = f"{name}:{','.join(shown)}" if shown else name
            return Recipe(text, forward, backward, summary, *policy)

        RECIPES[name] = RecipeInfo(name, summary, source, parameters, build)
        return build

    return decorate


def _parameters(schemes: Callable[..., Schemes]) -> dict[str, Parameter]:
    hints = get_type_hints(schemes, include_extras=True)
    return {
        k: replace(hints[k].__metadata__[0], default=p.default)
        for k, p in inspect.signature(schemes).parameters.items()
    }


def _check(name: str, parameters: Mapping[str, Parameter], given: Mapping[str, Any]) -> None:
    for k, value in given.items():
        if not parameters[k].accepts(value):
            raise InputError(
                f"{name}: {k}={value} is not {parameters[k].values}; {k} is {parameters[k].meaning}"
            )
