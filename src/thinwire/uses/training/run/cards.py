"""The page of training runs: the figures in a table, losses, where time and bytes went, links over time."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, count
from typing import TYPE_CHECKING

from thinwire.runs.records.finished_runs import Run, differences, over
from thinwire.runs.records.progress import megabytes
from thinwire.runs.report.details import Rows
from thinwire.runs.report.elements import card, dot, grid, legend, memory, run_legend, scroll
from thinwire.runs.report.plotting import (
    INK,
    PARTS,
    SERIES,
    WIDTH,
    Points,
    by_run,
    labelled,
    lines,
    new_axes,
    part_colour,
    series_colour,
    series_order,
)
from thinwire.uses.training.run.record import Decision, StepMetrics, TrainRecord
from thinwire.uses.training.run.summary import (
    COLUMNS,
    Runs,
    baseline_of,
    cells,
    headline,
    named,
    summary_rows,
    summary_table,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


__all__ = ["cards", "folds", "headline", "setting", "summary_table", "warnings"]

MEGABIT = 125e3  # bytes
Curves = list[Points]  # one a line style


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
            f"{_few(d.bits)} bits: {_reason(d)}",
        )
        for run in runs
        for d in run.record.decisions
    ]
    return {"What the policy chose": rows}


def _few(bits: float) -> str:
    return f"{bits:.1f}" if bits >= 1 else f"{bits:.2g}"  # replicas send a part of a bit a value and step


def _reason(d: Decision) -> str:
    if d.outcome_s is None:
        return d.reason
    said = "" if d.predicted_s is None else f" {d.predicted_s:.2g} s were predicted;"
    return f"{d.reason};{said} a step took {d.outcome_s:.2g} s"


def cards(runs: Runs) -> list[str]:
    """Return the cards of training runs, in order."""
    stepped, timed = drawn(runs, lambda run: True), drawn(runs, lambda run: run.valid)
    followed = drawn(timed, changed)
    parts = legend([(dot(f"--p{i}", box=True), name) for i, name in enumerate(PARTS)])
    figures = [
        figure("Loss against steps", "What compression costs in progress.", loss_by_step, runs),
        figure("Loss against time", "What it wins on this link.", loss_by_seconds, timed),
        figure("Loss against bytes sent", "The same curves, by traffic.", loss_by_bytes, stepped),
        figure("Where a step's time goes", "", step_time, timed, parts),
        figure("Bytes by boundary and direction", "", boundary_bytes, runs),
        figure("The link over time", "Rate as the senders estimated it.", bandwidth, followed),
        figure("Bits over time", "What was sent a value, everything included.", bits, followed),
        figure("Waiting over time", "What the link cost.", waiting, followed),
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


def changed(run: Run[TrainRecord]) -> bool:
    """Return whether a run's link or codecs changed as it went on."""
    return bool(run.record.decisions) or "trace" in run.record.link.asked


def bandwidth(runs: Runs) -> str:
    """Draw each link's estimated rate against time: one line a direction between two ranks."""
    return _over_time(runs, "rate", "Mbit/s, as estimated", _rates, log="y")


def bits(runs: Runs) -> str:
    """Draw the bits a value against time, activations solid and gradients dashed."""
    return _over_time(runs, "bits", "bits a value (dashed: gradients)", _bits, log="y")


def waiting(runs: Runs) -> str:
    """Draw the share of each step that ranks spent waiting for data, against time."""
    return _over_time(runs, "waiting", "share of the step spent waiting", _waiting)


def _over_time(
    runs: Runs, name: str, label: str, of: Callable[[Run[TrainRecord], list[float]], Curves], log: str = ""
) -> str:
    curves = by_run(runs, lambda run: of(run, list(accumulate(m.seconds for m in run.metrics))))
    title, base = f"{label} against seconds of training", 2 if name == "bits" else 10
    return lines(f"link-{name}", title, curves, "seconds of training", label, log, "steps-pre", base)


def _rates(run: Run[TrainRecord], times: list[float]) -> Curves:
    pairs = sorted({(k.source, k.destination) for m in run.metrics for k in m.links or ()})
    return [_known(times, [_rate(m, pair) for m in run.metrics]) for pair in pairs]


def _rate(metrics: StepMetrics, pair: tuple[int, int]) -> float | None:
    for link in metrics.links or ():
        if (link.source, link.destination) == pair and link.rate_bytes_s:
            return link.rate_bytes_s / MEGABIT
    return None


def _bits(run: Run[TrainRecord], times: list[float]) -> Curves:
    return [_known(times, [m.bits.get(way) for m in run.metrics]) for way in ("forward", "backward")]


def _waiting(run: Run[TrainRecord], times: list[float]) -> Curves:
    return [_known(times, [min(1.0, m.wait_s / m.seconds) if m.seconds else 0.0 for m in run.metrics])]


def _known(times: list[float], values: list[float | None]) -> Points:
    return [(t, v) for t, v in zip(times, values, strict=True) if v is not None]
