"""What commands print: results on stdout, words for people on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from thinwire.lab.engines import show_of
from thinwire.lab.records.writer import REPORT

if TYPE_CHECKING:
    from thinwire.lab.records.runs import Run

PLAIN_WIDTH = 120  # columns where nobody's terminal says otherwise


def print_json(value: Any) -> None:
    """Print one JSON document on stdout, and nothing else."""
    sys.stdout.write(json.dumps(value, indent=1, allow_nan=False) + "\n")


def print_runs(runs: Sequence[Run[Any]]) -> None:
    """Print the table of ``runs`` and what it means."""
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
    from thinwire.lab.report.page import write_report

    report = write_report(runs, out / REPORT, show_of(runs))
    if json_wanted:
        print_json(list(records))
        return
    print_runs(runs)
    tell(f"report: {report}")


def tell(text: str) -> None:
    """Print a line for people on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
