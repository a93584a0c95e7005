"""The figures of a comparison: one row a run, and the sentence that says what they mean.

The terminal's table, the report and every other page take their numbers from here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from thinwire.runs.records.finished_runs import Run, over, unequal
from thinwire.runs.records.progress import megabytes
from thinwire.runs.records.run_record import INVALID
from thinwire.runs.report.elements import terminal_table
from thinwire.uses.training.run.record import TrainRecord

if TYPE_CHECKING:
    from rich.table import Table

Runs = Sequence[Run[TrainRecord]]
EXACT = ("fp32", "allreduce", "fp32/allreduce")
SAME_LOSS = 0.005  # a held-out loss within 0.5 % of the baseline's counts as the same
APART = 0.1  # a first pass is named where its ratio differs by more
NOTHING, PART, WHOLE = range(3)  # what a record shows of its run: an invalid one lacks times alone
DASH = "–"


@dataclass(frozen=True)
class Row:
    """One run against the baseline. Bytes are training's, control included, evaluation left out."""

    label: str
    recipe: str
    shows: int  # NOTHING, PART or WHOLE
    sent: int
    fewer: float | None
    than_bf16: float | None  # times fewer bytes than two a value
    first_pass: float | None  # the same, of the first pass alone
    bits_forward: float | None
    bits_backward: float | None
    step_seconds: float | None
    faster: float | None
    eval_first: float | None
    eval_final: float | None
    train_eval_final: float | None
    baseline: bool
    compares: bool  # with the baseline
    status: str


def sent_bytes(record: TrainRecord) -> int:
    """Return the bytes training sent: all streams and control traffic, all headers included."""
    return sum(record.bytes[name] for name in (*record.streams, "control"))


def step_seconds(record: TrainRecord) -> float | None:
    """Return the mean seconds of a step; ``None`` for a run without steps or an invalid measurement."""
    counts = record.totals["steps"] > 0 and record.status != INVALID
    return record.totals["seconds"] / record.totals["steps"] if counts else None


def baseline_of(runs: Runs) -> Run[TrainRecord]:
    """Return the run the others are measured against: of those that show most, one exact, or the first."""
    most = max(_shows(r.record) for r in runs)
    able = [r for r in runs if _shows(r.record) == most]
    return next((r for r in able if r.record.recipe.name in EXACT), able[0])


def _shows(record: TrainRecord) -> int:
    if not record.totals["steps"]:
        return NOTHING
    return WHOLE if record.status in ("done", INVALID) else PART


def summary_rows(runs: Runs) -> list[Row]:
    """Return one row a run, in order; without ratios for those that do not compare with the baseline."""
    if not runs:
        return []
    base = baseline_of(runs)
    return [_row(run, base) for run in runs]


def _row(run: Run[TrainRecord], base: Run[TrainRecord]) -> Row:
    r, b = run.record, base.record
    compare = not unequal([b, r])
    than_bf16, first_pass = r.times_bf16()
    return Row(
        label=run.label,
        recipe=r.recipe.name,
        shows=_shows(r),
        sent=sent_bytes(r),
        fewer=_ratio(_per_step(sent_bytes(b), b), _per_step(sent_bytes(r), r)) if compare else None,
        than_bf16=than_bf16,
        first_pass=first_pass,
        bits_forward=r.bits_per_value.get("forward"),
        bits_backward=r.bits_per_value.get("backward"),
        step_seconds=step_seconds(r),
        faster=_ratio(step_seconds(b), step_seconds(r)) if compare else None,
        eval_first=r.loss.eval_first,
        eval_final=r.loss.eval_final,
        train_eval_final=r.loss.train_eval_final,
        baseline=run is base,
        compares=compare,
        status=r.status,
    )


def _per_step(n: float, record: TrainRecord) -> float | None:
    return n / record.totals["steps"] if record.totals["steps"] else None


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def change(a: float | None, b: float | None) -> float | None:
    """Return how far ``a`` lies above ``b``, as a fraction of ``b``; ``None`` where either is unknown."""
    return a / b - 1 if a is not None and b and math.isfinite(a) and math.isfinite(b) else None


def headline(runs: Runs) -> str:
    """Say in one sentence what the runs show, good or bad, or that they do not compare.

    The subject is one of those that show most of themselves: the ``thinwire`` recipe where it is among them,
    else the run that sent the fewest bytes.
    """
    rows = summary_rows(runs)
    base = next(row for row in rows if row.baseline)
    others = [row for row in rows if not row.baseline and row.compares and row.shows]
    if not others:
        return _no_verdict(base, runs)
    most = max(row.shows for row in others)
    able = [row for row in others if row.shows == most]
    ours = next((r for r in able if is_ours(r)), max(able, key=lambda r: r.fewer or 0.0))
    a_step = "" if ours.shows == base.shows == WHOLE else " a step"
    return (
        f"{named(ours)} {_bytes_words(ours)}{a_step}{than_bf16(ours)} and {_speed_words(ours)} "
        f"{named(base)}, {_loss_words(ours, base)}."
    )


def named(row: Row) -> str:
    """Return a run's label, with its status where that is another than done."""
    return row.label if row.status == "done" else f"{row.label} ({row.status})"


