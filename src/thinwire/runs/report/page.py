"""The report: one HTML file that opens offline and says what the runs show."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import thinwire
from thinwire.replacing import replacing
from thinwire.runs.records.runs import Run
from thinwire.runs.records.schema import RunRecord
from thinwire.runs.records.writer import REPORT, RUN, forget, write_json
from thinwire.runs.report.cards import card
from thinwire.runs.report.details import Rows, details, notes
from thinwire.runs.report.style import CSS
from thinwire.types import InputError


class Show(Protocol):
    """How the runs of an engine are shown: a module of its own, with these functions."""

    def headline(self, runs: Sequence[Run[Any]]) -> str:
        """Return what the runs show, good or bad, in one sentence."""
        ...

    def setting(self, runs: Sequence[Run[Any]]) -> str:
        """Return what was run, on what, over which link, in one sentence."""
        ...

    def cards(self, runs: Sequence[Run[Any]]) -> list[str]:
        """Return the engine's cards as HTML, in order."""
        ...

    def warnings(self, runs: Sequence[Run[Any]]) -> list[str]:
        """Return what a reader must know that no record's notes say."""
        ...

    def folds(self, runs: Sequence[Run[Any]]) -> dict[str, Rows]:
        """Return the engine's own rows of the details, by title."""
        ...

    def summary_table(self, runs: Sequence[Run[Any]]) -> Any:
        """Return the table of the runs for a terminal, as a Rich renderable."""
        ...


def write_report(runs: Sequence[Run[Any]], path: str | Path, show: Show) -> Path:
    """Write the report of ``runs`` to ``path``, atomically, and return it.

    Errors: ``InputError`` for no runs; ``MissingExtra`` without matplotlib.
    """
    target = Path(path)
    text = report_html(runs, show)
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as temporary:
        temporary.write_text(text, "utf-8", "replace")  # a path may be of other bytes
    return target


def leave_report(folder: Path, record: RunRecord, show: Show) -> Path:
    """Write ``run.json`` and ``report.html`` of a run that is over to its folder; return the last."""
    forget(folder, REPORT)
    write_json(folder / RUN, record.to_dict())
    return write_report([Run(record.recipe.name, record, folder=folder)], folder / REPORT, show)


def report_html(runs: Sequence[Run[Any]], show: Show) -> str:
    """Return the report as one self-contained HTML page."""
    if not runs:
        raise InputError("there are no runs to report; give the folder of at least one")
    title, day = html.escape(show.headline(runs)), html.escape(runs[0].record.started[:10])
    body = [
        f'<div class="brand"><b>thinwire</b><span>run report, {day}</span></div>'
        f'<h1>{title}</h1><p class="lede">{html.escape(show.setting(runs))}</p>',
        _warned([*notes(runs), *show.warnings(runs)]),
        *show.cards(runs),
        card("How these runs were made", "", details(runs, show.folds(runs))),
        f"<footer>Made by thinwire {thinwire.__version__} from run.json and metrics.jsonl of each run. "
        "Bytes are counted on the link with all headers; evaluation passes and saving are uncompressed and "
        "not counted as sent.</footer>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>thinwire: {title}</title><style>{CSS}</style></head>\n"
        f"<body><main>\n{''.join(body)}\n</main></body></html>\n"
    )


def _warned(texts: Sequence[str]) -> str:
    items = "".join(f"<li>{html.escape(text)}</li>" for text in texts)
    return f'<section class="card notes"><h2>Read this first</h2><ul>{items}</ul></section>' if items else ""
