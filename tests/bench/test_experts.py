"""The study of experts over ranks: its cells, and what its tables say of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bench.experts import GROUPS, cells, drawn, joined

from bench import pages_experts
from thinwire.lab.pictures import images


def found(seconds: float, total: int, db: float | None, **more: Any) -> dict[str, Any]:
    """Return what a cell keeps of a way."""
    quality = {"psnr_db": db}
    waits = {"wait_s": seconds / 2, "code_s": seconds / 10}
    return {"seconds": seconds, "bytes": {"total": total}, "quality": quality, **waits, **more}


def row(group: str, link: str, way: str, *of: dict[str, Any]) -> dict[str, Any]:
    return {"group": group, "link": link, "way": way} | joined(list(of))


def test_no_two_cells_share_a_file_and_distances_go_way_by_way() -> None:
    every = list(cells())
    assert len({c.name for c in every}) == len(every)
    distances = [c for c in every if c.group == "distance"]
    assert {c.ways for c in distances} == {(way,) for way in GROUPS["distance"].ways}
    assert {c.link for c in every if c.group == "two"} == {"100mbit", "20mbit"}


def test_seeds_are_joined() -> None:
    one = joined([found(1.0, 10, 30.0), found(5.0, 30, None), found(2.0, 20, 40.0)])
    assert (one["seconds"], one["bytes"]["total"], one["psnr_db"], one["waited"]) == (2.0, 20, 35.0, 0.6)
    assert joined([found(1.0, 10, None)])["psnr_db"] is None


def test_goals_are_held_against_synchronous_of_the_same_group() -> None:
    rows = [
        row("two", "20mbit", "ep-sync", found(30.0, 100, None)),
        row("two", "20mbit", "dice-residual", found(20.0, 30, 40.0)),
        row("four", "unlimited", "ep-sync", found(1.0, 100, None)),
        row("four", "unlimited", "dice-residual", found(1.0, 41, 40.0)),
        row("distance", "unlimited", "ep-sync", *(
            found(1.0, 100, None, distance=d, accuracy=0.9) for d in (4.0, 4.2))),
        row("distance", "unlimited", "dice-residual", found(1.0, 41, 40.0, distance=4.6, accuracy=0.9)),
    ]  # fmt: skip
    study = {"rows": rows, "links": {"unlimited": "none", "20mbit": "20mbit,20ms"}}
    goals = pages_experts.goals(study)
    assert "| faster over 20mbit | at least 1.2× | 1.50×: met |" in goals
    assert "| bytes of synchronous | at most 40% | 41%: missed |" in goals
    assert "| garment distance | at most 4.50 | 4.60: missed |" in goals
    assert "| `dice-residual` | 0.0 MB | 30% | 40.0 dB | 20.0 s |" in pages_experts.ways("two", study)
    assert "| `ep-sync` | 2 | 4.10 ± 0.10 | – | equal | 90.0% |" in pages_experts.distances(study)


def test_pictures_are_read_as_a_run_leaves_them(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    made = (torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(0)) * 255).round() / 255
    for k, image in enumerate(made):
        images.save(image, tmp_path / ("picture.png" if k == 0 else f"picture-{k + 1}.png"))
    torch.testing.assert_close(drawn(tmp_path, 3), made)
