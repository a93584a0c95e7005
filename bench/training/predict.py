"""What the model of a step says about a run that was made, which is the check on every plan; and what a link
leaves of a run's speed at best.
"""

from __future__ import annotations

from statistics import fmean

from bench.training.links import PLACES
from thinwire.links.profile import Profile, one_way, profiles
from thinwire.links.shape import MTU, SEGMENT, LinkShape
from thinwire.runs.machine.network import IDLE, restarts
from thinwire.runs.records.finished_runs import Run
from thinwire.runs.records.run_record import KERNEL
from thinwire.types import InputError, require
from thinwire.uses.training.pipeline.choosing.hide import FORWARD_SHARE
from thinwire.uses.training.pipeline.choosing.replay import Hop, Pipeline, Stage, step_seconds
from thinwire.uses.training.run.record import StepMetrics, TrainRecord
from thinwire.uses.training.run.stepper import WAYS

FIRST = 1  # steps left out at the beginning: TCP and the memory of references begin then
SAME = 0.005  # a held-out loss within 0.5 % of fp32's counts as the same
UNSTEADY = "no one rate to predict from"


def predict_run(run: Run) -> float:
    """Return the mean seconds of a step that the replay foretells from the run's own compute and bytes.

    Each step's prediction takes the compute and coding seconds that its ranks reported and the bytes that it
    sent; the link is the one asked for. Set it against ``measured_seconds``. Errors: ``InputError`` for a run
    of fewer than two steps, without reports by rank, or over a link whose rate was not fixed.
    """
    return fmean(step_seconds(pipeline_of_step(run.record, m)) for m in _steps(run))


def measured_seconds(run: Run) -> float:
    """Return the mean seconds that the same steps took."""
    return fmean(m.seconds for m in _steps(run))


def _steps(run: Run) -> list[StepMetrics]:
    steps = [m for m in run.metrics if m.ranks][FIRST:]
    require(
        bool(steps),
        InputError,
        f"run {run.label} has no {FIRST + 1} steps reported by rank; run it for longer",
    )
    return steps


def pipeline_of_step(record: TrainRecord, step: StepMetrics) -> Pipeline:
    """Return the pipeline that a step of a run went through, as its record tells it."""
    config = record.config
    n, m, ranks = int(config["stages"]), int(config["microbatches"]), step.ranks or []
    share = len(ranks) / n  # interleaved: a rank's seconds are shared out among its stages
    stages = [ranks[k % len(ranks)]["compute_s"] * share / m for k in range(n)]
    hops = {way: [_hop(record, step, k, way, n, m) for k in range(n - 1)] for way in WAYS}
    return Pipeline(
        tuple(Stage(s * FORWARD_SHARE, s * (1 - FORWARD_SHARE)) for s in stages),
        tuple(hops["forward"]),
        tuple(hops["backward"]),
        m,
        str(config["schedule"]),
    )


def _hop(record: TrainRecord, step: StepMetrics, k: int, way: str, n: int, m: int) -> Hop:
    """Return one boundary's hop; what ranks report of coding is shared out by what they send and receive."""
    ranks = step.ranks or []
    sender, receiver = (k, k + 1) if way == "forward" else (k + 1, k)
    rate, delay = _line(record, sender % len(ranks), receiver % len(ranks), len(ranks))
    nbytes = step.bytes[way] * _share(record, k, way, n, len(ranks)) / m
    return Hop.over(
        nbytes,
        rate,
        delay,
        _restarts(record, sender % len(ranks), receiver % len(ranks)),
        ranks[sender % len(ranks)]["encode_s"] / m / _ends(sender % len(ranks), n, len(ranks)),
        ranks[receiver % len(ranks)]["decode_s"] / m / _ends(receiver % len(ranks), n, len(ranks)),
    )


def _ends(rank: int, n: int, ranks: int) -> int:
    """Return how many ends of boundaries a rank has."""
    return sum((k > 0) + (k < n - 1) for k in range(rank, n, ranks))


def _share(record: TrainRecord, k: int, way: str, n: int, ranks: int) -> float:
    """Return the share of a direction's bytes that crossed boundary ``k``."""
    sent = {b.boundary: b.bytes for b in record.boundaries if b.direction == way}
    names = ["-".join(str(r) for r in sorted((j % ranks, (j + 1) % ranks))) for j in range(n - 1)]
    total = sum(sent.get(name, 0) for name in set(names))
    return sent.get(names[k], 0) / names.count(names[k]) / total if total else 1 / (n - 1)


def _line(record: TrainRecord, sender: int, receiver: int, ranks: int) -> tuple[float | None, float]:
    """Return bytes/s (``None``: no limit) and one-way seconds from a rank to another."""
    asked = record.link.asked
    if record.link.emulation != KERNEL:
        shape = _shape(asked)
        return shape.rate, shape.delay + shape.jitter / 2
    a, b = (profiles(asked.split(";"), ranks)[rank] for rank in (sender, receiver))
    require(a.trace is None and b.trace is None, InputError, f"a run over {asked} has {UNSTEADY}")
    rates = [rate * SEGMENT / MTU for rate in (a.up, b.down) if rate is not None]
    return min(rates, default=None), one_way(a, b) + (a.jitter + b.jitter) / 4


def _restarts(record: TrainRecord, sender: int, receiver: int) -> bool:
    """Return whether TCP began anew after pauses: a link shaped in the process knows no such thing."""
    controls = (w.congestion for w in record.wire if (w.source, w.destination) == (sender, receiver))
    emulated = {IDLE: "1"}  # as the emulator sets it
    return record.link.emulation == KERNEL and restarts(next(controls, None), emulated) is True


def _shape(asked: str) -> LinkShape:
    try:
        return LinkShape.parse(asked)
    except InputError as e:
        raise InputError(f"a run over {asked} has {UNSTEADY}; {e}") from e


def line_seconds(link: str, nbytes: float) -> float | None:
    """Return how long ``nbytes`` of payload take on the link's line; None where it has no one rate."""
    rate = Profile.parse(PLACES[link]).up
    return nbytes / (rate * SEGMENT / MTU) if rate else None


def bound(link: str, c: float, nbytes: float, microbatches: int) -> float | None:
    """Return C / (C + 2 (d + x / M)): what is left where all but the ends of a step is hidden.

    ``nbytes``: of a step, both directions; x is the line's time for half of them. Equal stages cannot do
    better [derived].
    """
    x = line_seconds(link, nbytes / 2)
    if x is None:
        return None
    delay = Profile.parse(PLACES[link]).delay or 0.0
    return float(c / (c + 2 * (delay + x / microbatches)))


def of_bound(share: float, bound: float | None) -> float | None:
    """Return what share of its bound was reached; None where there is none."""
    return share / bound if bound else None


def is_same(loss: float, base: float) -> bool:
    """Say whether a run ends with a loss as good as ``base``, which uncompressed fp32 ends with."""
    return loss <= base * (1 + SAME)
