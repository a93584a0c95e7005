"""The page of runs of replicas: how soon each came to a loss, what it sent, what was planned."""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from thinwire.runs.records.finished_runs import Run
from thinwire.runs.records.progress import megabytes
from thinwire.runs.report.elements import card, dot, grid, legend, memory, run_legend, table
from thinwire.runs.report.plotting import PARTS, Points, by_run, lines
from thinwire.uses.training.run.cards import (
    bandwidth,
    changed,
    drawn,
    figure,
    folds,
    loss_by_step,
    setting,
    step_time,
    warnings,
)
from thinwire.uses.training.run.record import Decision, TrainRecord
from thinwire.uses.training.run.summary import (
    DASH,
    Row,
    Runs,
    baseline_of,
    fixed,
    named,
    summary_rows,
    table_of,
    than_bf16,
)

if TYPE_CHECKING:
    from rich.table import Table


__all__ = ["cards", "folds", "headline", "setting", "summary_table", "warnings"]

Value = Callable[["LossPoint"], float]
Evaluated = tuple[int, float | None, float | None, float | None]  # step, seconds, loss, accuracy
Planned = Callable[[Decision], float | None]
PLANS: dict[str, tuple[str, Planned]] = {
    "staleness": ("steps late", lambda d: d.staleness),
    "local_steps": ("steps from one exchange to the next", lambda d: d.local_steps),
    "bits": ("bits a value and step, as planned", lambda d: d.bits),
}


def cards(runs: Runs) -> list[str]:
    """Return the cards, in order."""
    timed = drawn(runs, lambda run: run.valid)
    followed = drawn(timed, changed)
    parts = legend([(dot(f"--p{i}", box=True), name) for i, name in enumerate(PARTS)])
    shown = [
        figure("Held-out loss against time", "What a recipe wins on this link.", _by_seconds, timed),
        figure("Held-out loss against bytes sent", "The same, by traffic.", _by_bytes, runs),
        figure("Training loss against steps", "What compression costs in progress.", loss_by_step, runs),
        figure("Where a step's time goes", "", step_time, timed, parts),
        figure("The link over time", "Rate as the senders estimated it.", bandwidth, followed),
        *(figure(_title(name), "As decided.", _plan(name), followed) for name in PLANS),
        memory(runs),
    ]
    return [_table(runs), run_legend(runs), grid(shown)]


def _title(name: str) -> str:
    text = PLANS[name][0]
    return text[0].upper() + text[1:]


def _table(runs: Runs) -> str:
    base = baseline_of(runs)
    return card(
        "The figures",
        "Bytes of a step are those of all replicas, control traffic included. Than bf16: against an "
        "all-reduce of bf16 gradients at each step, without headers. The loss to come to is the end of "
        f"{html.escape(base.label)}. Losses are by evaluations without compression, before → after.",
        table(COLUMNS, cells(runs)),
    )


def _by_seconds(runs: Runs) -> str:
    return _losses(runs, "replica-seconds", "seconds of training", lambda p: p.seconds)


def _by_bytes(runs: Runs) -> str:
    return _losses(runs, "replica-bytes", "megabytes sent (logarithmic)", lambda p: p.sent / 1e6, "x")


def _losses(runs: Runs, name: str, x: str, of: Value, log: str = "") -> str:
    curves = by_run(runs, lambda run: [[(of(p), p.loss) for p in points(run) if not log or p.sent > 0]])
    return lines(name, f"Held-out loss against {x}, one curve a recipe", curves, x, "held-out loss", log)


def _plan(name: str) -> Callable[[Runs], str]:
    label, value = PLANS[name]

    def draw(runs: Runs) -> str:
        held = by_run(runs, lambda run: [_held(run, value)])
        title, log = f"{label} against seconds of training", "y" if name == "bits" else ""
        return lines(f"plan-{name}", title, held, "seconds of training", label, log, "steps-post")

    return draw


def _held(run: Run[TrainRecord], value: Planned) -> Points:
    """Return when each decision was made, in seconds, and what it said; the last one holds to the end."""
    times = [0.0, *accumulate(m.seconds for m in run.metrics)]
    said = [
        (times[min(d.step, len(times) - 1)], v) for d in run.record.decisions if (v := value(d)) is not None
    ]
    return [*said, (times[-1], said[-1][1])] if said else []


@dataclass(frozen=True)
class LossPoint:
    """An evaluation of a run: after how many steps, seconds and bytes, and its held-out loss."""

    step: int
    seconds: float
    sent: float
    loss: float
    accuracy: float | None


def points(run: Run[TrainRecord]) -> list[LossPoint]:
    """Return the evaluations of a run in order, those without a loss or a time left out."""
    loss, steps = run.record.loss, int(run.record.totals["steps"])
    last = (steps, run.record.totals["seconds"], loss.eval_final, loss.accuracy_final)
    rows: list[Evaluated] = [(0, 0.0, loss.eval_first, loss.accuracy_first)]
    rows += [(e.step, e.seconds, e.heldout, e.accuracy) for e in loss.evaluations if e.step < steps]
    sent = [0.0]
    for metrics in run.metrics:
        sent.append(sent[-1] + sum(metrics.bytes.values()))
    return [
        LossPoint(step, seconds, sent[min(step, len(sent) - 1)], heldout, accuracy)
        for step, seconds, heldout, accuracy in (*rows, last)
        if heldout is not None and seconds is not None
    ]


def reached(run: Run[TrainRecord], target: float | None) -> LossPoint | None:
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
