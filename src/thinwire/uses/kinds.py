"""The kinds of runs that the uses leave records of: how each one's are read, and how its runs are shown."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.runs.machine.standard_streams import PLAIN_WIDTH, print_json, tell
from thinwire.runs.options import nearest
from thinwire.runs.records.writer import REPORT
from thinwire.types import InputError
from thinwire.uses import uses
from thinwire.uses.use import RunKind, Use

if TYPE_CHECKING:  # commands import this file, and their help needs none of these
    from thinwire.runs.records.finished_runs import Run
    from thinwire.runs.records.run_record import RunRecord
    from thinwire.runs.report.page import Show


@cache
def kinds() -> dict[str, tuple[Use, RunKind]]:
    """Return the kinds of runs by name, each with its use.

    >>> "replicas" in kinds()
    True
    """
    return {name: (use, kind) for use in uses() for name, kind in use.kinds.items()}


def read_record(values: Any, where: str) -> RunRecord:
    """Return the record that JSON values hold, of whatever kind; ``InputError`` names what is wrong."""
    from thinwire.runs.records.run_record import FIRST

    if not isinstance(values, dict):
        raise InputError(f"{where}: the record is not an object; run it again")
    kind = "pipeline" if values.get("schema") == FIRST else str(values.get("kind"))
    if kind not in kinds():
        raise InputError(f"{where} is of the unknown kind {kind!r}{nearest(kind, kinds())}; update thinwire")
    use, its = kinds()[kind]
    record: RunRecord = use.named(its.record).from_dict(values, where)
    return record


def load_run(path: str | Path) -> RunRecord:
    """Read ``run.json``, given the file or its folder.

    Errors: ``InputError`` where it is missing, broken or not a run record.
    """
    from thinwire.runs.records.writer import read_json, run_file

    file = run_file(path)
    return read_record(read_json(file), str(file))


def load_runs(paths: Iterable[str | Path]) -> list[Run[Any]]:
    """Load every run under ``paths``, in the order given; see ``records.finished_runs.load_runs``."""
    from thinwire.runs.records import finished_runs

    return finished_runs.load_runs(paths, read_record)


def show_of(loaded: Sequence[Run[Any]]) -> Show:
    """Return how these runs are shown; ``InputError`` where they are of several kinds."""
    found = list(dict.fromkeys(run.record.kind for run in loaded))
    if len(found) != 1:
        raise InputError(f"runs of {' and '.join(found)} have no page in common; give those of one kind")
    use, kind = kinds()[found[0]]
    show: Any = use.named(kind.show)
    return show


def print_runs(runs: Sequence[Run[Any]]) -> None:
    """Print the table of ``runs`` and what it means."""
    from rich.console import Console

    show, console = show_of(runs), Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    console.print()
    console.print(show.summary_table(runs))
    console.print()
    console.print(show.headline(runs), style="bold", highlight=False, markup=False)
    for run in runs:
        if run.record.unreached:
            console.print(
                f"{run.label}: {run.record.unreached}", highlight=False, markup=False, soft_wrap=True
            )


def finish(runs: Sequence[Run[Any]], out: Path, json_wanted: bool, records: Sequence[Any]) -> None:
    """Write the report of ``runs`` to ``out``; print their table and where it is, or the records as JSON."""
    from thinwire.runs.report.page import write_report

    report = write_report(runs, out / REPORT, show_of(runs))
    if json_wanted:
        print_json(list(records))
        return
    print_runs(runs)
    tell(f"report: {report}")
