"""The report's figures of runs: losses, times, bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from thinwire.lab.records.progress import megabytes
from thinwire.lab.records.runs import Run
from thinwire.lab.report.drawing import (
    FAINT,
    INK,
    PARTS,
    curve,
    new_figure,
    part_colour,
    series_colour,
    series_order,
    svg,
    ticks,
)
from thinwire.lab.train.record.schema import TrainRecord
from thinwire.lab.train.record.summary import Runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _loss_plot(
    runs: Runs,
    name: str,
    x_label: str,
    x_of: Callable[[Run[TrainRecord]], list[float]],
    log: bool,
) -> str:
    figure, axes = new_figure(5.6, 3.3)
    for run, number in zip(runs, series_order(runs), strict=True):
        y = run.record.loss.train
        x = x_of(run)[: len(y)]
        curve(axes, x, y[: len(x)], number)
    ticks(axes, log)
    axes.set_xlabel(x_label, color=FAINT, fontsize=9.5)
    axes.set_ylabel("training loss, nats a token", color=FAINT, fontsize=9.5)
    return svg(figure, name, f"Training loss against {x_label}, one curve a recipe")


def loss_by_step(runs: Runs) -> str:
    """Draw the training loss against optimiser steps."""
    return _loss_plot(
        runs, "steps", "steps", lambda r: [i + 1.0 for i in range(len(r.record.loss.train))], False
    )


def loss_by_seconds(runs: Runs) -> str:
    """Draw the training loss against seconds of training."""
    return _loss_plot(
        runs,
        "seconds",
        "seconds of training",
        lambda r: list(accumulate(m.seconds for m in r.metrics)),
        False,
    )


def loss_by_bytes(runs: Runs) -> str:
    """Draw the training loss against bytes sent, on a logarithmic axis."""
    return _loss_plot(
        runs,
        "bytes",
        "megabytes sent (logarithmic)",
        lambda r: [b / 1e6 for b in accumulate(sum(m.bytes.values()) for m in r.metrics)],
        True,
    )


def step_parts(run: Run[TrainRecord]) -> list[float]:
    """Return mean seconds of a step in compute, encode, decode, wait and the rest."""
    n = max(1, len(run.metrics))
    parts = [
        sum(getattr(m, f"{part}_s") for m in run.metrics) / n
        for part in ("compute", "encode", "decode", "wait")
    ]
    return [*parts, max(0.0, sum(m.seconds for m in run.metrics) / n - sum(parts))]


def step_time(runs: Runs) -> str:
    """Draw where a step's time goes: one stacked bar a run."""
    figure, axes = new_figure(5.6, 0.75 + 0.5 * len(runs))
    rows = [step_parts(run) for run in runs]
    left = [0.0] * len(runs)
    for i in range(len(PARTS)):
        widths = [row[i] for row in rows]
        axes.barh(range(len(runs)), widths, left=left, height=0.58, color=part_colour(i))
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for y, (run, total) in enumerate(zip(runs, left, strict=True)):
        text = f"{total:.2f} s" if run.metrics else "–"
        axes.annotate(text, (total, y), (4, 0), textcoords="offset points", va="center",
                      color=INK, fontsize=9)  # fmt: skip
    _name_bars(axes, [run.label for run in runs], max(left, default=1.0))
    axes.set_xlabel("seconds a step, mean over steps and ranks", color=FAINT, fontsize=9.5)
    return svg(figure, "time", "Where the time of a step goes, one bar a recipe")


def boundary_bytes(runs: Runs) -> str:
    """Draw the bytes over each stage boundary and direction: two bars a boundary and run."""
    order = series_order(runs)
    labels: list[str] = []
    bars: list[tuple[float, str, float]] = []
    for run, number in zip(runs, order, strict=True):
        for b in sorted(run.record.boundaries, key=lambda b: (b.boundary, b.direction != "forward")):
            arrow = "→" if b.direction == "forward" else "←"
            labels.append(f"{run.label}  {b.boundary.replace('-', arrow)}")
            bars.append((float(b.bytes), series_colour(number), 1.0 if b.direction == "forward" else 0.55))
    figure, axes = new_figure(5.6, 0.75 + 0.3 * max(1, len(bars)))
    for y, (width, colour, alpha) in enumerate(bars):
        axes.barh(y, width / 1e6, height=0.7, color=colour, alpha=alpha)
        axes.annotate(megabytes(width), (width / 1e6, y), (4, 0), textcoords="offset points", va="center",
                      color=INK, fontsize=9)  # fmt: skip
    _name_bars(axes, labels, max((b[0] for b in bars), default=1e6) / 1e6)
    axes.set_xlabel("megabytes sent over the run (→ forward, ← backward)", color=FAINT, fontsize=9.5)
    return svg(figure, "boundaries", "Bytes by stage boundary and direction")


def _name_bars(axes: Axes, labels: Sequence[str], longest: float) -> None:
    axes.set_yticks(range(len(labels)), [text.replace("$", r"\$") for text in labels])
    axes.tick_params(axis="y", labelcolor=INK, length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, (longest or 1.0) * 1.16)
    axes.grid(False, axis="y")
