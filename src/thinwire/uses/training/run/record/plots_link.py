"""The report's figures of links over time: what they gave, what was sent over them, the waiting."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from thinwire.runs.records.runs import Run
from thinwire.runs.report.drawing import Points, by_run, lines
from thinwire.uses.training.run.record.schema import StepMetrics, TrainRecord
from thinwire.uses.training.run.record.summary import Runs

MEGABIT = 125e3  # bytes
Curves = list[Points]  # one a line style


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
