"""A study goes on after its last finished cell, and says by what each was made."""

from __future__ import annotations

import json
import pkgutil
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from bench.study.cells import Cells, Kept, makers, run_study

from bench.study import cells as study
from thinwire.types import MeasurementError

STUDIES = {
    "links": "bench.training.links", "rounds": "bench.training.rounds", "plan": "bench.training.plan",
    "quality": "bench.training.quality",
    "replicas": "bench.training.replicas", "state": "bench.following.costs",
    "diffusion": "bench.pictures.diffusion", "experts": "bench.pictures.experts",
    "federated": "bench.federated.methods", "scenes": "bench.scenes.formats",
    "models": "bench.models.packed", "supernet": "bench.models.supernet",
}  # fmt: skip


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


class Named(NamedTuple):
    way: str
    bits: float
    seed: int


def test_a_study_goes_on_and_keeps_a_line_for_each_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(study, "RESULTS", tmp_path)
    every, tried = [Named("b", 3.5, 1), Named("a", 1e-6, 0), Named("late", 2.0, 0)], list[str]()

    def measure(cell: Named) -> dict[str, Any]:
        tried.append(cell.way)
        if cell.way == "late":
            raise MeasurementError("too busy")
        return {"seconds": [cell.bits, float("inf")]}

    def run(*words: str) -> None:
        known = {"known": len(Kept("s").all())}
        run_study("s", words, lambda: every, measure, lambda: {**known, "kept": len(Kept("s").all())}, 2)

    run("--list")
    run("b", "seed=1")
    assert tried == ["b"]
    with pytest.raises(SystemExit, match="not measured: late 2 seed=0: too busy"):
        run()
    with pytest.raises(SystemExit, match="no cell has c in its name"):
        run("c")
    assert tried == ["b", "a", "late", "late"]  # the second attempt at what is late is the last
    found = json.loads((tmp_path / "s.json").read_text())
    assert found == {"missing": ["late 2 seed=0"], "known": 1, "kept": 2}
    lines = (tmp_path / "cells" / "s.json").read_text().splitlines()
    assert [line.partition(":")[0] for line in lines[1:-1]] == ['"a 1e-06 seed=0"', '"b 3.5 seed=1"']
    kept = Kept("s")
    assert kept.get(every[0])["seconds"] == [3.5, None] and kept.get("c", 1.0) is None
    other = Kept("s")  # another process, which writes at the same time
    other.keep(Named("c", 1.0, 0), {"x": 1})
    kept.keep(Named("d", 1.0, 0), {"x": 2})
    names = ["a 1e-06 seed=0", "b 3.5 seed=1", "c 1 seed=0", "d 1 seed=0"]
    assert sorted(kept.all()) == list(other.all()) == names


def test_every_study_has_names_for_its_cells():
    """Two cells of one name would be one line, and a line whose name is no cell's is read by nobody."""
    pytest.importorskip("zstandard")
    for name, module in STUDIES.items():
        cells = [" ".join(study.words_of(cell)) for cell in pkgutil.resolve_name(module).cells()]
        assert len(set(cells)) == len(cells) and set(cells) & set(Kept(name).all()), name


def test_a_kept_cell_says_where_and_by_what_it_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(study, "RESULTS", tmp_path)
    Kept("s").keep(("cell",), {"seconds": [1.0]})
    made = (kept := Kept("s").get("cell"))["made"]
    assert datetime.fromisoformat(made["finished"]).tzinfo and made["versions"]["torch"] == torch.__version__
    assert makers([kept, {"seconds": []}, kept]) == {
        f"{made['machine']['cpu']}, commit {made['commit']}": 2,
        "not recorded": 1,
    }
