"""The study of plans: a run beside what was foretold, and whether the proposal was a good one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench.pages_plan import choices, steps

from bench import pages, plan
from thinwire.lab.planning.planner import CANDIDATES

MODEL, LINK = "gpt2-lab", "10+30"


def cell(seconds: float) -> dict[str, Any]:
    """Return a finished run: a slow first step, then three."""
    bits = {"forward": 4.0, "backward": 5.0}
    steps = [9.0, seconds, seconds * 0.9, seconds * 1.2]
    return {"seconds": steps, "bits": bits, "replayed": 0.45, "replay_of": 0.5}


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, ...], Any]:
    """Cells of one model, which stand in for the committed ones; the runs over one link are finished."""
    values = {"model": MODEL, "tokens": 256, "layer": 0.01, "head": 0.01, "update": 0.001, "embed": 0.001}
    machine = {"name": "here", "lora": 0, "threads": 1} | values
    found: dict[tuple[str, ...], Any] = {(MODEL,): {"machines": [machine, machine]}}
    found |= {(MODEL, LINK, r): cell(s) for r, s in zip(CANDIDATES, (1.5, 0.8, 0.31, 0.3), strict=True)}
    monkeypatch.setattr(plan, "read", lambda *name: found.get(name))
    return found


def test_runs_stand_beside_their_plans(cells: dict[tuple[str, ...], Any], tmp_path: Path) -> None:
    found = plan.summary()
    assert [r["recipe"] for r in found["rows"]] == list(CANDIDATES)
    fp32 = found["rows"][0]
    assert fp32["measured"] == 1.5 and fp32["steps"] == pytest.approx([1.35, 1.8])
    assert fp32["replayed"] == pytest.approx(0.9) and fp32["bits_foretold"] == [32.0, 32.0]
    rate = plan.machines(cells[MODEL,], LINK, str(tmp_path)).ways["a", "b"].rate
    assert rate == pytest.approx(1.25e6 * 1448 / 1500)
    line = 4 * 2 * 128 * 256 * 4 / (1.25e6 * 1448 / 1500)  # one way; a line is the least that a step takes
    assert line < fp32["predicted"] < 2 * line
    (chosen,) = found["choices"]
    assert (chosen["proposed"], chosen["fastest"], chosen["good"]) == ("auto", "thinwire", True)


def test_a_slow_proposal_is_no_good_one(cells: dict[tuple[str, ...], Any]) -> None:
    cells[MODEL, LINK, "auto"] = cell(0.4)
    found = plan.summary()
    assert found["choices"][0]["good"] is False
    assert "| 10+30 | gpt2-lab | `auto` | `thinwire` | 33 % | **no** |" in choices(found, pages.table)
    del cells[MODEL, LINK, "auto"]
    assert plan.summary()["choices"] == []  # not before all of a link's runs are there


def test_the_table_says_how_many_plans_were_right() -> None:
    row = {"recipe": "auto", "model": MODEL, "link": LINK, "measured": 0.5, "steps": [0.4, 0.6]}
    row |= {"replayed": 0.93, "bits_foretold": [4.15, 4.45], "bits": [4.16, 4.1]}
    text = steps({"rows": [row | {"predicted": s} for s in (0.3, 0.46, 0.54)]}, pages.table)
    assert (
        "| `auto` | gpt2-lab | 10+30 | 500 ms (400 to 600) | 300 ms | 60 % | 93 % | 4.2, 4.5 (4.1) |" in text
    )
    assert "Of 3 steps, 2 were foretold to within 10 %; the plans were 60 % to 108 %" in text
