"""How soon runs of replicas came to a loss: the measure of this field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from thinwire.runs.records.progress import megabytes
from thinwire.runs.records.runs import Run
from thinwire.uses.training.run.record.schema import TrainRecord
from thinwire.uses.training.run.record.summary import (
    DASH,
    Row,
    baseline_of,
    fixed,
    named,
    summary_rows,
    table_of,
    than_bf16,
)

if TYPE_CHECKING:
    from rich.table import Table

Runs = Sequence[Run[TrainRecord]]
Evaluated = tuple[int, float | None, float | None, float | None]  # step, seconds, loss, accuracy


@dataclass(frozen=True)
class Point:
    """An evaluation of a run: after how many steps, seconds and bytes, and its held-out loss."""

    step: int
    seconds: float
    sent: float
    loss: float
    accuracy: float | None


def points(run: Run[TrainRecord]) -> list[Point]:
    """Return the evaluations of a run in order, those without a loss or a time left out."""
    loss, steps = run.record.loss, int(run.record.totals["steps"])
    last = (steps, run.record.totals["seconds"], loss.eval_final, loss.accuracy_final)
    rows: list[Evaluated] = [(0, 0.0, loss.eval_first, loss.accuracy_first)]
    rows += [(e.step, e.seconds, e.heldout, e.accuracy) for e in loss.evaluations if e.step < steps]
    sent = [0.0]
    for metrics in run.metrics:
        sent.append(sent[-1] + sum(metrics.bytes.values()))
    return [
        Point(step, seconds, sent[min(step, len(sent) - 1)], heldout, accuracy)
        for step, seconds, heldout, accuracy in (*rows, last)
        if heldout is not None and seconds is not None
    ]


def reached(run: Run[TrainRecord], target: float | None) -> Point | None:
    """Return the first evaluation at or under the ``target``; ``None`` where there is none."""
    return next((p for p in points(run) if target is not None and p.loss <= target), None)


def headline(runs: Runs) -> str:
    """Say in one sentence how much sooner, and with how many fewer bytes, one run came to another's loss.

    The subject is ``auto`` where it is among them, else whoever came there first.
    """
    base, rows = baseline_of(runs), summary_rows(runs)
    target = base.record.loss.eval_final
    goal = reached(base, target)
    pairs = [(run, reached(run, target)) for run, row in zip(runs, rows, strict=True) if row.compares]
    other = [(run, point) for run, point in pairs if run is not base and point is not None]
    if goal is None or not other:
        return _alone(rows[0], runs[0]) if len(runs) == 1 else _missed(base, len(runs) - 1, target)
    ours = next((pair for pair in other if pair[0].record.recipe.name.startswith("auto")), None)
    run, point = ours or min(other, key=lambda pair: pair[1].seconds)
    sooner = goal.seconds / point.seconds if point.seconds else 0.0
    row = next(row for row in rows if row.label == run.label)
    return (
        f"{run.label} came to {base.label}'s held-out loss of {target:.3f} {_times(sooner)}, after "
        f"{point.seconds:.1f} s instead of {goal.seconds:.1f}, "
        f"with {row.fewer or 0.0:.0f}× fewer bytes a step{than_bf16(row)}."
    )


def _times(sooner: float) -> str:
    return f"{sooner:.1f}× sooner" if sooner >= 1 else f"{1 / max(sooner, 1e-9):.1f}× later"


def _alone(row: Row, run: Run[TrainRecord]) -> str:
    steps, first, last = run.record.totals["steps"], row.eval_first, row.eval_final
    losses = f"; held-out loss {first:.3f} → {last:.3f}" if first is not None and last is not None else ""
    many = f"{steps} steps of {run.record.config['replicas']} replicas"
    return f"{named(row)}: {many} sent {megabytes(row.sent)}{losses}."


def _missed(base: Run[TrainRecord], others: int, target: float | None) -> str:
    if target is None:
        return f"{base.label} has no held-out loss that others could come to."
    return f"None of {others} came to {base.label}'s held-out loss of {target:.3f}."


COLUMNS = (
    "recipe",
    "sent a step",
    "× fewer",
    "than bf16",
    "s/step",
    "held-out loss",
    "s to loss",
    "× sooner",
)


def cells(runs: Runs) -> list[list[str]]:
    """Return a row of text a run, in the order of ``COLUMNS``; ``s to loss`` is to the baseline's last."""
    base = baseline_of(runs)
    target = base.record.loss.eval_final
    goal = reached(base, target)
    out = []
    for run, row in zip(runs, summary_rows(runs), strict=True):
        steps, point = run.record.totals["steps"], reached(run, target) if row.compares else None
        out.append(
            [
                named(row),
                megabytes(row.sent / steps) if steps else DASH,
                fixed(row.fewer, 1),
                fixed(row.than_bf16, 1),
                fixed(row.step_seconds, 2),
                f"{fixed(row.eval_first, 3)} → {fixed(row.eval_final, 3)}",
                fixed(point.seconds if point else None, 1),
                fixed(goal.seconds / point.seconds if goal and point and point.seconds else None, 2),
            ]
        )
    return out


def summary_table(runs: Runs) -> Table:
    """Return the table for a terminal, as a Rich renderable of at most 80 columns for short names."""
    from rich.markup import escape

    table = table_of(COLUMNS, runs)
    for row in cells(runs):
        table.add_row(*map(escape, row), style="bold" if row[0].startswith(("auto", "thinwire")) else "")
    return table
