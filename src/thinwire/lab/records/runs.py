"""Find and load finished runs: one run's folder, a comparison's folder, or several of either."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from thinwire.lab.options import EVERY, learning_rate
from thinwire.lab.records.writer import (
    COMPARE,
    INVALID,
    METRICS,
    RUN,
    LinkInfo,
    RunRecord,
    StepMetrics,
    load_run,
    read_json,
    read_metrics,
)
from thinwire.links.shape import LinkShape
from thinwire.types import InputError


@dataclass(frozen=True)
class Run:
    """A run record with its steps and the name it goes by in tables and plots."""

    label: str
    record: RunRecord
    metrics: list[StepMetrics] = field(default_factory=list)

    @property
    def valid(self) -> bool:
        """Whether its times may be shown: not those of an invalid measurement."""
        return self.record.status != INVALID


def slug(recipe: str) -> str:
    """Return the folder name of a recipe inside a comparison.

    >>> slug("aqsgd:fw=4,bw=8")
    'aqsgd-fw4-bw8'
    """
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", recipe.strip().replace("=", "")).strip("-.") or "run"


def load_runs(paths: Iterable[str | Path]) -> list[Run]:
    """Load every run under ``paths``, in the order given.

    Errors: ``InputError`` for a path without a run record, and for a broken record.
    """
    found: list[tuple[Path, RunRecord]] = []
    for path in map(Path, paths):
        found += _load(path)
    folders: dict[str, list[Path]] = {}
    for folder, record in found:
        folders.setdefault(record.recipe.name, []).append(folder)
    return [
        Run(_label(record.recipe.name, folder, folders[record.recipe.name]), record, _metrics(folder))
        for folder, record in found
    ]


def _label(name: str, folder: Path, alike: Sequence[Path]) -> str:
    """Return a run's name with what tells its folder apart where ``alike``, all of that name, are several."""
    if len(alike) == 1:
        return name
    parts = folder.resolve().parts
    others = [o for other in alike if (o := other.resolve().parts) != parts]
    n = next((n for n in range(1, len(parts)) if all(o[-n:] != parts[-n:] for o in others)), len(parts))
    return f"{name} ({Path(*parts[-n:]).as_posix()})"


def _load(path: Path) -> list[tuple[Path, RunRecord]]:
    if path.is_file():
        return _compared(path) if path.name == COMPARE else [(path.parent, load_run(path))]
    run, compared = path / RUN, path / COMPARE
    if run.exists() and compared.exists():
        raise InputError(f"{path} holds both a run and a comparison; give {run} or {compared}")
    if run.exists():
        return [(path, load_run(path))]
    if compared.exists():
        return _compared(compared)
    inner = sorted(p.parent for p in path.glob(f"*/{RUN}"))
    if not inner:
        raise InputError(
            f"{path} holds no {RUN} and no {COMPARE}; give the --out folder of a train, compare or demo"
        )
    return [(folder, load_run(folder)) for folder in inner]


def _compared(file: Path) -> list[tuple[Path, RunRecord]]:
    return [(file.parent / slug(record.recipe.name), record) for record in read_compare(file)]


def read_compare(file: Path) -> list[RunRecord]:
    """Read ``compare.json``, a list of run records in the order asked."""
    values = read_json(file)
    if not isinstance(values, list) or not values:
        raise InputError(f"{file} is no list of run records; run thinwire compare again")
    return [RunRecord.from_dict(v, f"{file}, run {i}") for i, v in enumerate(values, 1)]


def _metrics(folder: Path) -> list[StepMetrics]:
    return read_metrics(folder) if (folder / METRICS).exists() else []


# Options that change no figure; in any other one, runs that compare with each other are the same.
FREE = {"recipe", "out", "resume", "auto_resume", "save_model", "save_dtype", *EVERY}
FREE |= {"host", "port", "advertise", "token_file", "deadline", "tensorboard", "quiet", "json"}


def unequal(records: Sequence[RunRecord]) -> dict[str, list[str]]:
    """Return the options besides the recipe in which these runs differ, and their values, in order.

    Precision and threads count as the machine had them, whatever was asked for; and so does its processor.
    """
    said = [_conditions(r) for r in records]
    keys = dict.fromkeys(key for each in said for key in each)
    found = {key: sorted({each[key] for each in said if key in each}) for key in keys}
    return {key: values for key, values in found.items() if len(values) > 1}


def _conditions(record: RunRecord) -> dict[str, str]:
    there = record.environment
    had = {key: there.get(key) for key in ("dtype", "threads")}
    had["processor"] = (there.get("machine") or {}).get("cpu")
    asked = {key: _said(key, record) for key in record.config if key not in FREE}
    return asked | {key: str(value) for key, value in had.items() if value is not None}


def _said(key: str, record: RunRecord) -> str:
    """Return an option's value in words, the same ones however it was asked for."""
    if key == "lr":
        return str(learning_rate(record.config))
    value = str(record.config[key])
    if key != "link":
        return value
    try:
        return str(LinkShape.parse(value))
    except InputError:  # one of an emulated network: two traces of one name need not be the same
        return value


def differences(records: Sequence[RunRecord]) -> list[str]:
    """Return what makes these runs unequal besides the recipe, one sentence each."""
    return [
        f"these runs differ in {key} ({', '.join(values)}), so their figures do not compare."
        for key, values in unequal(records).items()
    ]


def over(records: Sequence[RunRecord]) -> str:
    """Return the links of these runs in words, each with what made it slow and what that leaves out."""

    def words(link: LinkInfo) -> str:
        asked = "an unshaped link" if link.asked == "none" else f"a link of {link.asked}"
        return asked if link.emulation == "none" else f"{asked} ({link.emulation})"

    return " or ".join(dict.fromkeys(words(r.link) for r in records))
