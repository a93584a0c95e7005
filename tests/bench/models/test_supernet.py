"""The study of one-shot mixed precision: what is compared, rival allocations, and its tables."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from bench.models.supernet import (
    ALONE,
    BUDGETS,
    GROUPS,
    KINDS,
    ONESHOT,
    TABLES,
    cells,
    pairs,
    rises,
    rows_of,
    sites,
    sloped,
    solved,
)  # fmt: skip

from thinwire.uses.models.oneshot.supernet import Shape, Supernet, costs_of

WIDTHS = (2, 3)


def test_every_cell_is_trained_as_it_is_called() -> None:
    every = list(cells())
    full = [c for c in every if c.group == "full"]
    assert {c.seed for c in full} == {0, 1, 2} and len(full) == 3 * (len(ONESHOT) + len(ALONE))
    for c in every:
        method = c.method(60_000)
        assert method.steps == GROUPS[c.group].epochs * 468
        assert (method.freezing is None) == (c.variant in ("no-scheduler", "neither"))
        assert (method.mitigation == 0) == (c.variant in ("no-mitigation", "neither"))
        assert c.shape().widths == ((ALONE[c.variant],) if c.variant in ALONE else (2, 3, 4, 5, 6))


@pytest.mark.parametrize("kind", KINDS)
def test_the_programme_is_what_trying_everything_finds(kind: str) -> None:
    pytest.importorskip("scipy")
    net = Supernet(Shape(channels=(4,), widths=WIDTHS), 0)
    cost, draw = getattr(costs_of(net, 8), kind), torch.Generator().manual_seed(0)
    every = list(product(pairs(WIDTHS), repeat=len(net.layers)))
    for _ in range(5):
        found = torch.rand(len(net.layers), 4, generator=draw).tolist()
        own = sites(found, net, cost)
        for chosen in every:  # what sites say of costs adds up to what configurations cost
            places = [pairs(WIDTHS).index(pair) for pair in chosen]
            assert sum(s.nbytes[k] for s, k in zip(own, places, strict=True)) == pytest.approx(cost(chosen))

        def rise(chosen: Any, found: Any = found) -> float:
            return sum(row[pairs(WIDTHS).index(p)] for row, p in zip(found, chosen, strict=True))

        budget = (cost(every[0]) + cost(every[-1])) / 2
        least = min(rise(c) for c in every if cost(c) <= budget)
        best, slope = solved(own, budget, WIDTHS), sloped(own, budget, WIDTHS)
        assert cost(best) <= budget and rise(best) == pytest.approx(least)
        assert cost(slope) <= budget and rise(slope) >= least - 1e-9


def test_rises_are_of_one_layer_at_a_time() -> None:
    net = Supernet(Shape(channels=(4, 8), widths=WIDTHS), 0)
    batch = torch.randn(32, 1, 8, 8), torch.randint(10, (32,))
    found = rises(net, batch)
    assert len(found) == len(net.layers) and all(0 < row[-1] == min(row) < 1e-3 for row in found)
    assert max(map(max, found)) > 0


def test_tables_show_means_over_seeds_and_what_was_trained_apart() -> None:
    def cell(accuracy: float) -> dict[str, Any]:
        row = {"accuracy": accuracy, "bitops": 1, "nbytes": 2, "packed": 3, "configuration": []}
        served = [
            {"kind": kind, "bits": b, "ways": {"search": row}} for kind in KINDS for b in BUDGETS
        ]  # fmt: skip
        return {"epochs": 10, "train_cpu_s": 60.0, "widths": {"3": row, "4": row}, "served": served}

    apart = cell(0.9) | {"served": [], "widths": {"3": cell(0.9)["widths"]["3"]}}
    rows = rows_of([("full", "both", cell(0.8)), ("full", "both", cell(0.9)), ("full", "apart-3", apart)])
    found = {"rows": rows, "missing": []}
    for kind in KINDS:
        table = TABLES[f"supernet-{kind}"](found)
        assert table.count("\n") == 4 and "| one-shot | search | 85.0% ± 63.5 |" in table
        assert "| trained apart | one width for all | – | 90.0% | – | – | – |" in table
    widths = TABLES["supernet-widths"](found)
    assert "| one-shot | 10 | 2 | – | 85.0% ± 63.5 | 85.0% ± 63.5 | – | – | 60 |" in widths
    assert "| trained apart | 10 | 1 | – | 90.0% | – | – | – | 60 |" in widths
