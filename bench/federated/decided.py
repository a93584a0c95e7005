"""Enough seeds to decide what federated papers claim: ``make bench-federated-claims``.

Every method of a group has the same search: from a start it climbs over step sizes (and, for ``pair``, over
local steps and shares) until those on both sides are worse, so no end of a grid wins. Searches run on seeds
that are reported nowhere. What is not searched is the paper's or its released code's. Groups:

- ``luck``, ``luck-counted``: FedLuck's links and processors, as scaled to this model, downloads free as its
  code has them; and with downloads counted, in our study's batches. ``pair``: one pair of steps and share for
  all devices, in the place of FedLuck's solver;
- ``logistic-N``: gamma-FedHT's own setting on this data, N classes a client [quoted: table]. ``cnn-N``: as it
  has CIFAR-10. ``slow``: a step size that falls more slowly. Thresholds and Top-k are fitted to one traffic.
  The paper's alpha is not known: 2 and 1 are both searched;
- ``skew-N``: DAGC's, iterations to 70 %; ``power``: other exponents than its 2/3 and Top-k's 0.

Times are virtual, and runs the same wherever they run. ``python -m bench.federated.decided [GROUP] [METHOD]
[seed=N]`` runs the cells that have these words; ``--cost`` says what is left, in CPU-hours.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

import torch

from bench.federated.methods import TEN, Found, measured, rows_of
from bench.federated.watched import watching
from bench.study.cells import Kept, run_study
from thinwire.uses.federated.run.options import FederatedConfig

STUDY = "claims"
KEPT = Kept(STUDY)
SEEDS, SEARCHED = tuple(range(10)), (100, 101)
FIRST_RATE, LONGEST = 0.1, 12  # the climb's start; steps of a climb
NEAR, TRIES = 0.05, 6  # of a traffic that is fitted
Point = tuple[int, ...]


class Group(NamedTuple):
    """What is compared, by label; a method with ``{x}`` is fitted to ``share`` of the bytes.

    ``seconds``: CPU-seconds of a cell, as far as none has run.
    """

    methods: dict[str, str]
    options: dict[str, Any]
    seconds: float
    share: float = 0.0
    start: int = 0  # of the climb over step sizes
    seeds: tuple[int, ...] = SEEDS


class Cell(NamedTuple):
    group: str
    label: str
    method: str
    rate: float
    seed: int


# Steps and shares of the released code on this data [quoted: code]; the pair is where its climb begins.
LUCK = {
    "fedavg": "fedavg:steps=20",
    "topk": "fedavg-topk:ratio=0.5,steps=20",
    "fedasync": "fedasync:steps=13",
    "fedbuff": "fedbuff:steps=20",
    "fedluck": "fedluck",
    "pair": "fedluck:steps={k},ratio={d}",
}
OTHERS = {"qafel": "qafel:steps=20", "thinwire": "thinwire"}
THRESHOLDS = {
    "topk": "fedavg-topk:ratio={x}",
    "fixed": "fixed-threshold:threshold={x}",
    "gamma": "gamma-fedht:threshold={x}",
    "gamma-1": "gamma-fedht:threshold={x},alpha=1",
    "all": "fedavg",
}
SHARES = {
    "dagc-r": "dagc-r:ratio=0.001",
    "topk": "fedavg-topk:ratio=0.001,steps=10",
    "dagc-a": "dagc-a:threshold=0.05",
    "one": "fixed-threshold:threshold=0.05,steps=10",
}
POWERS = {f"p{p:g}": f"dagc-r:ratio=0.001,power={p:g}" for p in (0.3333, 1, 1.3333)}
LONG = TEN | {"budget": "4h", "rounds": 4000}
FEDHT: dict[str, Any] = {"rounds": 100, "decay": 0.15, "eval_every": 5}
SKEWED: dict[str, Any] = {"rounds": 120, "until": 0.7, "steps": 10, "batch": 32, "eval_every": 1}
START = {"x": 0.03}


def _fedht(classes: int, share: float, seconds: float, **own: Any) -> Group:
    return Group(THRESHOLDS, FEDHT | {"split": f"classes:{classes}"} | own, seconds, share, start=-2)


def _skew(ratio: int, methods: dict[str, str] = SHARES) -> Group:
    return Group(methods, SKEWED | {"split": f"dirichlet:0.5+skew:{ratio}"}, 80)


GROUPS = {  # what decides most a CPU-hour first
    "logistic-2": _fedht(2, 0.0220, 4, model="logistic"),
    "logistic-3": _fedht(3, 0.0204, 4, model="logistic"),
    "skew-100": _skew(100),
    "luck": Group(LUCK, LONG | {"downlink": "free", "batch": 64}, 90),
    "cnn-3": _fedht(3, 0.0036, 30),
    "power": _skew(100, POWERS),
    "luck-counted": Group(LUCK | OTHERS, LONG, 50),
    "skew-1000": _skew(1000),
    "skew-10": _skew(10),
    "slow": _fedht(3, 0.0036, 30, decay=0.02),
    "cnn-2": _fedht(2, 0.0033, 30),
}


def cells() -> Iterator[Cell]:
    """Yield the cells that are known so far: of each method its search, then what is reported, in turns."""
    seen = set[Cell]()  # a climb looks at most points twice
    for cell in _cells():
        if cell not in seen:
            seen.add(cell)
            yield cell


def _cells() -> Iterator[Cell]:
    for name, group in GROUPS.items():
        for label in group.methods:
            yield from search(name, label)
        found = [cell for label in group.methods if (cell := settled(name, label))]
        yield from (cell._replace(seed=seed) for seed in group.seeds for cell in found)


def settled(group: str, label: str) -> Cell | None:
    """Return a cell of the best that a method's search found; None while it has no end."""
    steps = search(group, label)
    while True:
        try:
            next(steps)
        except StopIteration as e:
            found: Cell | None = e.value
            return found


