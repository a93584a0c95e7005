"""The page of runs of replicas: how soon each came to a loss, what it sent, what was planned."""

from __future__ import annotations

import html
from collections.abc import Callable
from itertools import accumulate

from thinwire.runs.records.runs import Run
from thinwire.runs.report.cards import card, dot, grid, legend, memory, run_legend, table
from thinwire.runs.report.drawing import PARTS, Points, by_run, lines
from thinwire.uses.training.run.record import plots, plots_link
from thinwire.uses.training.run.record.cards import drawn, figure, folds, setting, warnings
from thinwire.uses.training.run.record.reaching import (
    COLUMNS,
    Point,
    Runs,
    cells,
    headline,
    points,
    summary_table,
)
from thinwire.uses.training.run.record.schema import Decision, TrainRecord
from thinwire.uses.training.run.record.summary import baseline_of

__all__ = ["cards", "folds", "headline", "setting", "summary_table", "warnings"]

Value = Callable[[Point], float]
Planned = Callable[[Decision], float | None]
PLANS: dict[str, tuple[str, Planned]] = {
    "staleness": ("steps late", lambda d: d.staleness),
    "local_steps": ("steps from one exchange to the next", lambda d: d.local_steps),
    "bits": ("bits a value and step, as planned", lambda d: d.bits),
}


def cards(runs: Runs) -> list[str]:
    """Return the cards, in order."""
    timed = drawn(runs, lambda run: run.valid)
    followed = drawn(timed, plots_link.changed)
    parts = legend([(dot(f"--p{i}", box=True), name) for i, name in enumerate(PARTS)])
    shown = [
        figure("Held-out loss against time", "What a recipe wins on this link.", _by_seconds, timed),
        figure("Held-out loss against bytes sent", "The same, by traffic.", _by_bytes, runs),
        figure(
            "Training loss against steps", "What compression costs in progress.", plots.loss_by_step, runs
        ),
        figure("Where a step's time goes", "", plots.step_time, timed, parts),
        figure("The link over time", "Rate as the senders estimated it.", plots_link.bandwidth, followed),
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
