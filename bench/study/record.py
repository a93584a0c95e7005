"""The tables of docs/run-record.md, from the classes that write and read the records."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

from bench.study.tables import Draw
from thinwire.runs.machine.processor import environment
from thinwire.runs.options import Options
from thinwire.runs.records.run_record import RunRecord, UnitMetrics
from thinwire.uses.kinds import kinds

WORDS = {str: "text", float: "number", int: "integer", bool: "true or false", Any: "any"}
MACHINE = {
    "versions": "versions of thinwire, Python and the packages a result depends on; `null` if not installed",
    "machine.cpu": "the processor's name",
    "machine.cores": "cores this process may use",
    "machine.memory_bytes": "the machine's memory",
    "machine.platform": "operating system and architecture",
    "devices": "what each rank computed on, in rank order: `device`, such as `cpu` or `cuda:0`, and `name`; "
    "of a card also `memory_bytes`, `capability`, `cuda`, `driver` and `triton`",
    "dtype": "`fp32`, or `bf16` or `fp16` for autocast: what `--dtype auto` picked",
    "dtype_reason": "why",
    "threads": "compute threads of a rank",
}
HEAD = ["| key | meaning |", "|---|---|"]
Row = tuple[str, str, str]


def _words(hint: Any) -> str:
    """Return a type in words."""
    if isinstance(hint, types.UnionType):
        return " or ".join(_words(h) if h is not type(None) else "null" for h in typing.get_args(hint))
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        return "list" if dataclasses.is_dataclass(inner[0]) else f"list of {_words(inner[0])}"
    return "object" if origin is dict or dataclasses.is_dataclass(hint) else WORDS[hint]


def _rows(cls: type, names: list[str] | None = None, prefix: str = "") -> Iterator[Row]:
    """Yield key, type and meaning of a record's fields, those of inner objects included."""
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        if "meaning" not in f.metadata or (names is not None and f.name not in names):
            continue
        hint, key = hints[f.name], prefix + f.name
        inner = next((h for h in (hint, *_inner(hint)) if dataclasses.is_dataclass(h)), None)
        if inner is None or inner is not hint:
            yield key, _words(hint), f.metadata["meaning"]
        if inner is not None:
            yield from _rows(typing.cast(type, inner), None, f"{key}." if inner is hint else f"{key}[].")


def _inner(hint: Any) -> tuple[Any, ...]:
    """Return what a list, a mapping or a union is of, however deep."""
    return tuple(h for arg in typing.get_args(hint) for h in (arg, *_inner(arg)))


def _record(kind: str) -> type[RunRecord]:
    use, its = kinds()[kind]
    found: type[RunRecord] = use.named(its.record)
    return found


def _own(cls: type, base: type) -> list[str]:
    shared = {f.name for f in dataclasses.fields(base)}
    return [f.name for f in dataclasses.fields(cls) if f.name not in shared]


def _table(rows: Iterator[Row]) -> str:
    lines = ["| key | type | meaning |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| `{key}` | {kind} | {meaning} |" for key, kind, meaning in rows)])


def machine() -> str:
    """Return the table of a record's environment."""
    have = environment("fp32", 1)
    flat = {f"{k}.{n}" for k, v in have.items() if k == "machine" for n in v} | (have.keys() - {"machine"})
    if flat != MACHINE.keys():
        raise ValueError(f"describe {flat ^ MACHINE.keys()} in bench/study/record.py")
    return "\n".join([*HEAD, *(f"| `environment.{k}` | {v} |" for k, v in MACHINE.items())])


def sections(kind: str) -> str:
    """Return the table of an engine's keys: of the envelope's objects, then its own sections."""
    cls = _record(kind)
    base = next(c for c in cls.__mro__[1:] if issubclass(c, RunRecord))
    told = getattr(base, "KEYS", {})
    keys = ((key, "number", meaning) for key, meaning in cls.KEYS.items() if key not in told)
    return _table(iter([*keys, *_rows(cls, _own(cls, base))]))


def units(kind: str) -> str:
    """Return the table of an engine's own keys of a line of the metrics."""
    metrics = _record(kind).METRICS
    return _table(_rows(metrics, _own(metrics, UnitMetrics)))


def options(kind: str) -> str:
    """Return the table of an engine's configuration."""
    return "\n".join([*HEAD, *_options(_record(kind).CONFIG)])


def _options(cls: type[Options]) -> Iterator[str]:
    for f in dataclasses.fields(cls):
        told = f.metadata["help"]
        said = "" if f.default in (None, "") or "default" in told else f" Default: {f.default}."
        yield f"| `config.{f.name}` | {told}{said} |"


def _engine(kind: str) -> Iterator[tuple[str, Callable[[str], str]]]:
    """Yield an engine's tables: of lines and options only where it has its own."""
    cls = _record(kind)
    base = cls.__mro__[1]  # replicas have the options and lines of pipelines
    yield "sections", sections
    if cls.METRICS is not getattr(base, "METRICS", None):  # a packed scene is no run of several units
        yield "units", units
    if cls.CONFIG is not getattr(base, "CONFIG", None):
        yield "options", options


TABLES: dict[str, Draw] = {
    "record": lambda _: _table(_rows(RunRecord)),
    "record-lines": lambda _: _table(_rows(UnitMetrics)),
    "record-environment": lambda _: machine(),
    **{
        f"record-{kind}-{name}": lambda _, kind=kind, draw=draw: draw(kind)
        for kind in kinds()
        for name, draw in _engine(kind)
    },
}
