"""Build dataclasses from JSON values, with errors that name the field."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any, TypeVar

from thinwire.types import MAX_KEY, InputError

T = TypeVar("T")


def build(cls: type[T], values: Any, where: str, prefix: str = "") -> T:
    """Return ``cls`` made from a JSON object. Unknown keys are left out, for records of later versions.

    Errors: ``InputError`` that names ``where`` and the dotted field.
    """
    if not isinstance(values, dict):
        raise InputError(f"{where}: {prefix.rstrip('.') or 'the record'} is not an object; run it again")
    hints = typing.get_type_hints(cls)
    kwargs = {}
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]  # only dataclasses are built
        name = prefix + f.name
        if f.name in values:
            kwargs[f.name] = _value(hints[f.name], values[f.name], where, name)
        elif _required(f, hints[f.name], top=prefix == ""):
            raise InputError(f"{where} lacks {name!r}, so it is no complete run record; run it again")
    return cls(**kwargs)


def _required(f: dataclasses.Field[Any], hint: Any, top: bool) -> bool:
    """Return whether a record cannot be without a field: at the top, not without its objects of numbers."""
    if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
        return True
    counts = typing.get_origin(hint) is dict and typing.get_args(hint)[1] is not Any
    return top and (counts or dataclasses.is_dataclass(hint))


def _value(hint: Any, value: Any, where: str, name: str) -> Any:
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, where, name + ".")
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        hint = next(h for h in typing.get_args(hint) if h is not type(None))
    origin = typing.get_origin(hint)
    if origin is list:
        _expect(value, list, where, name)
        (inner,) = typing.get_args(hint)
        return [_value(inner, v, where, f"{name}[{i}]") for i, v in enumerate(value)]
    if origin is dict:
        _expect(value, dict, where, name)
        _, inner = typing.get_args(hint)
        return {k: _value(inner, v, where, f"{name}.{k}") for k, v in value.items()}
    return _number(value, where, name) if hint is float else _expect(value, hint, where, name)


def _number(value: Any, where: str, name: str) -> float:
    if value is None:  # a loss that was not finite
        return math.nan
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{where}: {name!r} is {str(value)[:40]!r}, not a number; run it again")
    return _expect(value, type(value), where, name)  # a count that is whole stays so


def _expect(value: Any, kind: type, where: str, name: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise InputError(
            f"{where}: {name!r} is {str(value)[:40]!r}, not of type {kind.__name__}; run it again"
        )
    if isinstance(value, int) and abs(value) >= MAX_KEY:  # no float, and no figure, could show it
        raise InputError(f"{where}: {name!r} is {str(value)[:20]}..., beyond 2**63; run it again")
    return value
