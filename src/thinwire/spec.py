"""Printable specs: a frozen dataclass whose repr is its configuration, and a parser that reads it back.

A spec is written like the call that builds the object, fields at their default left out::

    Entropy(Uniform(bits=3, group=32))

Only registered names, keywords, numbers, strings, booleans and nested specs are read; nothing is evaluated.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, fields
from functools import lru_cache
from numbers import Integral, Real
from typing import Any

from thinwire.dtypes import name_of
from thinwire.types import WRONG_VALUES, InputError, PayloadError, require

MAX_LENGTH = 512  # characters; a spec travels in every packet, and a hostile one must not cost time
MAX_DEPTH = 8
NUMBERS: dict[Any, type] = {"int": int, int: int, "float": float, float: float, "bool": bool, bool: bool}
# Names, numbers, plain strings and calls: Python's parser, which warns about some texts, sees nothing else.
_TOKENS = re.compile(
    r"""(?:(?>[A-Za-z_]\w*+|\d++(?:\.\d*+)?+(?:[eE][+-]?\d++)?+(?![\w.])|'[^'\\\n]*+'|[(),=-]|\ ))*+""",
    re.ASCII,
)


class Spec:
    """Base of frozen dataclasses whose repr reads back through ``parse``.

    Numbers become Python's own, by the type a field is declared with: numpy's print otherwise, and 4.0 bits
    pass for 4 until something counts with them. Dtypes become torch's names of them. A ``__post_init__`` of
    a subclass calls this one first.
    Errors: ``InputError`` for what is no such number, or not finite.
    """

    def __post_init__(self) -> None:
        cls: type = type(self)
        for name, kind in _numbers(cls):
            value = getattr(self, name)
            if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
                object.__setattr__(self, name, _plain(name, value, kind))
        for name in _dtypes(cls):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, name_of(value))

    def __repr__(self) -> str:
        # A packet names its codecs, and none ever changes: printed once. No field, so no part of equality.
        text: str | None = self.__dict__.get("_text")
        if text is None:
            text = self.__dict__["_text"] = self._print()
        return text

    def _print(self) -> str:
        shown: list[str] = []
        for i, f in enumerate(fields(self)):  # type: ignore[arg-type]  # every Spec is a dataclass
            value = getattr(self, f.name)
            if value != _default(f):
                text = repr(value)
                shown.append(text if isinstance(value, Spec) and not i else f"{f.name}={text}")
        return f"{type(self).__name__}({', '.join(shown)})"

    __str__ = __repr__


@lru_cache(maxsize=256)
def _numbers(cls: type) -> tuple[tuple[str, type], ...]:
    return tuple((f.name, NUMBERS[f.type]) for f in fields(cls) if f.type in NUMBERS)


@lru_cache(maxsize=256)
def _dtypes(cls: type) -> tuple[str, ...]:
    return tuple(f.name for f in fields(cls) if f.name.endswith("dtype"))


def _plain(name: str, value: object, kind: type) -> int | float:
    number = not isinstance(value, bool)
    if kind is int and number and isinstance(value, Integral):
        return int(value)
    if kind is float and number and isinstance(value, Real):
        with suppress(OverflowError):  # a whole number beyond all floats
            if math.isfinite(found := float(value)):
                return found
    what = {int: "a whole number", float: "a finite number", bool: "True or False"}[kind]
    raise InputError(f"{name}={value!r} is not {what}")


def _default(f: Field[Any]) -> Any:
    if f.default is not MISSING:
        return f.default
    return f.default_factory() if f.default_factory is not MISSING else MISSING


def parse(text: str, registry: Mapping[str, type], kind: Any = object, what: str = "") -> Any:
    """Return the object a spec describes: a ``kind``, called ``what`` in errors, or one of several.

    Errors: ``PayloadError`` for anything that is not a spec over the names in ``registry``, because specs
    arrive from the wire; a caller that read the text from a user turns it into ``InputError``.
    """
    if len(text) > MAX_LENGTH:
        raise PayloadError(f"a spec of {len(text)} characters is longer than {MAX_LENGTH}")
    if not _TOKENS.fullmatch(text):
        raise PayloadError(f"not a spec: {text[:80]!r}")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as e:
        raise PayloadError(f"not a spec: {text[:80]!r}") from e
    found = _build(tree, registry, 0)
    require(isinstance(found, kind), PayloadError, f"{text[:80]!r} is not {what}")
    return found


@lru_cache(maxsize=256)
def _signature(cls: type) -> tuple[str, ...]:
    return tuple(f.name for f in fields(cls))


def _build(node: ast.expr, registry: Mapping[str, type], depth: int) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float, str, bool)):
        return node.value
    if (
        isinstance(node, ast.UnaryOp)
        and isinstance(node.op, ast.USub)
        and isinstance(node.operand, ast.Constant)
    ):
        value = node.operand.value
        if isinstance(value, (int, float)):
            return -value
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or depth > MAX_DEPTH:
        raise PayloadError("a spec may hold only names with arguments, numbers and strings")
    cls = registry.get(node.func.id)
    if cls is None:
        raise PayloadError(f"unknown name {node.func.id!r} in a spec; known: {', '.join(sorted(registry))}")
    return _call(cls, node, registry, depth)


def _call(cls: type, node: ast.Call, registry: Mapping[str, type], depth: int) -> Any:
    names = _signature(cls)
    if len(node.args) > len(names):
        raise PayloadError(f"{cls.__name__} takes {len(names)} arguments; got {len(node.args)}")
    kwargs = dict(zip(names, (_build(a, registry, depth + 1) for a in node.args), strict=False))
    for k in node.keywords:
        if k.arg is None or k.arg not in names or k.arg in kwargs:
            raise PayloadError(f"{cls.__name__} takes {', '.join(names)}; got {k.arg!r}")
        kwargs[k.arg] = _build(k.value, registry, depth + 1)
    try:
        return cls(**kwargs)
    except WRONG_VALUES as e:
        raise PayloadError(f"{cls.__name__}: {e}") from e
