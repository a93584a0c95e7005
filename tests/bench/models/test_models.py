"""The study of packed language models: its ways on a small model, and what its tables say of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from bench.models.packed import TABLES, WAYS, Ways, alone, nbytes_at, rows_of

from thinwire.uses.models.budgets import Entries
from thinwire.uses.models.entry import unpack_entry
from thinwire.uses.models.moments import Moments
from thinwire.uses.models.packed_model import PackedModel, write_model
from thinwire.uses.models.tensors import Grouped, Stepped, exact_steps
from thinwire.uses.models.weights_to_pack import Model

NAMES = ("a", "b")


def size(entries: Entries) -> int:
    return len(write_model(PackedModel(entries)))


@pytest.fixture(scope="module")
def model() -> Model:
    """Return two matrices whose inputs go together, the second of which matters far more."""
    draw, moments = torch.Generator().manual_seed(0), dict[str, Moments]()
    for i, name in enumerate(NAMES):
        x = torch.randn(512, 128, generator=draw) @ torch.randn(128, 128, generator=draw)
        moments[name] = Moments(torch.full((256,), 1 / 256), 100.0**i * x.t() @ x / 512)
    return Model({name: torch.randn(256, 128, generator=draw) for name in NAMES}, moments)


def error(model: Model, entries: Entries) -> float:
    """Return what the errors of entries cost."""
    found = 0.0
    for name, own in model.moments.items():
        coded = unpack_entry(entries[name], name)
        assert isinstance(coded, Grouped | Stepped)
        wrong = coded.decoded() - model.tensors[name]
        found += float(((wrong @ own.columns) * wrong).sum())
    return found


def test_every_way_keeps_to_its_bytes_and_is_what_it_is_called(model: Model) -> None:
    ways, most = Ways(model, size), int(3.5 * model.weights / 8)
    found = {way: ways.entries(way, 3, most) for way in WAYS if way != "source"}
    for way in ("lagrangian", "rounded", "rows", "ours"):
        assert 0.9 * most < size(found[way]) <= most
    widths = {way: [unpack_entry(found[way][name], name) for name in NAMES] for way in found}
    assert all(isinstance(c, Grouped) and c.width == 3 for way in ("nearest", "gptq") for c in widths[way])
    cheap, dear = widths["lagrangian"]
    assert isinstance(cheap, Grouped) and isinstance(dear, Grouped) and cheap.width < dear.width
    for coded in widths["rows"]:
        assert isinstance(coded, Stepped) and coded.column_parts.unique().numel() == 1
    for coded in widths["ours"]:
        assert isinstance(coded, Stepped) and coded.column_parts.unique().numel() > 1
    costs = {way: error(model, entries) for way, entries in found.items()}
    assert costs["ours"] < costs["rounded"] < costs["lagrangian"] < costs["nearest"]
    assert costs["gptq"] < costs["nearest"]


def test_without_feedback_each_weight_goes_to_its_nearest_step(model: Model) -> None:
    entries = Ways(model, size).entries("rounded", 3, int(3 * model.weights / 8))
    for name in NAMES:
        coded = unpack_entry(entries[name], name)
        assert isinstance(coded, Stepped)
        steps = exact_steps(coded.row_parts)[:, None] * exact_steps(coded.column_parts)
        off = (coded.decoded() - model.tensors[name]).abs()
        assert bool((off <= 0.5001 * steps).all())
        assert alone(model).matrix(name).upper is None and model.matrix(name).upper is not None


def cell(loss: float, nbytes: int) -> dict[str, Any]:
    return {"nbytes": nbytes, "bits": nbytes / 10, "losses": [loss - 0.1, loss + 0.1] * 8}


def test_bytes_at_a_rivals_perplexity_lie_on_our_curve() -> None:
    found = rows_of([("ours", 3, cell(3.5, 30)), ("ours", 2, cell(4.5, 20)),
                     ("nearest", 3, cell(4.0, 50)), ("gptq", 3, cell(5.0, 28)),
                     ("rounded", 3, cell(3.4, 30))])  # fmt: skip
    rows = {(r["way"], r["asked"]): r for r in found}
    assert rows["nearest", 3]["ours_saves"] == pytest.approx(0.5)
    assert rows["nearest", 3]["over_ours"] == pytest.approx([math.exp(0.5)] * 3)
    worse = rows["gptq", 3]  # than our smallest file, which is a bound then
    assert worse["ours_saves"] == pytest.approx(1 - 20 / 28) and worse["at_least"]
    assert rows["rounded", 3]["ours_saves"] is None and nbytes_at(3.0, [(3.5, 30)]) is None
    assert "over_ours" not in rows["ours", 3]


def test_goals_say_what_was_missed() -> None:
    def goals(nearest: int, lagrangian: int, rounded: float) -> str:
        found = [("ours", 3, cell(3.5, 30)), ("ours", 2, cell(4.5, 20)),
                 ("nearest", 3, cell(4.0, nearest)), ("lagrangian", 3, cell(4.0, lagrangian)),
                 ("rounded", 3, cell(rounded, 30))]  # fmt: skip
        text: str = TABLES["models-goals"]({"rows": rows_of(found)})
        return text

    assert goals(50, 30, 3.6).count("| yes |") == 5
    missed = goals(30, 26, 3.4)
    assert missed.count("| **no** |") == 3 and "4 %" in missed
