"""Every method of federated learning to one accuracy, over slow and unequal links: ``make bench-federated``.

Time is virtual and runs are the same wherever they run, so this machine's load changes no figure.
Groups of cells:

- ``search``: each method at each of four step sizes, on a seed that is measured nowhere else, for a third of
  the time. The one that is soonest at the target is the method's in ``ten`` to ``speakers``, so a run there
  ends where another one was;
- ``ten``: the demo's devices, both directions counted; ``free``: the same where downloads take no time;
- ``phones``: a thousand phones, of which a hundred take part at a time;
- ``speakers``: spoken digits, one speaker a client.

``python -m bench.federated.methods [GROUP] [METHOD] [seed=N]``: the cells that have these words.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from bench.study.cells import Kept, interval, run_study
from bench.study.tables import Draw, Row, Rows, spread, tabled
from thinwire.types import ThinwireError
from thinwire.uses.federated.run.comparison import folder_of, run_all
from thinwire.uses.federated.run.options import FederatedConfig
from thinwire.uses.kinds import load_run

KEPT = Kept("federated")
POINTS = 40  # of a curve that is kept
DEVICES = Path(__file__).parent
SEARCH, SEARCHED = "search", (100,)  # seeds
RATES = (0.1, 0.2, 0.05, 0.02)
SEEDS = (0, 1, 2, 3, 4)

METHODS = (
    "fedavg", "fedavg-topk", "fixed-threshold", "gamma-fedht", "dagc-r", "dagc-a", "accordion",
    "fedluck", "fedluck:feedback=1", "fedasync", "fedbuff", "qafel", "thinwire",
)  # fmt: skip
MAIN = ("fedavg", "fedavg-topk", "fedluck", "fedluck:feedback=1", "fedbuff", "qafel", "thinwire")
# Clients of few samples that rarely take part: of four sets of parameters this one, and a period of 2 s, were
# the soonest on the search's seed.
OURS = ("thinwire", "thinwire:up=0.2,down=0.1,period=3")
FEW = ("fedavg", "fedluck", "qafel", "thinwire")
# What is not looked at after each version: runs of many versions, by about as many as their time has.
MANY = {"fedluck": 2400, "fedasync": 800, "qafel": 600}

# Twenty local steps, as FedLuck's code has for FedAvg and FedBuff on this data [source]; fedluck and thinwire
# choose theirs.
TEN: dict[str, Any] = {
    "data": "fashion-mnist",
    "split": "dirichlet:1.0",
    "devices": "ten-one-straggler",
    "until": 0.78,
    "budget": "1h",
    "rounds": 200,
    "steps": 20,
}
PHONES = TEN | {"devices": "phones-1000", "clients": 1000, "participate": 100, "budget": "10m", "steps": 5}
SPEAKERS = TEN | {
    "data": "fsdd",
    "split": "speaker",
    "devices": str(DEVICES / "six-speakers.toml"),
    "clients": 6,
}


Found = Mapping[str, Any]  # of a cell


class Group(NamedTuple):
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    options: dict[str, Any]
    versions: dict[str, int] = MANY


GROUPS = {
    SEARCH: Group(METHODS, SEARCHED, TEN | {"budget": "20m"}),
    "ten": Group(METHODS, SEEDS, TEN),
    "free": Group(MAIN, SEEDS[:2], TEN | {"downlink": "free", "rounds": 400}),
    "phones": Group(("fedavg", "fedbuff:size=10", "fedluck", "qafel:size=10", *OURS), SEEDS[:1], PHONES),
    "speakers": Group(FEW, SEEDS[:1], SPEAKERS),
}


class Cell(NamedTuple):
    group: str
    method: str
    seed: int
    rate: float | None = None  # the one that was found for the method, or the group's


def cells() -> Iterator[Cell]:
    """Yield all cells; what is compared runs in turns."""
    for name, group in GROUPS.items():
        for seed in group.seeds:
            for method in group.methods:
                for rate in RATES if name == SEARCH else (None,):
                    yield Cell(name, method, seed, rate)


def config_of(cell: Cell, out: str = "") -> FederatedConfig:
    """Return the options of a cell."""
    group = GROUPS[cell.group]
    options: dict[str, Any] = {**group.options, "methods": cell.method, "seeds": str(cell.seed)}
    if "until" in options:  # else step size and rounds are the group's
        base = cell.method.partition(":")[0]
        options["rounds"] = group.versions.get(base, options["rounds"])
        options["lr"] = cell.rate or found_rate(cell.method if cell.method in METHODS else base)
    reached = [run["target"]["virtual_s"] for run in searched(cell.method).values() if run["target"]]
    if cell.group == SEARCH and reached:
        options["budget"] = f"{min(reached):.1f}s"
    return FederatedConfig(**options, out=out, workers=1, quiet=True)


def searched(method: str) -> dict[float, dict[str, Any]]:
    """Return what the search found so far of a method, by step size."""
    runs = {c.rate: KEPT.get(c) for c in cells() if (c.group, c.method) == (SEARCH, method)}
    return {rate: run for rate, run in runs.items() if rate and run}


def found_rate(method: str) -> float:
    """Return the step size that the search found for a method."""
    known = searched(method)
    if len(known) < len(RATES):
        raise SystemExit(
            f"{method} is not searched yet; run python -m bench.federated.methods {SEARCH} {method}"
        )
    return best_rate(known)


def measure(cell: Cell) -> dict[str, Any]:
    """Run a cell."""
    with tempfile.TemporaryDirectory() as out:
        return measured(config_of(cell, out), cell.method, cell.seed)


def measured(config: FederatedConfig, method: str, seed: int) -> dict[str, Any]:
    """Run one method on one seed; a run whose numbers ran away is a finding too."""
    diverged = None
    try:
        run_all(config, lambda *_: None)
    except ThinwireError as e:
        if "not finite" not in str(e) and "not be finite" not in str(e):
            raise
        diverged = str(e)
    record = load_run(folder_of(config, method, seed)).to_dict()
    return {"rate": config.lr, "diverged": diverged, **figures(record)}


def figures(record: dict[str, Any]) -> dict[str, Any]:
    """Return what a cell keeps of a record."""
    names = ("recipe", "target", "bytes", "totals", "weights", "notes")
    curve = record["accuracy"]["curve"]
    every = math.ceil(len(curve) / POINTS) or 1
    accuracy = record["accuracy"] | {"curve": curve[(len(curve) - 1) % every :: every]}  # its end is kept
    clients = record["clients"] if len(record["clients"]) <= POINTS else []
    return {name: record[name] for name in names} | {"accuracy": accuracy, "clients": clients}


def best_rate(found: Mapping[float, Found]) -> float:
    """Return the step size that was soonest at the target; of equal ones, the most accurate.

    >>> accuracy = {"best": 0.7}
    >>> late, soon = ({"target": target, "accuracy": accuracy} for target in (None, {"virtual_s": 9.0}))
    >>> best_rate({0.1: late, 0.2: soon})
    0.2
    """

    def late(rate: float) -> tuple[float, float]:
        cell = found[rate]
        target = cell["target"]
        return target["virtual_s"] if target else math.inf, -(cell["accuracy"]["best"] or 0.0)

    return min(found, key=late)


def rows_of(found: Iterable[tuple[str, str, Found]]) -> list[dict[str, Any]]:
    """Return a row for each group and method, of which each seed's cell is given."""
    rows: dict[tuple[str, str], list[Found]] = {}
    for group, method, cell in found:
        rows.setdefault((group, method), []).append(cell)
    return [{"group": g, "method": m, **joined(cells)} for (g, m), cells in rows.items()]


