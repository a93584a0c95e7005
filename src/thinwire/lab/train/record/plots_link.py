"""The report's figures of links over time: what they gave, what was sent over them, the waiting."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from thinwire.lab.records.runs import Run
from thinwire.lab.report.drawing import (
    FAINT,
    STYLES,
    logarithmic,
    new_figure,
    series_colour,
    series_order,
    svg,
)
from thinwire.lab.train.record.schema import StepMetrics, TrainRecord
from thinwire.lab.train.record.summary import Runs

MEGABIT = 125e3  # bytes
Curves = list[tuple[list[float], list[float]]]  # one a line style


def changed(run: Run[TrainRecord]) -> bool:
    """Return whether a run's link or codecs changed as it went on."""
    return bool(run.record.decisions) or "trace" in run.record.link.asked


def bandwidth(runs: Runs) -> str:
    """Draw each link's estimated rate against time: one line a direction between two ranks."""
    return _over_time(runs, "rate", "Mbit/s, as estimated", _rates, log=True)


def bits(runs: Runs) -> str:
    """Draw the bits a value against time, activations solid and gradients dashed."""
    return _over_time(runs, "bits", "bits a value (dashed: gradients)", _bits, log=True)


def waiting(runs: Runs) -> str:
    """Draw the share of each step that ranks spent waiting for data, against time."""
    return _over_time(runs, "waiting", "share of the step spent waiting", _waiting, log=False)


def _over_time(
    runs: Runs,
    name: str,
    label: str,
    of: Callable[[Run[TrainRecord], list[float]], Curves],
    log: bool,
) -> str:
    figure, axes = new_figure(5.6, 2.6)
    for run, number in zip(runs, series_order(runs), strict=True):
        times = list(accumulate(m.seconds for m in run.metrics))
        for (x, y), style in zip(of(run, times), STYLES * 4, strict=False):
            axes.step(x, y, where="pre", color=series_colour(number), linestyle=style, linewidth=1.6)
    if log:
        logarithmic(axes.yaxis, 2 if name == "bits" else 10)
    axes.set_xlabel("seconds of training", color=FAINT, fontsize=9.5)
    axes.set_ylabel(label, color=FAINT, fontsize=9.5)
    return svg(figure, f"link-{name}", f"{label} against seconds of training")


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
    return [(times, [min(1.0, m.wait_s / m.seconds) if m.seconds else 0.0 for m in run.metrics])]


def _known(times: list[float], values: list[float | None]) -> tuple[list[float], list[float]]:
    found = [(t, v) for t, v in zip(times, values, strict=True) if v is not None]
    return [t for t, _ in found], [v for _, v in found]
