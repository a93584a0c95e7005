"""A bench of one result goes on after its last finished cell."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.cells import Cells, keep, makers

from bench import cells as bench_cells
from bench import codecs


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


@pytest.mark.parametrize("after", ["other settings", "a finished bench"])
def test_cells_are_measured_anew_after(after: str, tmp_path: Path) -> None:
    result, done = tmp_path / "b.json", []
    cells = Cells(result, {"sizes": (1, 4)})
    measure(cells, "x", done)
    if after == "a finished bench":
        cells.finish({})
    measure(Cells(result, {"sizes": (1, 4) if after == "a finished bench" else (1, 4, 32)}), "x", done)
    assert done == ["x", "x"]


def test_the_codec_bench_stopped_between_two_sizes_times_the_second_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, asked = tmp_path / "codecs.json", []

    def timed(megabytes: float, rounds: int) -> list[dict[str, Any]]:
        asked.append(megabytes)
        if asked == [1, 4]:
            raise KeyboardInterrupt
        return [{"codec": "Cast()", "input_bytes": round(megabytes * 1e6)}]

    monkeypatch.setattr(codecs, "timed", timed)
    monkeypatch.setattr(codecs, "show", lambda rows: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    monkeypatch.setattr("sys.argv", ["codecs", "--megabytes", "1", "4", "--out", str(result)])
    with pytest.raises(KeyboardInterrupt):
        codecs.main()
    codecs.main()
    assert asked == [1, 4, 4]
    assert [r["input_bytes"] for r in json.loads(result.read_text())["rows"]] == [1_000_000, 4_000_000]


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


def test_code_that_is_another_at_the_end_of_a_cell_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench_cells, "__file__", str(tmp_path / "cells.py"))
    keep(tmp_path / "cell.json", {})
    assert (
        json.loads((tmp_path / "cell.json").read_text())["made"]["commit"] == f"{bench_cells.COMMIT}..unknown"
    )
