"""The study of one-shot mixed precision: what is compared, rival allocations, and its tables."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from bench.models.subnets import moved, movements, sampled, spreads
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
from thinwire.uses.models.oneshot.supernet_training import TrainingMethod

WIDTHS = (2, 3)


def test_every_cell_is_trained_as_it_is_called() -> None:
    every = list(cells())
    full, large = ([c for c in every if c.group == name] for name in ("full", "large"))
    assert {c.seed for c in full} == {0, 1, 2} and len(full) == 3 * (len(ONESHOT) + len(ALONE))
    assert [c.variant for c in large] == 5 * [*ONESHOT] and {c.seed for c in large} == {0, 1, 2, 3, 4}
    for c in every:
        method, group = c.method(60_000), GROUPS[c.group]
        assert method.steps == round(group.epochs * (60_000 // group.batch))
        assert (method.freezing is None) == (c.variant in ("no-scheduler", "neither"))
        assert (method.mitigation == 0) == (c.variant in ("no-mitigation", "neither"))
        assert c.shape().widths == ((ALONE[c.variant],) if c.variant in ALONE else (2, 3, 4, 5, 6))
        assert c.shape().channels == group.shape.channels


def test_the_same_networks_are_drawn_of_every_training() -> None:
    one, other = (Supernet(Shape(channels=(4,), widths=WIDTHS), seed) for seed in (0, 1))
    found = sampled(one, 24)
    assert found == sampled(other, 24) and len({*found}) > 9  # of 16 that there are
    assert {bits for configuration in found for pair in configuration for bits in pair} == {*WIDTHS}


def test_what_moved_a_network_leaves_it_as_it_was() -> None:
    net = Supernet(Shape(channels=(4, 8), widths=WIDTHS, repeats=2), 0)
    batch = torch.randn(32, 1, 8, 8), torch.randint(10, (32,))
    net(batch[0], net.uniform(2))  # steps are set from the first values
    before = {name: x.clone() for name, x in net.state_dict().items() if name.endswith("weight")}
    found = moved(net, batch, TrainingMethod(1, mitigation=0.01))
    twice = moved(net, batch, TrainingMethod(1, mitigation=0.02))
    assert twice["pull"] == pytest.approx(2 * found["pull"]) and found["pull"] > 0 and found["distortion"] > 0
    assert len(found["wavering"]) == len(net.layers) and all(0 < x < 1 for x in found["wavering"])
    assert all(torch.equal(net.state_dict()[name], x) for name, x in before.items())
    assert all(p.grad is None for p in net.parameters())


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


def test_the_spread_is_shown_beside_uniform_widths() -> None:
    def cell(*accuracies: float) -> dict[str, Any]:
        row = {"accuracy": 0.8, "bitops": 1, "nbytes": 2, "packed": 3, "configuration": []}
        widths = {str(bits): row for bits in (2, 4, 6)}
        served = [{"kind": "bitops", "bits": bits, "ways": {"slope": row}} for bits in BUDGETS]
        return {
            "epochs": 1, "train_cpu_s": 60.0, "widths": widths, "served": served, "sampled": [*accuracies],
        }  # fmt: skip

    every = [("both", cell(0.5, 0.7)), ("both", cell(0.6, 0.8)), ("neither", cell(0.4, 0.8))]
    found = {"rows": rows_of(("large", *each) for each in every), "spread": spreads(every)}
    both, neither = TABLES["supernet-spread"](found).splitlines()[2:]
    assert both.startswith("| one-shot | 2 | 65.00% ± 63.53 | 14.14% ± 0.00 | 55.00% ± 63.53 | 80.0% ± 0.0 |")
    assert neither.startswith("| with neither | 1 | 60.00% | 28.28% | 40.00% | 80.0% |")
    assert TABLES["supernet-large"](found).count("80.0%") == 2 * len(BUDGETS)


def test_what_moved_networks_is_shown_as_means_over_seeds_and_layers() -> None:
    def cell(pull: float) -> dict[str, Any]:
        return {"wavering": [0.2, 0.3], "frozen": [0.0, 0.5], "distortion": 0.5, "pull": pull}

    found = {"moved": movements([("both", cell(0.01)), ("neither", cell(0.02)), ("neither", cell(0.02))])}
    both, neither = TABLES["supernet-moved"](found).splitlines()[2:]
    assert both == "| one-shot | 25.0% | 25.0% | 20.0% | 30.0% | 0.50 | 1.0% |"
    assert neither.startswith("| with neither | 25.0% ± 0.0 |") and neither.endswith("| 2.0% ± 0.0 |")
