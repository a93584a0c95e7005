"""The page of training runs: the figures in a table, losses, where time and bytes went, links over time."""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import replace

from thinwire.runs.records.runs import Run, differences, over
from thinwire.runs.report.cards import card, dot, grid, legend, memory, run_legend, scroll
from thinwire.runs.report.details import Rows
from thinwire.runs.report.drawing import PARTS, SERIES, series_order
from thinwire.uses.training.run.record import plots, plots_link
from thinwire.uses.training.run.record.schema import Decision, TrainRecord
from thinwire.uses.training.run.record.summary import (
    COLUMNS,
    Runs,
    baseline_of,
    cells,
    headline,
    named,
    summary_rows,
    summary_table,
)

__all__ = ["cards", "folds", "headline", "setting", "summary_table", "warnings"]


def setting(runs: Runs) -> str:
    """Return what was trained, on what, over which link, in one sentence."""
    record = baseline_of(runs).record
    config = record.config
    parts = [f"{config.get('model', 'A model')} on {config.get('data', 'its data')}"]
    if config.get("replicas", 1) > 1:
        parts.append(f"{config['replicas']} replicas")
    if config.get("stages", 1) > 1:
        parts.append(f"{config['stages']} stages ({config.get('schedule', '')})")
    samples = f"{config.get('batch', '?')} × {config.get('seq', '?')} tokens"
    parts.append(f"{record.totals['steps']} steps of {samples}")
    parts.append(over([run.record for run in runs]))
    if len(runs) > 1 and not differences([run.record for run in runs]):
        parts.append("the same data order and seed for every recipe")
    return ", ".join(parts) + "."


def warnings(runs: Runs) -> list[str]:
    """Return what no record's notes say: nothing here."""
    return []


def folds(runs: Runs) -> dict[str, Rows]:
    """Return what the policy chose, one row a decision."""
    rows = [
        (
            f"{run.label}, after step {d.step}, {d.boundary} {d.direction}",
            f"{_bits(d.bits)} bits: {_reason(d)}",
        )
        for run in runs
        for d in run.record.decisions
    ]
    return {"What the policy chose": rows}


def _bits(bits: float) -> str:
    return f"{bits:.1f}" if bits >= 1 else f"{bits:.2g}"  # replicas send a part of a bit a value and step


def _reason(d: Decision) -> str:
    if d.outcome_s is None:
        return d.reason
    said = "" if d.predicted_s is None else f" {d.predicted_s:.2g} s were predicted;"
    return f"{d.reason};{said} a step took {d.outcome_s:.2g} s"


def cards(runs: Runs) -> list[str]:
    """Return the cards of training runs, in order."""
    stepped, timed = drawn(runs, lambda run: True), drawn(runs, lambda run: run.valid)
    followed = drawn(timed, plots_link.changed)
    parts = legend([(dot(f"--p{i}", box=True), name) for i, name in enumerate(PARTS)])
    figures = [
        figure("Loss against steps", "What compression costs in progress.", plots.loss_by_step, runs),
        figure("Loss against time", "What it wins on this link.", plots.loss_by_seconds, timed),
        figure("Loss against bytes sent", "The same curves, by traffic.", plots.loss_by_bytes, stepped),
        figure("Where a step's time goes", "", plots.step_time, timed, parts),
        figure("Bytes by boundary and direction", "", plots.boundary_bytes, runs),
        figure("The link over time", "Rate as the senders estimated it.", plots_link.bandwidth, followed),
        figure("Bits over time", "What was sent a value, everything included.", plots_link.bits, followed),
        figure("Waiting over time", "What the link cost.", plots_link.waiting, followed),
        memory(runs),
    ]
    return [_table(runs), run_legend(runs), grid(figures)]


def _table(runs: Runs) -> str:
    shown = summary_rows(runs)
    apart = "" if all(r.compares for r in shown) else ", where a run compares with it"
    rows = []
    for row, number in zip(shown, series_order(runs), strict=True):
        first, *rest = cells(row)
        name = dot(f"--s{number % SERIES}") + html.escape(first)
        kind = ' class="ours"' if number == 1 else ""
        rows.append(
            f"<tr{kind}><td>{name}</td>" + "".join(f"<td>{html.escape(c)}</td>" for c in rest) + "</tr>"
        )
    return card(
        "The figures",
        "Bytes sent in training over all boundaries, both directions and control traffic. "
        f"Ratios are against {next(named(r) for r in shown if r.baseline)}{apart}. "
        "Than bf16: against two bytes a value, without headers. "
        "Losses are nats a token, before → after, by uncompressed passes.",
        scroll(COLUMNS, "".join(rows)),
    )


def drawn(runs: Runs, wanted: Callable[[Run[TrainRecord]], bool]) -> list[Run[TrainRecord]]:
    """Return the runs, without steps those not ``wanted``: in its place, a run has its colour in all figures.

    Empty if that leaves nothing to draw.
    """
    kept = [run if wanted(run) else replace(run, metrics=[]) for run in runs]
    return kept if any(run.metrics for run in kept) else []


def figure(title: str, text: str, draw: Callable[[Runs], str], runs: Runs, above: str = "") -> str:
    """Return a card with a figure; nothing where there are no runs to draw."""
    return card(title, text, above + draw(runs)) if runs else ""