def search(group: str, label: str) -> Generator[Cell, None, Cell | None]:
    """Yield the cells of a method's search; return one of its best point, or None where some are missing."""
    first = GROUPS[group].start
    start: Point = (first, 0, 0) if label == "pair" else (first,)

    def tried(point: Point) -> Iterator[Cell]:
        method = method_of(group, label, point)
        if "{x}" in method:
            method = yield from fit(group, label, rate_of(point))
        if method:
            yield from (Cell(group, label, method, rate_of(point), seed) for seed in SEARCHED)

    def score(point: Point) -> tuple[float, ...] | None:
        every = list(tried(point))
        runs = [KEPT.get(cell) for cell in every]
        if None in runs:
            return None
        whole = [cell.seed for cell in every[-len(SEARCHED) :]] == [*SEARCHED]
        return score_of(runs[-len(SEARCHED) :]) if whole else (math.inf,)  # no traffic as it should be

    found = yield from climb(start, tried, score)
    return list(tried(found))[-1] if found else None


def climb(
    at: Point,
    tried: Callable[[Point], Iterator[Cell]],
    score: Callable[[Point], tuple[float, ...] | None],
) -> Generator[Cell, None, Point | None]:
    """Yield what is to be tried, from a point to the best neighbour, until none is better; return that.

    None where something is missing, or there is no end after ``LONGEST`` moves.
    """
    for _ in range(LONGEST):
        near = [at, *beside(at)]
        for point in near:
            yield from tried(point)
        known = {point: score(point) for point in near}
        scores = {point: own for point, own in known.items() if own is not None}
        if len(scores) < len(near):
            return None
        best = min(near, key=scores.__getitem__)
        if best == at:
            return at if scores[at][0] < math.inf else None
        at = best
    return None


def beside(at: Point) -> Iterator[Point]:
    """Yield the points one step away along each axis.

    >>> list(beside((0, 2)))
    [(-1, 2), (1, 2), (0, 1), (0, 3)]
    """
    for i, x in enumerate(at):
        yield from ((*at[:i], y, *at[i + 1 :]) for y in (x - 1, x + 1))


def score_of(runs: Sequence[Found]) -> tuple[float, ...]:
    """Return what a search makes least: seconds to the target, where there is one; else lost accuracy."""
    diverged = sum(run["diverged"] is not None for run in runs)
    lost = -fmean(run["accuracy"]["final"] or 0.0 for run in runs)
    if not runs[0]["until"]:
        return float(diverged), lost
    times = [run["target"]["virtual_s"] for run in runs if run["target"]]
    return float(len(runs) - len(times)), fmean(times or [math.inf]), lost


def rate_of(point: Point) -> float:
    """Return a point's step size.

    >>> rate_of((0,)), rate_of((-2, 5, 1))
    (0.1, 0.025)
    """
    return FIRST_RATE * 2.0 ** point[0]


def method_of(group: str, label: str, point: Point) -> str:
    """Return the recipe at a point: ``pair`` from 10 steps and 30 % on, by factors of 2 and 3.

    >>> method_of("luck", "pair", (0, -1, -1)), method_of("luck", "fedluck", (3,))
    ('fedluck:steps=5,ratio=0.1', 'fedluck')
    """
    method = GROUPS[group].methods[label]
    if label != "pair":
        return method
    steps, ratio = max(1, round(10 * 2.0 ** point[1])), min(1.0, 0.3 * 3.0 ** point[2])
    return method.format(k=steps, d=f"{ratio:.4g}")


