"""The study of federated learning: what is compared, and what its cells come to."""

from __future__ import annotations

from typing import Any

import pytest
from bench.federated.methods import (
    GROUPS,
    METHODS,
    RATES,
    SEARCH,
    SEEDS,
    TABLES,
    cells,
    config_of,
    figures,
    joined,
    rows_of,
)
from bench.study.cells import interval

from thinwire.uses.federated.recipes import parse_federated_recipe
from thinwire.uses.federated.run.fleet import load_fleet


def cell(
    target: float | None, up: int = 100, best: float = 0.8, diverged: str | None = None
) -> dict[str, Any]:
    """Return what a run found that came to its target after ``target`` seconds, or took 50."""
    reached = None if target is None else {"accuracy": 0.78, "virtual_s": target, "up": up, "down": 3 * up}
    curve = [{"version": v, "density": None if v > 2 else 0.1 * v} for v in (1, 2, 3)]
    return {
        "rate": 0.1, "diverged": diverged, "target": reached,
        "bytes": {"up": 2 * up, "down": 6 * up, "raw_up": 400, "raw_down": 600},
        "totals": {"virtual_s": 50.0, "rounds": 3, "local_steps": 30},
        "accuracy": {"best": best, "final": best, "curve": curve},
    }  # fmt: skip


def test_every_cell_can_be_run_and_no_seed_of_the_search_is_measured() -> None:
    every = list(cells())
    searched = {(c.method, c.rate) for c in every if c.group == SEARCH}
    assert searched == {(m, r) for m in METHODS for r in RATES}
    assert not {c.seed for c in every if c.group == SEARCH} & {c.seed for c in every if c.group != SEARCH}
    assert {c.seed for c in every if c.group == "ten"} == set(SEEDS)
    for c in every:
        parse_federated_recipe(c.method)
        if c.group in (SEARCH, "gamma", "skew100", "skew1000"):
            config_of(c, "out").validate()
    for group in GROUPS.values():
        devices = group.options.get("devices", "equal")
        assert len(load_fleet(devices)) == group.options.get("clients", 10)


def test_an_interval_is_students() -> None:
    stats = pytest.importorskip("scipy.stats")
    values = [1.0, 4.0, 2.5, 3.0, 0.5, 2.0, 5.0, 1.5, 0.0, 2.5]
    for many in range(2, 11):
        mean, half = interval(values[:many])
        low, high = stats.t.interval(0.95, many - 1, loc=mean, scale=stats.sem(values[:many]))
        assert (mean - half, mean + half) == pytest.approx((low, high), rel=1e-3)
    assert interval([2.0]) == [2.0]


def test_runs_that_did_not_come_to_the_target_count_to_their_end() -> None:
    found = joined([cell(10.0), cell(None)])
    assert (found["seeds"], found["reached"], found["diverged"]) == (2, 1, 0)
    assert found["until"]["virtual_s"][0] == 30 and found["until"]["bytes"][0] == (400 + 800) / 2
    assert found["density"] == [[1, pytest.approx(0.1)], [2, pytest.approx(0.2)]]


def test_tables_say_who_did_not_come_to_the_target_and_what_was_missed() -> None:
    runs = [
        ("ten", "fedluck", cell(None, 2000, 0.7)), ("ten", "fedluck", cell(40.0, 2000)),
        ("ten", "qafel", cell(None, 100, 0.1, "not finite")), ("ten", "thinwire", cell(20.0)),
        ("ten", "thinwire", cell(22.0)),
    ]  # fmt: skip
    found = {"rows": rows_of(runs)}
    table, goals = TABLES["federated-ten"](found), TABLES["federated-goals"](found)
    assert "| `fedluck` | 0.1 | reached by 1 of 2 |" in table and "| `qafel` | 0.1 | diverged |" in table
    assert "| `thinwire` | 0.1 | 21 ± 13 s |" in table
    assert "| `fedluck` | bytes in all | 10× less | more than 30.0× less: met |" in goals
    assert "| `qafel` | bytes in all | 2× less | more than 2.0× less: met |" in goals


def test_a_cell_keeps_the_end_of_a_curve() -> None:
    record: dict[str, Any] = {"accuracy": {"curve": list(range(100)), "best": 1}, "clients": [0] * 1000}
    record |= dict.fromkeys(("recipe", "target", "bytes", "totals", "weights", "notes"))
    kept = figures(record)
    assert len(kept["accuracy"]["curve"]) <= 41 and kept["accuracy"]["curve"][-1] == 99
    assert kept["clients"] == []
