"""What a host is asked for, by name: its classes, their methods, and the parameters of each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

# By class and method: the parameters behind ``self`` or ``cls``.
Called = Mapping[str, Mapping[str, tuple[str, ...]]]


def lacking(called: Called, found: Mapping[str, Mapping[str, Sequence[str]]]) -> Iterator[str]:
    """Yield the methods of ``called`` that are not in ``found``, or take other parameters there.

    >>> list(lacking({"Engine": {"send": ("weights",)}}, {"Engine": {"send": ["weights", "step"]}}))
    ['Engine.send']
    """
    for name, methods in called.items():
        for method, parameters in methods.items():
            if tuple(found.get(name, {}).get(method, ("?",))) != parameters:
                yield f"{name}.{method}"


def signatures(called: Called, owner: Callable[[str], Any]) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return the parameters of all methods in ``called`` that are there; ``owner``: a class by its name."""
    found = dict[str, dict[str, tuple[str, ...]]]()
    for name, methods in called.items():
        there = {method: getattr(owner(name), method, None) for method in methods}
        found[name] = {method: parameters(f) for method, f in there.items() if callable(f)}
    return found


def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a method's parameters.

    >>> parameters(lambda self, weights: None)
    ('weights',)
    """
    return tuple(name for name in inspect.signature(function).parameters if name not in ("self", "cls"))