def fit(group: str, label: str, rate: float) -> Generator[Cell, None, str]:
    """Yield cells until one sends the group's share of the bytes; return its recipe, or nothing."""
    points = list[tuple[float, float]]()
    x: float | None = START["x"]
    while x is not None:
        cell = Cell(group, label, GROUPS[group].methods[label].format(x=f"{x:.3g}"), rate, SEARCHED[0])
        yield cell
        found = KEPT.get(cell)
        if found is None or found["diverged"] is not None:
            return ""
        points.append((x, found["bytes"]["up"] / found["bytes"]["raw_up"]))
        x = next_try(points, GROUPS[group].share)
    near = abs(points[-1][1] / GROUPS[group].share - 1) <= NEAR
    return cell.method if near else ""


def next_try(points: Sequence[tuple[float, float]], share: float) -> float | None:
    """Return what to try next, so that a share follows; None where the last is near, or enough were tried.

    Shares go as a power of what is tried, by the last two.

    >>> next_try([(0.01, 0.04)], 0.01), next_try([(0.01, 0.04), (0.02, 0.02)], 0.01)
    (0.02, 0.04)
    """
    (x, last) = points[-1]
    if abs(last / share - 1) <= NEAR or len(points) == TRIES:
        return None
    if len(points) == 1 or not last or last == points[-2][1] or not points[-2][1]:
        return 2 * x
    before = points[-2]
    power = math.log(last / before[1]) / math.log(x / before[0])
    return float(x * min(8.0, max(1 / 8, (share / last) ** (1 / power))))


def config_of(cell: Cell, out: str = "") -> FederatedConfig:
    """Return the options of a cell; a search's run ends where another of the method was sooner."""
    own = {"methods": cell.method, "seeds": str(cell.seed), "lr": cell.rate, "out": out}
    options = {**GROUPS[cell.group].options, **own}
    same = f"{cell.group} {cell.label} "
    known = (run for name, run in KEPT.all().items() if name.startswith(same))
    reached = [run["target"]["virtual_s"] for run in known if run["target"]]
    if cell.seed in SEARCHED and reached and "budget" in options:
        options["budget"] = f"{1.5 * min(reached):.1f}s"
    return FederatedConfig(**options, workers=1, quiet=True)


def measure(cell: Cell) -> dict[str, Any]:
    """Run a cell, and keep its CPU-seconds, what its target was, and what clients held back by threshold."""
    began = time.process_time()
    with tempfile.TemporaryDirectory() as out, watching() as watch:
        found = measured(config_of(cell, out), cell.method, cell.seed)
    until, seconds = GROUPS[cell.group].options.get("until"), time.process_time() - began
    return found | {"until": until, "cpu_s": seconds, "held_back": watch.points()[:: FEDHT["eval_every"]]}


def better(group: str, labels: Sequence[str]) -> str | None:
    """Return the one of some labels whose search ended best; None where a search has no end."""
    best = [cell for label in labels if (cell := settled(group, label))]
    if len(best) < len(labels):
        return None
    return min(best, key=lambda cell: score_of([KEPT.get(cell._replace(seed=s)) for s in SEARCHED])).label


def found_of(best: Cell, seed: int) -> Found | None:
    """Return a reported run, or None where it is missing, or diverged."""
    run: Found | None = KEPT.get(best._replace(seed=seed))
    return run if run and run["diverged"] is None else None


def summary() -> dict[str, Any]:
    """Return the figures of what is reported, by group and label."""
    every = ((name, label) for name, group in GROUPS.items() for label in group.methods)
    best = [cell for name, label in every if (cell := settled(name, label))]
    found = ((cell, found_of(cell, seed)) for cell in best for seed in GROUPS[cell.group].seeds)
    rows = rows_of((cell.group, cell.label, run) for cell, run in found if run)
    recipes = {(cell.group, cell.label): cell.method for cell in best}
    return {"rows": [row | {"recipe": recipes[row["group"], row["method"]]} for row in rows]}


def cost() -> str:
    """Return what is left at least: a search has three points a method, three tries more where it fits."""
    lines, total = list[str](), 0.0
    for name, group in GROUPS.items():
        known = [run for key, run in KEPT.all().items() if key.startswith(f"{name} ")]
        each = median(run["cpu_s"] for run in known) if known else group.seconds
        fits = sum("{x}" in method for method in group.methods.values())
        whole = len(group.methods) * (3 * len(SEARCHED) + len(group.seeds)) + 9 * fits
        left = max(0, whole - len(known))
        total += left * each / 3600
        lines.append(f"{name}: {left} of some {whole} cells, {each:.0f} s each, {left * each / 3600:.1f} h")
    return "\n".join([*lines, f"all: {total:.1f} h"])


if __name__ == "__main__":
    torch.set_num_threads(1)  # no pool of threads beside another bench
    if "--cost" in sys.argv:
        print(cost())
    else:
        run_study(STUDY, sys.argv[1:], cells, measure, summary)
