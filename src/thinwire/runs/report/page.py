"""The report: one HTML file that opens offline and says what the runs show."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import thinwire
from thinwire.replacing import replacing
from thinwire.runs.records.finished_runs import Run
from thinwire.runs.records.run_record import RunRecord
from thinwire.runs.records.writer import REPORT, RUN, forget, write_json
from thinwire.runs.report.details import Rows, details, notes
from thinwire.runs.report.elements import card
from thinwire.types import InputError

CSS = """
:root {
  --font: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", sans-serif;
  --page: #f6f7f9; --card: #ffffff; --ink: #16202c; --muted: #5b6878; --rule: #e3e7ec; --accent: #0b7a75;
  --tint: #e8f4f3; --warn: #8a5300; --warn-tint: #fdf3e1; --bad: #b42318;
  --s0: #7d8998; --s1: #0b7a75; --s2: #d9691e; --s3: #3565c9; --s4: #a03a8c; --s5: #8c7200; --s6: #c23b4f;
    --s7: #4a4fb3;
  --p0: #9aa7b5; --p1: #0b7a75; --p2: #5bb5ae; --p3: #e09a4f; --p4: #d5dae1;
  color-scheme: light dark;
}
@media (prefers-color-scheme: dark) { :root {
  --page: #0e141b; --card: #161e28; --ink: #e6ebf1; --muted: #9aa8b8; --rule: #283442; --accent: #4fd1c5;
  --tint: #12302f; --warn: #f0c274; --warn-tint: #33270f; --bad: #ff8a80;
  --s0: #8f9cac; --s1: #4fd1c5; --s2: #ff9d57; --s3: #7ea6ff; --s4: #e08ad0; --s5: #d9bf4a; --s6: #ff8496;
    --s7: #a3a7ff;
  --p0: #66748a; --p1: #2fb3a8; --p2: #1c6f69; --p3: #d98e3f; --p4: #37434f;
} }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 var(--font); }
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 56px; }
.brand { display: flex; flex-wrap: wrap; gap: 4px 12px; align-items: baseline; color: var(--muted);
    font-size: 14px; }
.brand b { color: var(--accent); font-size: 15px; letter-spacing: .01em; }
h1 { font-size: clamp(24px, 3.6vw, 36px); line-height: 1.22; letter-spacing: -.015em; margin: 14px 0 10px;
     max-width: 27em; text-wrap: balance; font-weight: 680; }
.lede { color: var(--muted); margin: 0 0 26px; max-width: 62em; }
h2 { font-size: 16px; margin: 0 0 2px; font-weight: 640; }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 12px; padding: 18px 20px;
    margin: 0 0 18px; }
.card > p { color: var(--muted); font-size: 14px; margin: 0 0 10px; max-width: 66em; }
.grid { display: grid; gap: 18px; margin-bottom: 18px;
    grid-template-columns: repeat(auto-fit, minmax(min(100%, var(--least)), 1fr)); }
.grid .card { margin: 0; min-width: 0; }
svg { display: block; width: 100%; height: auto; overflow: visible; stroke-linejoin: round; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 15px; }
th, td { padding: 9px 12px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--rule); }
th { color: var(--muted); font-weight: 560; font-size: 13px; white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; padding-left: 4px; }
tr:last-child td { border-bottom: 0; }
td:first-child { font-weight: 600; }
tr.ours td { background: var(--tint); }
td .wide { color: var(--muted); }
.dot { display: inline-block; width: 10px; height: 10px; border-radius: 50%; margin-right: 8px; }
.dot.box { border-radius: 3px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 14px; color: var(--muted);
    margin: 0 0 14px; }
.notes { background: var(--warn-tint); border-color: transparent; color: var(--warn); }
.notes ul { margin: 4px 0 0; padding-left: 20px; } .notes li { margin: 3px 0; font-size: 14.5px; }
details { border-top: 1px solid var(--rule); padding: 12px 0; } details:first-of-type { margin-top: 10px; }
details:last-child { padding-bottom: 0; }
summary { cursor: pointer; font-weight: 580; }
details table { font-size: 14px; margin-top: 8px; }
details td, details th { text-align: left; white-space: normal; padding: 5px 10px 5px 4px;
    overflow-wrap: anywhere; }
details td:first-child { color: var(--muted); font-weight: 400; width: 15em; }
code { font: 13.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
footer { color: var(--muted); font-size: 13px; margin-top: 26px; }
@media (max-width: 560px) { main { padding: 24px 14px 40px; } .card { padding: 14px; } }
@media print { body { background: #fff; } .card { break-inside: avoid; } }
"""


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
        f"Bytes are counted on the link with all headers{_uncounted(runs)}.</footer>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>thinwire: {title}</title><style>{CSS}</style></head>\n"
        f"<body><main>\n{''.join(body)}\n</main></body></html>\n"
    )


def _uncounted(runs: Sequence[Run[Any]]) -> str:
    evaluates = any("evaluation" in run.record.bytes for run in runs)
    return "; evaluation passes and saving are uncompressed and not counted as sent" if evaluates else ""


def _warned(texts: Sequence[str]) -> str:
    items = "".join(f"<li>{html.escape(text)}</li>" for text in texts)
    return f'<section class="card notes"><h2>Read this first</h2><ul>{items}</ul></section>' if items else ""
