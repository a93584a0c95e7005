"""``thinwire report``: draw runs that are already there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thinwire.runs.machine.standard_streams import print_json, tell
from thinwire.runs.records.writer import REPORT
from thinwire.uses.kinds import load_runs, print_runs, show_of

Paths = Annotated[
    list[Path], typer.Argument(metavar="PATH...", help="Folders of runs or comparisons, as --out named them.")
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="FILE.html", help="Where to write it (default: report.html in the first folder)."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the run records, and nothing else, on stdout.")]


def report(paths: Paths, out: Out = None, json: Json = False) -> None:
    """Write one self-contained report.html from the records of runs, and print their table.

    [bold]Examples[/bold]

    thinwire report runs/demo

    thinwire report runs/a runs/b --out ab.html
    """
    from thinwire.runs.report.page import write_report

    runs = load_runs(paths)
    first = paths[0] if paths[0].is_dir() else paths[0].parent
    target = write_report(runs, out or first / REPORT, show_of(runs))
    if json:
        print_json([run.record.to_dict() for run in runs])
        return
    print_runs(runs)
    tell(f"report: {target}")