def is_ours(row: Row) -> bool:
    """Return whether the run is one of the ``thinwire`` recipe, whatever its parameters."""
    return row.recipe.split(":")[0] == "thinwire"


def _no_verdict(base: Row, runs: Runs) -> str:
    if len(runs) == 1:
        return _alone(base, runs[0].record) + "."
    if differing := ", ".join(unequal([run.record for run in runs])):
        return f"{len(runs)} runs that do not compare: they differ in {differing}."
    if not base.shows:
        return f"None of these {len(runs)} runs has figures to show."
    return f"{_alone(base, baseline_of(runs).record)}; no other run has figures to show."


def _alone(row: Row, record: TrainRecord) -> str:
    if not row.shows:
        return f"{named(row)} has no figures to show"
    text = f"{named(row)}: {record.totals['steps']} steps sent {megabytes(row.sent)}"
    if row.bits_forward is not None and row.bits_backward is not None:
        text += f", {row.bits_forward + row.bits_backward:.1f} bits a value forward plus backward"
    if row.eval_first is not None and row.eval_final is not None:
        text += f"; held-out loss {row.eval_first:.3f} → {row.eval_final:.3f}"
    return text


def _bytes_words(row: Row) -> str:
    if row.fewer is None:
        return "sent an unknown number of bytes"
    if row.fewer >= 1.005:
        return f"sent {row.fewer:.1f}× fewer bytes"
    return f"sent {1 / row.fewer:.2f}× the bytes" if row.fewer < 0.995 else "sent as many bytes"


def than_bf16(row: Row) -> str:
    """Say in brackets how many times fewer bytes than bfloat16 a run sent; nothing where that is unknown.

    The first pass over the samples is named where it is far from the rest.
    """
    if row.than_bf16 is None or (row.fewer or 0.0) < 1.005:
        return ""
    first = row.first_pass
    apart = first is not None and abs(first / row.than_bf16 - 1) > APART
    early = f", {first:.1f}× on the first pass" if apart else ""
    if row.than_bf16 < 0.995:
        return f" ({1 / row.than_bf16:.2f}× those of bf16)"
    return f" ({row.than_bf16:.1f}× fewer than bf16{early})"


def _speed_words(row: Row) -> str:
    if row.faster is None:
        return "cannot be timed against"
    if row.faster >= 1.02:
        return (
            f"was {row.faster:.1f}× faster than"
            if row.faster >= 1.1
            else f"was {row.faster:.2f}× faster than"
        )
    return f"was {1 / row.faster:.2f}× slower than" if row.faster < 0.98 else "was as fast as"


def _loss_words(row: Row, base: Row) -> str:
    difference = change(row.eval_final, base.eval_final)
    if difference is None:
        return "with no held-out loss to compare"
    if abs(difference) <= SAME_LOSS:
        return f"at the same held-out loss ({difference:+.1%})"
    return f"at a {abs(difference):.1%} {'higher' if difference > 0 else 'lower'} held-out loss"


COLUMNS = (
    "recipe",
    "sent",
    "× fewer",
    "than bf16",
    "bits a value, fw + bw",
    "s/step",
    "× faster",
    "held-out loss",
    "training slice",
)


BITS = 4
TWO_LINES = {
    "× fewer": "×\nfewer",
    "than bf16": "than\nbf16",
    "× faster": "×\nfaster",
    "bits a value, fw + bw": "bits,\nfw+bw",
    "held-out loss": "held-out\nloss",
    "training slice": "training\nslice",
}


def cells(row: Row) -> list[str]:
    """Return a row as text, in the order of ``COLUMNS``."""
    return [
        named(row),
        megabytes(row.sent),
        fixed(row.fewer, 1),
        fixed(row.than_bf16, 1),
        _bits(row),
        fixed(row.step_seconds, 2),
        fixed(row.faster, 2),
        f"{fixed(row.eval_first, 3)} → {fixed(row.eval_final, 3)}",
        fixed(row.train_eval_final, 3),
    ]


def fixed(value: float | None, digits: int) -> str:
    """Return a number in words, a dash where it is unknown."""
    return DASH if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def _bits(row: Row) -> str:
    if row.bits_forward is None or row.bits_backward is None:
        return DASH
    return f"{row.bits_forward:.1f} + {row.bits_backward:.1f} = {row.bits_forward + row.bits_backward:.1f}"


def summary_table(runs: Runs) -> Table:
    """Return the table for a terminal, as a Rich renderable of at most 80 columns for short names."""
    from rich.markup import escape

    table = table_of([TWO_LINES.get(name, name) for name in COLUMNS], runs)
    for row in summary_rows(runs):
        shown = cells(row)
        shown[BITS] = shown[BITS].rsplit(" ", 1)[-1]
        style = "bold" if is_ours(row) and not row.baseline else ""
        table.add_row(*map(escape, shown), style=style)
    return table


def table_of(columns: Sequence[str], runs: Runs) -> Table:
    """Return an empty table for a terminal: the first column to the left, and below it the links."""
    return terminal_table(columns, wrap=False, caption=f"over {over([run.record for run in runs])}")