def joined(cells: Sequence[Found]) -> dict[str, Any]:
    """Return what a method's runs come to.

    ``until``: means to the target where all runs came to it, else to the end: then bounds from below.
    """
    targets = [cell["target"] for cell in cells]
    whole = [cell["bytes"] | {"virtual_s": cell["totals"]["virtual_s"]} for cell in cells]
    until = [t or end for t, end in zip(targets, whole, strict=True)]
    each = {name: [float(u[name]) for u in until] for name in ("virtual_s", "up", "down")}
    each["bytes"] = [up + down for up, down in zip(each["up"], each["down"], strict=True)]
    sent = [cell["bytes"] for cell in cells]
    return {
        "seeds": len(cells),
        "rate": cells[0]["rate"],
        "reached": sum(t is not None for t in targets),
        "diverged": sum(cell["diverged"] is not None for cell in cells),
        "until": {name: interval(values) for name, values in each.items()},
        "best": interval([cell["accuracy"]["best"] or 0.0 for cell in cells]),
        "final": interval([cell["accuracy"]["final"] or 0.0 for cell in cells]),
        "up_share": interval([b["up"] / b["raw_up"] if b["raw_up"] else 0.0 for b in sent]),
        "versions": interval([float(cell["totals"]["rounds"]) for cell in cells]),
        "local_steps": interval([float(cell["totals"]["local_steps"]) for cell in cells]),
        "density": densities(cells),
    }


