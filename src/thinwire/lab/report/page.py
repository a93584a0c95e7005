"""The report: one HTML file that opens offline and says what the runs show."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import thinwire
from thinwire.lab.records.progress import megabytes
from thinwire.lab.records.runs import Run, differences, over
from thinwire.lab.records.summary import COLUMNS, baseline_of, cells, headline, named, summary_rows
from thinwire.lab.report import plots, plots_link
from thinwire.lab.report.details import details, notes
from thinwire.lab.report.drawing import PARTS, SERIES, series_order
from thinwire.lab.report.style import CSS
from thinwire.replacing import replacing
from thinwire.types import InputError


def write_report(runs: Sequence[Run], path: str | Path) -> Path:
    """Write the report of ``runs`` to ``path``, atomically, and return it.

    Errors: ``InputError`` for no runs; ``MissingExtra`` without matplotlib.
    """
    target = Path(path)
    text = report_html(runs)
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as temporary:
        temporary.write_text(text, "utf-8")
    return target


def report_html(runs: Sequence[Run]) -> str:
    """Return the report as one self-contained HTML page."""
    if not runs:
        raise InputError("there are no runs to report; give the folder of at least one")
    title = headline(runs)
    body = [
        _head(runs, title),
        _notes(runs),
        _table(runs),
        _figures(runs),
        _card("How these runs were made", "", details(runs)),
        f"<footer>Made by thinwire {thinwire.__version__} from run.json and metrics.jsonl of each run. "
        "Bytes are counted on the link with all headers; evaluation passes and saving are uncompressed and "
        "not counted as sent.</footer>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>thinwire: {html.escape(title)}</title><style>{CSS}</style></head>\n"
        f"<body><main>\n{''.join(body)}\n</main></body></html>\n"
    )


def _head(runs: Sequence[Run], title: str) -> str:
    record = runs[0].record
    return (
        f'<div class="brand"><b>thinwire</b><span>run report, {html.escape(record.started[:10])}</span></div>'
        f'<h1>{html.escape(title)}</h1><p class="lede">{html.escape(_setting(runs))}</p>'
    )


def _setting(runs: Sequence[Run]) -> str:
    record = baseline_of(runs).record
    config = record.config
    parts = [f"{config.get('model', 'A model')} on {config.get('data', 'its data')}"]
    if config.get("stages"):
        parts.append(f"{config['stages']} stages ({config.get('schedule', '')})")
    parts.append(
        f"{record.totals.steps} steps of {config.get('batch', '?')} × {config.get('seq', '?')} tokens"
    )
    parts.append(over([run.record for run in runs]))
    if len(runs) > 1 and not differences([run.record for run in runs]):
        parts.append("the same data order and seed for every recipe")
    return ", ".join(parts) + "."


def _notes(runs: Sequence[Run]) -> str:
    found = notes(runs)
    if not found:
        return ""
    items = "".join(f"<li>{html.escape(text)}</li>" for text in found)
    return f'<section class="card notes"><h2>Read this first</h2><ul>{items}</ul></section>'


def _dot(variable: str, box: bool = False) -> str:
    return f'<span class="dot{" box" if box else ""}" style="background:var({variable})"></span>'


def _table(runs: Sequence[Run]) -> str:
    head, found = "".join(f"<th>{html.escape(c)}</th>" for c in COLUMNS), summary_rows(runs)
    apart = "" if all(r.compares for r in found) else ", where a run compares with it"
    rows = []
    for row, number in zip(found, series_order(runs), strict=True):
        first, *rest = cells(row)
        name = _dot(f"--s{number % SERIES}") + html.escape(first)
        kind = ' class="ours"' if number == 1 else ""
        rows.append(
            f"<tr{kind}><td>{name}</td>" + "".join(f"<td>{html.escape(c)}</td>" for c in rest) + "</tr>"
        )
    return _card(
        "The figures",
        "Bytes sent in training over all boundaries, both directions and control traffic. "
        f"Ratios are against {next(named(r) for r in found if r.baseline)}{apart}. "
        "Losses are nats a token, before → after, by uncompressed passes.",
        _scroll(head, "".join(rows)),
    )


def _scroll(head: str, rows: str) -> str:
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _card(title: str, text: str, body: str) -> str:
    words = f"<p>{html.escape(text)}</p>" if text else ""
    return f'<section class="card"><h2>{html.escape(title)}</h2>{words}{body}</section>\n'


def _figures(runs: Sequence[Run]) -> str:
    stepped, timed = _drawn(runs, lambda run: True), _drawn(runs, lambda run: run.valid)
    followed = _drawn(timed, plots_link.changed)
    cards = [
        _figure("Loss against steps", "What compression costs in progress.", plots.loss_by_step, runs),
        _figure("Loss against time", "What it wins on this link.", plots.loss_by_seconds, timed),
        _figure("Loss against bytes sent", "The same curves, by traffic.", plots.loss_by_bytes, stepped),
        _figure("Where a step's time goes", "", plots.step_time, timed, _parts_legend()),
        _figure("Bytes by boundary and direction", "", plots.boundary_bytes, runs),
        _figure("The link over time", "Rate as the senders estimated it.", plots_link.bandwidth, followed),
        _figure("Bits over time", "What was sent a value, everything included.", plots_link.bits, followed),
        _figure("Waiting over time", "What the link cost.", plots_link.waiting, followed),
        _memory(runs),
    ]
    return _legend(runs) + f'<div class="grid">{"".join(cards)}</div>'


def _drawn(runs: Sequence[Run], wanted: Callable[[Run], bool]) -> list[Run]:
    """Return the runs, without steps those not ``wanted``: in its place, a run has its colour in all figures.

    Empty if that leaves nothing to draw.
    """
    kept = [run if wanted(run) else replace(run, metrics=[]) for run in runs]
    return kept if any(run.metrics for run in kept) else []


def _figure(
    title: str, text: str, draw: Callable[[Sequence[Run]], str], runs: Sequence[Run], legend: str = ""
) -> str:
    return _card(title, text, legend + draw(runs)) if runs else ""


def _legend(runs: Sequence[Run]) -> str:
    if len(runs) < 2:
        return ""
    chips = "".join(
        f"<span>{_dot(f'--s{number % SERIES}')}{html.escape(run.label)}</span>"
        for run, number in zip(runs, series_order(runs), strict=True)
    )
    return f'<div class="legend">{chips}</div>'


def _parts_legend() -> str:
    chips = "".join(f"<span>{_dot(f'--p{i}', box=True)}{name}</span>" for i, name in enumerate(PARTS))
    return f'<div class="legend">{chips}</div>'


def _memory(runs: Sequence[Run]) -> str:
    if not any(run.record.memory.peak_rss_bytes for run in runs):
        return ""
    ranks = max(len(run.record.memory.peak_rss_bytes) for run in runs)
    head = "<th>recipe</th>" + "".join(f"<th>rank {i}</th>" for i in range(ranks))
    rows = "".join(
        f"<tr><td>{html.escape(run.label)}</td>"
        + "".join(f"<td>{megabytes(n)}</td>" for n in run.record.memory.peak_rss_bytes)
        + "</tr>"
        for run in runs
    )
    return _card("Peak memory of each process", "Largest resident set, all included.", _scroll(head, rows))
