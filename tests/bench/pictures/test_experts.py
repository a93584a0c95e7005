"""The study of experts over ranks: its cells, and what its tables say of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bench.pictures.experts import BATCH, GROUPS, cells, identity, joined, meshes, spread_pictures, stale

from bench.pictures import experts, tables
from thinwire.uses.pictures.expert_parallel.recipes import parse_experts_recipe
from thinwire.uses.pictures.run.flux_fashion_moe import build
from thinwire.uses.pictures.run.sheets import sample_each


def found(nbytes: int, db: float | None, seconds: float) -> dict[str, Any]:
    """Return what a cell keeps of a way that was timed."""
    waits = {"wait_s": seconds / 2, "code_s": seconds / 10}
    return {"seconds": seconds, "nbytes": nbytes, "psnr_db": db, **waits}


def row(group: str, link: str, way: str, *of: dict[str, Any]) -> dict[str, Any]:
    return {"group": group, "link": link, "way": way} | joined(list(of))


def test_every_cell_is_of_ways_that_there_are() -> None:
    every = list(cells())
    assert {c.link for c in every if c.group == "two"} == {"100mbit", "20mbit"}
    for way in {way for c in every for way in c.ways}:
        parse_experts_recipe(way)
    for group in GROUPS.values():
        assert group.pictures % group.at_once == group.at_once % BATCH == 0


def test_a_cell_is_kept_until_what_it_is_of_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts.KEPT, "file", tmp_path / "cells" / "experts.json")
    cell = next(cells())
    assert experts.KEPT.get(cell) is None
    found = {"ways": {}} | identity(cell)
    experts.KEPT.keep(cell, found)
    assert not stale(cell, experts.KEPT.get(cell))
    for name in ("specs", "weights"):
        experts.KEPT.keep(cell, found | {name: found[name] | {next(iter(found[name])): "other"}})
        assert stale(cell, experts.KEPT.get(cell))


def test_seeds_are_joined() -> None:
    one = joined([found(10, 30.0, 1.0), found(30, None, 5.0), found(20, 40.0, 2.0)])
    assert one == {"seeds": 3, "nbytes": 20, "seconds": 2.0, "waited": pytest.approx(0.6), "psnr_db": 35.0}
    assert joined([{"nbytes": 1, "psnr_db": None}])["psnr_db"] is None


def test_goals_are_held_against_synchronous_of_the_same_group() -> None:
    rows = [
        row("two", "20mbit", "ep-sync", found(100, None, 30.0)),
        row("two", "20mbit", "dice-residual", found(30, 40.0, 20.0)),
        row("four", "unlimited", "ep-sync", {"nbytes": 100, "psnr_db": None}),
        row("four", "unlimited", "dice-residual", {"nbytes": 41, "psnr_db": 40.0}),
        row("distance", "unlimited", "ep-sync", *(
            {"nbytes": 100, "seed": i, "distance": d, "accuracy": 0.9} for i, d in enumerate((4.0, 4.2)))),
        row("distance", "unlimited", "dice-residual",
            {"nbytes": 41, "seed": 1, "distance": 4.7, "accuracy": 0.9}),
    ]  # fmt: skip
    study = {"rows": rows, "links": {"unlimited": "none", "20mbit": "20mbit,20ms"}}
    goals = tables.goals(study)
    assert "| faster over 20mbit | at least 1.2× | 1.50×: met |" in goals
    assert "| bytes of synchronous | at most 40% | 41%: missed |" in goals
    assert "| garment distance | at most 4.61 | 4.70: missed |" in goals
    assert "| `dice-residual` | 0.0 MB | 30% | 40.0 dB | 20.0 s |" in tables.expert_ways("two", study)
    assert "| `ep-sync` | 2 | 4.10 ± 0.10 | – | 90.0% |" in tables.distances(study)


def test_spread_pictures_are_those_of_one_device_in_order() -> None:
    pytest.importorskip("diffusers")
    model = build(0, num_layers=1, num_single_layers=1, num_attention_heads=1)
    with meshes(2) as ranks:
        found = spread_pictures(model, ranks, "ep-sync:values=own", [1, 2, 3, 4], 3, 2, 2)
    assert found.nbytes > 0
    wanted = sample_each(model, range(1, 5), range(3, 7), 2)
    torch.testing.assert_close(found.pictures, wanted, atol=1e-5, rtol=1e-5)
