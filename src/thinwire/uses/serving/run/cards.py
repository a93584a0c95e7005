"""The page of served texts: how soon tokens came in each way, and the texts side by side."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from thinwire.runs.records.finished_runs import Run, over
from thinwire.runs.records.progress import megabytes
from thinwire.runs.report.details import Rows
from thinwire.runs.report.elements import card, grid, memory, table, terminal_table
from thinwire.uses.serving.run.record import ServingRecord

ServingRun = Run[ServingRecord]
COLUMNS = (
    "way",
    "first token",
    "tokens a second",
    "× bf16",
    "right drafts a trip",
    "sent",
    "equal to one machine",
)
ONE, PLAIN = "one", "bf16"
NONE = "–"


def headline(runs: Sequence[ServingRun]) -> str:
    """Return what the best way by stages is beside plain ones, good or bad."""
    plain = next((run for run in runs if run.label == PLAIN), None)
    others = [run for run in runs if run.label not in (ONE, PLAIN) and run.valid]
    if plain is None or not others or not plain.record.tokens_per_second:
        rate = runs[0].record.tokens_per_second or 0.0
        return f"{runs[0].label}: {rate:.1f} tokens a second"
    best = max(others, key=_rate)
    if not best.record.accepted:  # a trip gave one token in each way: what differs are bytes
        best = min(others, key=lambda run: run.record.bytes.get("stages", 0))
    ratio = _rate(best) / plain.record.tokens_per_second
    return f"{best.label} gives {ratio:.2f}× the tokens a second of plain bf16 stages{_fewer(best, plain)}"


def _rate(run: ServingRun) -> float:
    return run.record.tokens_per_second or 0.0


def _fewer(best: ServingRun, plain: ServingRun) -> str:
    sent, other = (run.record.bytes.get("stages", 0) for run in (best, plain))
    return f", sending {other / sent:.1f}× fewer bytes" if sent and other else ""


def setting(runs: Sequence[ServingRun]) -> str:
    """Return what was continued, by which model, over which link."""
    record = runs[-1].record
    c, link = record.config, over([record])
    if "prompt_tokens" not in c:  # whoever came asked what they liked
        return f"{record.totals.get('texts', 0):.0f} texts by {c['model']}, {c['stages']} stages over {link}."
    return (
        f"{c['texts']} prompts of {c['prompt_tokens']} tokens of {c['data']}, each continued by "
        f"{c['tokens']} tokens of {c['model']}, {c['at_once']} at a time, over {link}."
    )


def warnings(runs: Sequence[ServingRun]) -> list[str]:
    """Return what no record's notes say: that weights are random."""
    random = any(run.record.config.get("init") for run in runs)
    return ["The model has random weights, so its text says nothing."] if random else []


def folds(runs: Sequence[ServingRun]) -> dict[str, Rows]:
    """Return what crosses in each way."""
    return {"What crosses": [(run.label, run.record.recipe.spec) for run in runs]}


def cards(runs: Sequence[ServingRun]) -> list[str]:
    """Return the cards, in order."""
    text = (
        "First token and tokens a second are of texts drawn with a temperature, the median of all prompts. "
    )
    text += "Equal: the share of the likeliest tokens that are one machine's, up to the first that differs."
    shown = [card(run.label, "By the likeliest tokens:", _texts(run)) for run in runs if run.record.shown]
    figures = card("The figures", text, table(COLUMNS, _rows(runs)))
    return [figures, *([grid(shown)] if shown else []), memory(runs)]


def summary_table(runs: Sequence[ServingRun]) -> Any:
    """Return the figures for a terminal."""
    return terminal_table(COLUMNS, _rows(runs))


def _texts(run: ServingRun) -> str:
    return "".join(f"<p>… {html.escape(text)}</p>" for text in run.record.shown)


def _rows(runs: Sequence[ServingRun]) -> list[list[str]]:
    plain = next((r.record.tokens_per_second for r in runs if r.label == PLAIN), None)
    return [_row(run, plain) for run in runs]


def _row(run: ServingRun, plain: float | None) -> list[str]:
    r = run.record
    rate, first = r.tokens_per_second, r.first_token_s
    return [
        run.label,
        NONE if first is None else f"{first:.2f} s",
        NONE if rate is None else f"{rate:.1f}",
        f"{rate / plain:.2f}" if rate and plain else NONE,
        NONE if r.accepted is None or r.config.get("drafts") == "none" else f"{r.accepted:.2f}",
        megabytes(r.bytes["stages"]) if "stages" in r.bytes else NONE,
        NONE if r.equal_tokens is None else f"{r.equal_tokens:.0%}",
    ]