def densities(cells: Sequence[Found]) -> list[list[float]]:
    """Return the mean share of the values, as bytes, that updates sent, by version."""
    by_version: dict[int, list[float]] = {}
    for cell in cells:
        for point in cell["accuracy"]["curve"]:
            if point["density"] is not None:
                by_version.setdefault(point["version"], []).append(point["density"])
    kept = sorted(by_version.items())
    every = math.ceil(len(kept) / 10) or 1
    return [[version, fmean(values)] for version, values in kept[::every]]


def summary() -> dict[str, Any]:
    """Return the figures of all cells together."""
    found = ((cell, KEPT.get(cell)) for cell in cells() if cell.group != SEARCH)
    return {"target": TEN["until"], "rows": rows_of((c.group, c.method, run) for c, run in found if run)}


GOALS = (  # against whom, what, at least how many times
    ("fedluck", "bytes", "bytes in all", 10.0),
    ("fedluck", "up", "bytes sent up", 3.0),
    ("fedluck", "virtual_s", "virtual time", 1 / 0.7),
    ("qafel", "bytes", "bytes in all", 2.0),
)


@tabled("method", "step size", "time to the target", "sent up", "sent down", "in all", "best accuracy")
def to_target(group: str, found: Any) -> Rows:
    """Every method of a group, to the target."""
    for r in _of(found, group):
        until = r["until"]
        time = spread(until["virtual_s"], "{:,.0f}") + " s" if r["reached"] == r["seeds"] else _short(r)
        sent = [spread(until[name], "{:,.2f}", 1e6) + " MB" for name in ("up", "down", "bytes")]
        yield [f"`{r['method']}`", f"{r['rate']:g}", time, *sent, _percent(r["best"])]


def _short(r: Row) -> str:
    """Return what became of runs that did not all come to the target."""
    seeds, diverged = r["seeds"], r["diverged"]
    if seeds == 1:
        return "diverged" if diverged else "not reached"
    return f"reached by {r['reached']} of {seeds}" + (f", {diverged} diverged" if diverged else "")


@tabled("`thinwire` against", "what", "goal", "measured")
def goals(found: Any) -> Rows:
    """How many times less than others, by means; where a rival did not come to the target, at least that."""
    rows = {r["method"]: r for r in _of(found, "ten")}
    ours = rows.get("thinwire")
    for rival, name, what, goal in GOALS:
        theirs = rows.get(rival)
        if ours is None or theirs is None:
            continue
        times = theirs["until"][name][0] / ours["until"][name][0]
        bound = "more than " if theirs["reached"] < theirs["seeds"] else ""
        short = "" if ours["reached"] == ours["seeds"] else ", without coming to the target itself"
        met = "met" if times >= goal and not short else "missed"
        yield [f"`{rival}`", what, f"{goal:.2g}× less", f"{bound}{times:.1f}× less{short}: {met}"]


def _of(found: Any, group: str) -> list[Row]:
    return [r for r in found["rows"] if r["group"] == group]


def _percent(values: list[float]) -> str:
    return spread([100 * v for v in values], "{:.1f}") + " %"


TABLES: dict[str, Draw] = {
    **{f"federated-{name}": partial(to_target, name) for name in ("ten", "free", "phones", "speakers")},
    "federated-goals": goals,
}


if __name__ == "__main__":
    torch.set_num_threads(1)  # no pool of threads beside another bench
    run_study("federated", sys.argv[1:], cells, measure, summary)
