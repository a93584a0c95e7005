"""Every method of federated learning to one accuracy, over slow and unequal links: ``make bench-federated``.

Time is virtual and runs are the same wherever they run, so this machine's load changes no figure.
``bench.federated.plan`` has what is compared. Groups of cells:

- ``search``: each method at each of four step sizes, on a seed that is measured nowhere else, for a third of
  the time. The one that is soonest at the target is the method's in ``ten`` to ``speakers``, so a run there
  ends where another one was;
- ``ten``: the demo's devices, both directions counted; ``free``: the same where downloads take no time;
- ``phones``: a thousand phones, of which a hundred take part at a time;
- ``speakers``: spoken digits, one speaker a client;
- ``gamma``: thresholds that follow the step size, and Top-k at equal traffic;
- ``skew100``, ``skew1000``: shares by amounts of data, and the same for all.

Each cell is a file of its own, kept for good. ``python -m bench.federated.methods [GROUP] [METHOD] [seed=N]``
runs the cells alone whose names hold these words; ``--list`` prints their names.
"""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.federated.plan import GROUPS, METHODS, RATES, SEARCH, TEN, Cell, cells
from bench.federated.summary import best_rate, summary
from bench.study.cells import RESULTS, run_cells
from thinwire.runs.records.writer import read_json, write_json
from thinwire.types import ThinwireError
from thinwire.uses.federated.run.options import FederatedConfig
from thinwire.uses.federated.run.run import folder_of, run_all
from thinwire.uses.kinds import load_run

RESULT = RESULTS / "federated.json"
CELLS = RESULT.with_suffix("")
POINTS = 40  # of a curve that is kept


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


def file_of(cell: Cell) -> Path:
    """Return where a cell is kept."""
    return CELLS / f"{cell.name}.json"


def found(cell: Cell) -> dict[str, Any] | None:
    """Return what a cell found, or None where it has not run."""
    return read_json(file_of(cell)) if file_of(cell).exists() else None


def searched(method: str) -> dict[float, dict[str, Any]]:
    """Return what the search found so far of a method, by step size."""
    runs = {c.rate: found(c) for c in cells() if (c.group, c.method) == (SEARCH, method)}
    return {rate: run for rate, run in runs.items() if run}


def found_rate(method: str) -> float:
    """Return the step size that the search found for a method."""
    known = searched(method)
    if len(known) < len(RATES):
        raise SystemExit(
            f"{method} is not searched yet; run python -m bench.federated.methods {SEARCH} {method}"
        )
    return best_rate(known)


def measure(cell: Cell) -> dict[str, Any]:
    """Run a cell; a run whose numbers ran away is a finding too."""
    with tempfile.TemporaryDirectory() as out:
        config, diverged = config_of(cell, out), None
        try:
            run_all(config, lambda *_: None)
        except ThinwireError as e:
            if "not finite" not in str(e) and "not be finite" not in str(e):
                raise
            diverged = str(e)
        record = load_run(folder_of(config, cell.method, cell.seed)).to_dict()
    return {"rate": config.lr, "diverged": diverged, **figures(record)}


def figures(record: dict[str, Any]) -> dict[str, Any]:
    """Return what a cell keeps of a record."""
    names = ("recipe", "target", "bytes", "totals", "weights", "notes")
    curve = record["accuracy"]["curve"]
    every = math.ceil(len(curve) / POINTS) or 1
    accuracy = record["accuracy"] | {"curve": curve[(len(curve) - 1) % every :: every]}  # its end is kept
    clients = record["clients"] if len(record["clients"]) <= POINTS else []
    return {name: record[name] for name in names} | {"accuracy": accuracy, "clients": clients}


def result() -> dict[str, Any]:
    """Return the figures of all cells together, and the names of those that are missing."""
    kept = [(cell, found(cell)) for cell in cells()]
    measured = [(cell.group, cell.method, run) for cell, run in kept if run and cell.group != SEARCH]
    missing = [cell.name for cell, run in kept if not run]
    return {"target": TEN["until"], "rows": summary(measured), "missing": missing}


def main(words: list[str]) -> None:
    torch.set_num_threads(1)  # no pool of threads beside another bench
    if run_cells(words, list(cells()), file_of, measure):
        write_json(RESULT, result())


if __name__ == "__main__":
    main(sys.argv[1:])
