"""Find and load finished runs: one run's folder, a comparison's folder, or several of either."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from thinwire.runs.records.run_record import INVALID, LinkInfo, RunRecord, UnitMetrics
from thinwire.runs.records.writer import COMPARE, METRICS, RUN, read_json, read_metrics
from thinwire.types import InputError

R = TypeVar("R", bound=RunRecord, covariant=True)
Reader = Callable[[Any, str], RunRecord]  # of a record's JSON values, and where they come from


@dataclass(frozen=True)
class Run(Generic[R]):
    """A run record with its units and the name it goes by in tables and plots."""

    label: str
    record: R
    metrics: list[Any] = field(default_factory=list)  # of ``record.METRICS``
    folder: Path | None = field(default=None, compare=False)  # with the files that its record names

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


def load_runs(paths: Iterable[str | Path], read: Reader) -> list[Run[RunRecord]]:
    """Load every run under ``paths``, in the order given.

    Errors: ``InputError`` for a path without a run record, and for a broken record.
    """
    loaded = [pair for path in map(Path, paths) for pair in _load(path, read)]
    folders: dict[str, list[Path]] = {}
    for folder, record in loaded:
        folders.setdefault(record.recipe.name, []).append(folder)
    return [
        Run(
            _label(record.recipe.name, folder, folders[record.recipe.name]),
            record,
            _metrics(folder, record),
            folder,
        )
        for folder, record in loaded
    ]


def _label(name: str, folder: Path, alike: Sequence[Path]) -> str:
    """Return a run's name with what tells its folder apart where ``alike``, all of that name, are several."""
    if len(alike) == 1:
        return name
    parts = folder.resolve().parts
    others = [o for other in alike if (o := other.resolve().parts) != parts]
    n = next((n for n in range(1, len(parts)) if all(o[-n:] != parts[-n:] for o in others)), len(parts))
    return f"{name} ({Path(*parts[-n:]).as_posix()})"


def _load(path: Path, read: Reader) -> list[tuple[Path, RunRecord]]:
    if path.is_file():
        return _compared(path, read) if path.name == COMPARE else [(path.parent, _record(path, read))]
    run, compared = path / RUN, path / COMPARE
    if run.exists() and compared.exists():
        raise InputError(f"{path} holds both a run and a comparison; give {run} or {compared}")
    if run.exists():
        return [(path, _record(run, read))]
    if compared.exists():
        return _compared(compared, read)
    inner = sorted(p.parent for p in path.glob(f"*/{RUN}"))
    if not inner:
        raise InputError(
            f"{path} holds no {RUN} and no {COMPARE}; give the --out folder of a train, compare or demo"
        )
    return [(folder, _record(folder / RUN, read)) for folder in inner]


def _record(file: Path, read: Reader) -> RunRecord:
    return read(read_json(file), str(file))


def _compared(file: Path, read: Reader) -> list[tuple[Path, RunRecord]]:
    """Read ``compare.json``, a list of run records in the order asked."""
    values = read_json(file)
    if not isinstance(values, list) or not values:
        raise InputError(f"{file} is no list of run records; run thinwire compare again")
    records = [read(v, f"{file}, run {i}") for i, v in enumerate(values, 1)]
    return [(file.parent / (slug(record.recipe.name) + record.suffix), record) for record in records]


def _metrics(folder: Path, record: RunRecord) -> list[UnitMetrics]:
    return read_metrics(folder, record.METRICS) if (folder / METRICS).exists() else []


def unequal(records: Sequence[RunRecord]) -> dict[str, list[str]]:
    """Return the conditions besides the recipe in which these runs differ, and their values, in order.

    Where some ended at a loss that was asked for, how many steps each took is what they are compared by.
    """
    said = [r.conditions() for r in records]
    if any(r.config.get("until_loss") is not None for r in records):
        said = [{key: value for key, value in each.items() if key != "steps"} for each in said]
    keys = dict.fromkeys(key for each in said for key in each)
    values = {key: sorted({each[key] for each in said if key in each}) for key in keys}
    return {key: each for key, each in values.items() if len(each) > 1}


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
