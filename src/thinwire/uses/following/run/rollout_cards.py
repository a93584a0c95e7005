"""The page of rollouts elsewhere: how old the weights of each batch were, who waited, and who made what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from thinwire.runs.records.finished_runs import Run
from thinwire.runs.records.progress import megabytes
from thinwire.runs.report.details import Rows
from thinwire.runs.report.elements import card, dot, grid, legend, memory, run_legend, table, terminal_table
from thinwire.runs.report.plotting import (
    INK,
    SERIES,
    WIDTH,
    Points,
    by_run,
    curve,
    labelled,
    new_axes,
    series_colour,
    ticks,
)
from thinwire.uses.following.run.rollout_record import (
    BatchMetrics,
    PartFigures,
    RolloutsRecord,
    RolloutWorkerFigures,
)

if TYPE_CHECKING:
    from rich.table import Table

RolloutRun = Run[RolloutsRecord]
Runs = Sequence[RolloutRun]
DASH = "–"
MARKS = 200  # columns of a figure; of more batches, the oldest weights of so many together are drawn
SHOWN = 100  # workers of a table
COLUMNS = ("run", "batches", "samples", "tokens/s", "versions behind", "most", "max_age", "age", "oldest",
           "waiting", "weights sent")  # fmt: skip
WORKERS = ("worker", "there", "parts", "samples", "tokens/s", "versions behind, most", "oldest weights",
           "waiting for weights", "times", "prompts that went to others")  # fmt: skip


def headline(runs: Runs) -> str:
    """Return how old the weights of the first run's batches were, and what share of time was waiting."""
    record, batches = runs[0].record, runs[0].metrics
    if not batches:
        return f"no batch was made; {len(record.workers)} workers came"
    mean, most = _behind(batches)
    many = "1 worker" if len(record.workers) == 1 else f"{len(record.workers)} workers"
    return (
        f"{len(batches)} batches by {many}, with weights {mean:.2g} versions behind ({most} at most) and "
        f"{_ages(batches)[0]:.2g} s old; workers waited for them for {_waiting(record)} of their time"
    )


def setting(runs: Runs) -> str:
    """Return how the pool was set."""
    bound = _bound(runs[0].record)
    rule = (
        "Workers generate with the newest weights that they have, however old."
        if bound is None
        else f"A worker whose weights are more versions behind than max_age={bound} waits for newer ones."
    )
    return f"{rule} Age counts from a version's publication to the end of the generation that used it."


def warnings(runs: Runs) -> list[str]:
    """Return what no record's notes say: batches beyond the bound."""
    return [
        f"{run.label} has parts that were made with weights beyond max_age: please report it"
        for run in runs
        if (bound := _bound(run.record)) is not None and run.metrics and _behind(run.metrics)[1] > bound
    ]


def folds(runs: Runs) -> dict[str, Rows]:
    """Return the engine's rows of the details: none."""
    return {}


def summary_table(runs: Runs) -> Table:
    """Return the figures for a terminal."""
    return terminal_table(COLUMNS, (_row(run) for run in runs))


def cards(runs: Runs) -> list[str]:
    """Return the cards, in order."""
    text = (
        "Tokens a second are of the whole loop, training included. Versions behind and age are means over "
        "samples. Waiting for weights is a share of the workers' time between prompts and samples."
    )
    plots = [
        _figure("Time that workers waited for weights", runs, _share, "% of their time in a batch", 10.0),
        _figure("Tokens a second, while a batch is made", runs, _speed, "tokens a second", 1.0),
    ]
    return [
        card("The figures", text, table(COLUMNS, [_row(run) for run in runs])),
        *[c for i, run in enumerate(runs) for c in _of_run(run, i, len(runs) > 1)],
        run_legend(runs),
        grid(plots),
        memory(runs),
    ]


