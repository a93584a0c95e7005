"""The report's figures of runs: losses, times, bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, count
from typing import TYPE_CHECKING

from thinwire.runs.records.progress import megabytes
from thinwire.runs.records.runs import Run
from thinwire.runs.report.drawing import (
    INK,
    PARTS,
    WIDTH,
    by_run,
    labelled,
    lines,
    new_axes,
    part_colour,
    series_colour,
    series_order,
)
from thinwire.uses.training.run.record.schema import TrainRecord
from thinwire.uses.training.run.record.summary import Runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _losses(
    runs: Runs, name: str, x: str, x_of: Callable[[Run[TrainRecord]], Iterable[float]], log: str = ""
) -> str:
    curves = by_run(runs, lambda run: [zip(x_of(run), run.record.loss.train, strict=False)])
    title = f"Training loss against {x}, one curve a recipe"
    return lines(name, title, curves, x, "training loss, nats a token", log)


def loss_by_step(runs: Runs) -> str:
    """Draw the training loss against optimiser steps."""
    return _losses(runs, "steps", "steps", lambda r: count(1))


def loss_by_seconds(runs: Runs) -> str:
    """Draw the training loss against seconds of training."""
    return _losses(runs, "seconds", "seconds of training", lambda r: accumulate(m.seconds for m in r.metrics))


def loss_by_bytes(runs: Runs) -> str:
    """Draw the training loss against bytes sent, on a logarithmic axis."""

    def sent(run: Run[TrainRecord]) -> Iterable[float]:
        return (n / 1e6 for n in accumulate(sum(m.bytes.values()) for m in run.metrics))

    return _losses(runs, "bytes", "megabytes sent (logarithmic)", sent, "x")


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
    axes = new_axes(WIDTH, 0.75 + 0.5 * len(runs))
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
    title = "Where the time of a step goes, one bar a recipe"
    return labelled(axes, "time", title, "seconds a step, mean over steps and ranks")


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
    axes = new_axes(WIDTH, 0.75 + 0.3 * max(1, len(bars)))
    for y, (width, colour, alpha) in enumerate(bars):
        axes.barh(y, width / 1e6, height=0.7, color=colour, alpha=alpha)
        axes.annotate(megabytes(width), (width / 1e6, y), (4, 0), textcoords="offset points", va="center",
                      color=INK, fontsize=9)  # fmt: skip
    _name_bars(axes, labels, max((b[0] for b in bars), default=1e6) / 1e6)
    label = "megabytes sent over the run (→ forward, ← backward)"
    return labelled(axes, "boundaries", "Bytes by stage boundary and direction", label)


def _name_bars(axes: Axes, labels: Sequence[str], longest: float) -> None:
    axes.set_yticks(range(len(labels)), [text.replace("$", r"\$") for text in labels])
    axes.tick_params(axis="y", labelcolor=INK, length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, (longest or 1.0) * 1.16)
    axes.grid(False, axis="y")
