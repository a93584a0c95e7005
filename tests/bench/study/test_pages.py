"""Tables in README and docs are what the committed results say, and every bench still loads."""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path

import pytest

import bench
from bench.study import pages


def test_tables_are_made_from_the_results():
    texts = {name: (pages.ROOT / name).read_text("utf-8") for name in pages.pages()}
    assert {mark[1] for text in texts.values() for mark in pages.MARK.finditer(text)} <= set(pages.tables())
    for name, text in texts.items():
        assert pages.filled(text) == text, f"{name}: run python -m bench.study.pages"
    assert (
        len(texts) > 20 and pages.filled(texts["README.md"].replace(" MB |", " kB |")) == texts["README.md"]
    )


def test_every_table_has_its_results():
    for name in pages.tables():
        assert pages.results(name) is not None, f"bench/results/{name}.json is missing"
        drawn = pages.drawn(name)
        assert drawn.count("\n") >= 2 or "not measured yet" in drawn, name


def test_a_table_follows_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = [
        {"of": "activations", "memory": "direct", "energy": 1.0, "error": {"2": 0.5, "4": 0.25, "8": 0.125}}
    ]
    (tmp_path / "deltas.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    text = pages.filled("before\n<!-- table:deltas -->\nold\n<!-- end -->\nafter")
    assert "| activations | direct | 1.0000 | 0.5000 | 0.2500 | 0.1250 |" in text
    assert text.startswith("before\n<!-- table:deltas -->\n| of |")
    assert "old" not in text


def test_every_figure_is_drawn_from_the_results(tmp_path: Path):
    pytest.importorskip("matplotlib")
    from bench.study.figures import draw_all

    draw_all(tmp_path)
    there = {file.name for file in tmp_path.iterdir()}
    assert there == {"student.svg", "quality.svg", "auto.svg", "state-age.svg", "sooner.svg"}
    assert all((pages.FIGURES / name).exists() for name in there)


def test_every_bench_can_be_started():
    """What they import of thinwire is where they look for it."""
    for name in ("zstandard", "transformers", "typer", "pyroute2", "fsspec"):
        pytest.importorskip(name)
    for module in pkgutil.walk_packages(bench.__path__, "bench."):
        importlib.import_module(module.name)