def _of_run(run: RolloutRun, number: int, several: bool) -> list[str]:
    """Return the cards of one run: ages by worker, and the workers."""
    names = [worker.name for worker in run.record.workers]
    chips = [(dot(f"--s{_colour(i)}"), name) for i, name in enumerate(names[: SERIES - 1])]
    chips += [(dot("--s0"), f"{len(names) - SERIES + 1} others")] * (len(names) >= SERIES)
    bound = _bound(run.record)
    line = "" if bound is None else f" Dashed: the bound, max_age={bound}; above it a worker waits instead."
    each = -(-len(run.metrics) // MARKS)
    thinned = "" if each <= 1 else f" The oldest of each {each} batches."
    of = f": {run.label}" if several else ""
    behind = _marks(run, f"behind-{number}", lambda p: p.behind, "versions behind", whole=True)
    ages = _marks(run, f"age-{number}", lambda p: p.age_s, "age, s", whole=False)
    end = max((b.at + b.seconds for b in run.metrics), default=0.0)
    rows = [_worker(worker, end) for worker in run.record.workers[:SHOWN]]
    heard = "A trainer hears who came and went while a batch is made."
    return [
        legend(chips),
        grid(
            [
                card(
                    f"Versions behind, batch by batch{of}",
                    f"One mark a worker, a little apart.{line}{thinned}",
                    behind,
                ),
                card(f"Age of the weights, batch by batch{of}", f"One mark a worker.{thinned}", ages),
            ]
        ),
        card(f"Workers{of}", heard, table(WORKERS, rows)),
    ]


def _row(run: RolloutRun) -> list[str]:
    record, batches = run.record, run.metrics
    totals, sent = record.totals, record.bytes.get("weights")
    behind, ages = _behind(batches), _ages(batches)
    return [
        run.label,
        str(len(batches)),
        f"{totals.get('samples', 0):.0f}",
        _rate(totals.get("tokens", 0), totals.get("elapsed", 0)),
        f"{behind[0]:.2f}" if batches else DASH,
        str(behind[1]) if batches else DASH,
        "any" if _bound(record) is None else str(_bound(record)),
        f"{ages[0]:.2f} s" if batches else DASH,
        f"{ages[1]:.2f} s" if batches else DASH,
        _waiting(record),
        DASH if sent is None else megabytes(sent),
    ]


def _worker(worker: RolloutWorkerFigures, end: float) -> list[str]:
    """Return a worker's row; ``end``: of the last batch."""
    there = sum(
        (max(end, begun or 0.0) if until is None else until) - (begun or 0.0)
        for begun, until in worker.spells
    )
    return [
        worker.name,
        f"{there:.0f} s",
        str(worker.parts),
        str(worker.samples),
        _rate(worker.tokens, worker.seconds),
        str(worker.behind),
        f"{worker.age_s:.2f} s",
        f"{worker.waited_s:.2f} s",
        str(worker.waits),
        str(worker.lost),
    ]


def _rate(many: float, seconds: float) -> str:
    return f"{many / seconds:,.0f}" if seconds else DASH


def _waiting(record: RolloutsRecord) -> str:
    busy = record.totals.get("busy", 0.0)
    return f"{100 * record.totals.get('waited', 0.0) / busy:.1f}\u202f%" if busy else DASH


def _bound(record: RolloutsRecord) -> int | None:
    bound = record.config.get("max_age")
    return bound if isinstance(bound, int) else None


def _behind(batches: Sequence[BatchMetrics]) -> tuple[float, int]:
    """Return by how many versions samples were behind, the mean and the most."""
    mean, most = _mean_and_most(batches, lambda part: part.behind)
    return mean, int(most)


def _ages(batches: Sequence[BatchMetrics]) -> tuple[float, float]:
    """Return the age of samples' weights in seconds, the mean and the most."""
    return _mean_and_most(batches, lambda part: part.age_s)


def _mean_and_most(
    batches: Sequence[BatchMetrics], value: Callable[[PartFigures], float]
) -> tuple[float, float]:
    parts = [part for batch in batches for part in batch.parts]
    total = sum(value(part) * part.samples for part in parts)
    return total / max(1, sum(part.samples for part in parts)), max(map(value, parts), default=0)


def _colour(place: int) -> int:
    """Return the colour of the worker who came as the ``place``-th: the first ones have one each."""
    return place + 1 if place < SERIES - 1 else 0


def _marks(run: RolloutRun, name: str, value: Callable[[PartFigures], float], label: str, whole: bool) -> str:
    """Return a mark for each worker and batch, or few batches; workers of a batch stand side by side."""
    from matplotlib.ticker import MaxNLocator

    axes, bound = new_axes(WIDTH, 3.3), _bound(run.record) if whole else None
    each, many = max(1, -(-len(run.metrics) // MARKS)), len(run.record.workers)
    for place, worker in enumerate(run.record.workers):
        oldest: dict[int, float] = {}
        for batch in run.metrics:
            at = (batch.batch - 1) // each * each + 1
            for part in batch.parts:
                if part.worker == worker.name:
                    oldest[at] = max(value(part), oldest.get(at, 0.0))
        aside = (place + 0.5) / many - 0.5
        xs, ys = [at + 0.6 * each * aside for at in oldest], list(oldest.values())
        if whole:  # or marks of several workers would hide each other
            ys = [y - 0.3 * aside for y in ys]
        axes.plot(xs, ys, "o", color=series_colour(_colour(place)), markersize=3.6, zorder=3)
    if bound is not None:
        axes.axhline(bound + 0.5, color=INK, linestyle="--", linewidth=1.2)
    axes.set_ylim(-0.5 if whole else 0, max(_behind(run.metrics)[1], bound or 0) + 1 if whole else None)
    ticks(axes, log=False)
    if whole:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    return labelled(axes, name, f"{label} of each batch, by worker", "batch", label)


def _share(run: RolloutRun) -> list[Points]:
    return [[(b.batch, 100 * b.waited / b.busy) for b in run.metrics if b.busy]]


def _speed(run: RolloutRun) -> list[Points]:
    return [[(b.batch, b.tokens / b.seconds) for b in run.metrics if b.seconds]]


def _figure(
    title: str, runs: Runs, points: Callable[[RolloutRun], list[Points]], y: str, least: float
) -> str:
    """Return a card of one curve a run, from 0 to ``least`` or more."""
    axes = new_axes(WIDTH, 3.3)
    highest = least
    for number, found, _ in by_run(runs, points):
        xs, ys = zip(*found, strict=True) if (found := list(found)) else ((), ())
        curve(axes, xs, ys, number)
        highest = max(highest, *ys, 0.0)
    axes.set_ylim(0, 1.05 * highest)
    ticks(axes, log=False)
    name = "rollouts-" + title.lower().replace(" ", "-").replace(",", "")
    return card(title, "", labelled(axes, name, f"{title}, one curve a run", "batch", y))
