"""A bench of one result goes on after its last finished cell."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from bench.study.cells import Cells, keep, makers


def measure(cells: Cells, names: str, done: list[str]) -> dict[str, Any]:
    """Return the cells, noting in ``done`` what had to be measured."""
    return {n: cells.of(n, lambda n=n: done.append(n) or {"value": n * 2}) for n in names}


def test_a_stopped_bench_measures_only_what_is_missing(tmp_path: Path) -> None:
    result, done = tmp_path / "b.json", []
    measure(Cells(result, {"rounds": 3}), "xy", done)
    assert not result.exists()
    cells = Cells(result, {"rounds": 3})
    found = measure(cells, "xyz", done)
    assert done == ["x", "y", "z"] and found == {n: {"value": n * 2} for n in "xyz"}
    cells.finish(found)
    assert json.loads(result.read_text()) == found and list(tmp_path.iterdir()) == [result]
    measure(Cells(result, {"rounds": 3}), "x", done)  # after a finished bench all is measured anew
    measure(Cells(result, {"rounds": 4}), "x", done)  # and with other settings
    assert done == ["x", "y", "z", "x", "x"]


def test_a_kept_cell_says_where_and_by_what_it_was_made(tmp_path: Path):
    file = tmp_path / "new" / "cell.json"
    keep(file, {"seconds": [1.0]})
    kept = json.loads(file.read_text())
    assert kept["seconds"] == [1.0]
    made = kept["made"]
    assert datetime.fromisoformat(made["finished"]).tzinfo and made["versions"]["torch"] == torch.__version__
    assert makers([kept, {"seconds": []}, kept]) == {
        f"{made['machine']['cpu']}, commit {made['commit']}": 2,
        "not recorded": 1,
    }
