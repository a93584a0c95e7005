"""Tables in README and docs are what the committed results say."""

import json
from pathlib import Path

import pytest

from bench import pages


@pytest.mark.parametrize("name", pages.PAGES)
def test_tables_are_made_from_the_results(name: str):
    text = (pages.ROOT / name).read_text("utf-8")
    assert pages.MARK.search(text), f"{name} has no table"
    assert pages.filled(text) == text, "run python -m bench.pages"


@pytest.mark.parametrize("name", pages.TABLES)
def test_every_table_has_its_results(name: str):
    found = pages.results(name)
    assert found is not None, f"bench/results/{name}.json is missing"
    unfinished = isinstance(found, dict) and found.get("missing")  # which the page says
    assert pages.TABLES[name](found).count("\n") >= 2 or unfinished


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
