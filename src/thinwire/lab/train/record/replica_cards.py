"""The page of runs of replicas: how soon each came to a loss, what it sent, what was planned."""

from __future__ import annotations

import html
from collections.abc import Callable
from itertools import accumulate

from thinwire.lab.records.runs import Run
from thinwire.lab.report.cards import card, dot, grid, legend, memory, run_legend, scroll
from thinwire.lab.report.drawing import (
    FAINT,
    PARTS,
    STYLES,
    curve,
    logarithmic,
    new_figure,
    series_colour,
    series_order,
    svg,
    ticks,
)
from thinwire.lab.train.record import plots, plots_link
from thinwire.lab.train.record.cards import drawn, figure, folds, setting, warnings
from thinwire.lab.train.record.reaching import COLUMNS, Point, Runs, cells, headline, points, summary_table
from thinwire.lab.train.record.schema import Decision, TrainRecord
from thinwire.lab.train.record.summary import baseline_of

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
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>" for row in cells(runs)
    )
    base = baseline_of(runs)
    return card(
        "The figures",
        "Bytes of a step are those of all replicas, control traffic included. Than bf16: against an "
        "all-reduce of bf16 gradients at each step, without headers. The loss to come to is the end of "
        f"{html.escape(base.label)}. Losses are by evaluations without compression, before → after.",
        scroll(COLUMNS, rows),
    )


def _by_seconds(runs: Runs) -> str:
    return _losses(runs, "replica-seconds", "seconds of training", lambda p: p.seconds, log=False)


def _by_bytes(runs: Runs) -> str:
    return _losses(runs, "replica-bytes", "megabytes sent (logarithmic)", lambda p: p.sent / 1e6, log=True)


def _losses(runs: Runs, name: str, label: str, of: Value, log: bool) -> str:
    drawing, axes = new_figure(5.6, 3.3)
    for run, number in zip(runs, series_order(runs), strict=True):
        shown = [p for p in points(run) if not log or p.sent > 0]
        curve(axes, [of(p) for p in shown], [p.loss for p in shown], number)
    ticks(axes, log)
    axes.set_xlabel(label, color=FAINT, fontsize=9.5)
    axes.set_ylabel("held-out loss", color=FAINT, fontsize=9.5)
    return svg(drawing, name, f"Held-out loss against {label}, one curve a recipe")


def _plan(name: str) -> Callable[[Runs], str]:
    label, value = PLANS[name]

    def draw(runs: Runs) -> str:
        drawing, axes = new_figure(5.6, 2.6)
        for run, number in zip(runs, series_order(runs), strict=True):
            x, y = _held(run, value)
            axes.step(x, y, where="post", color=series_colour(number), linestyle=STYLES[0], linewidth=1.6)
        if name == "bits":
            logarithmic(axes.yaxis, 10)
        axes.set_xlabel("seconds of training", color=FAINT, fontsize=9.5)
        axes.set_ylabel(label, color=FAINT, fontsize=9.5)
        return svg(drawing, f"plan-{name}", f"{label} against seconds of training")

    return draw


def _held(run: Run[TrainRecord], value: Planned) -> tuple[list[float], list[float]]:
    """Return when each decision was made, in seconds, and what it said; the last one holds to the end."""
    times = [0.0, *accumulate(m.seconds for m in run.metrics)]
    said = [(d.step, v) for d in run.record.decisions if (v := value(d)) is not None]
    if not said:
        return [], []
    x = [times[min(step, len(times) - 1)] for step, _ in said]
    return [*x, times[-1]], [*(v for _, v in said), said[-1][1]]
