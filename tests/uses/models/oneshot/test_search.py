"""The search stays within its budget, and finds what trying everything finds where that can be known."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.types import InputError
from thinwire.uses.models.oneshot.supernet import Configuration, Costs, Shape, Supernet, costs_of
from thinwire.uses.models.oneshot.width_search import Search


def every(widths: tuple[int, ...], layers: int) -> list[Configuration]:
    return list(product(list(product(widths, widths)), repeat=layers))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), share=st.floats(0, 1.2), inputs=st.booleans())
def test_never_over_budget_whatever_the_errors(seed: int, share: float, inputs: bool) -> None:
    """Errors at random, another set each move: no order helps the search."""
    widths, layers = (2, 3, 4, 5, 6), 4
    draw = torch.Generator().manual_seed(seed)
    sizes = tuple(torch.randint(1, 900, (layers,), generator=draw).tolist())
    costs = Costs(sizes, sizes[::-1], 17, 5)
    cost = costs.bitops if inputs else costs.nbytes
    least, most = cost(((2, 2),) * layers), cost(((6, 6),) * layers)
    budget = least + share * (most - least)

    def error(configuration: Configuration, move: int) -> float:
        return hash((configuration, move, seed)) % 1000 / 1000

    found = Search(widths, 5, error, cost).within(budget, layers)
    assert cost(found) <= budget
    assert len(found) == layers and {w for pair in found for w in pair} <= set(widths)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), budget=st.integers(6, 9))
def test_equal_to_trying_everything_where_layers_are_alike_and_gains_shrink(seed: int, budget: int) -> None:
    """Three layers of one size: errors that fall less with each bit leave no other least than the least."""
    widths = (2, 3, 4)
    gains = torch.rand(3, 2, generator=torch.Generator().manual_seed(seed)).sort(1, descending=True).values

    def error(configuration: Configuration, _: int) -> float:
        return 9 - sum(float(gains[i, : w - 2].sum()) for i, (w, _) in enumerate(configuration))

    def cost(configuration: Configuration) -> float:
        return sum(w for w, _ in configuration)

    found = Search(widths, 4, error, cost).within(budget, 3)
    least = min(error(c, 0) for c in every(widths, 3) if cost(c) <= budget)
    assert cost(found) <= budget and error(found, 0) == pytest.approx(least)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), budget=st.integers(8, 18))
def test_equal_to_trying_everything_on_a_tiny_network(seed: int, budget: int) -> None:
    """Two layers, two widths, bit operations: any other configuration is a move or a trade or two away."""
    fine = torch.rand(2, 2, generator=torch.Generator().manual_seed(seed))

    def error(configuration: Configuration, _: int) -> float:
        return sum(float(fine[i, k]) * (3 - pair[k]) for i, pair in enumerate(configuration) for k in (0, 1))

    def cost(configuration: Configuration) -> float:
        return sum(w * a for w, a in configuration)

    found = Search((2, 3), 3, error, cost).within(budget, 2)
    least = min(error(c, 0) for c in every((2, 3), 2) if cost(c) <= budget)
    assert cost(found) <= budget and error(found, 0) == pytest.approx(least)


def test_a_budget_below_the_smallest_widths_is_named() -> None:
    search = Search((2, 3), 3, lambda *_: 0.0, lambda c: sum(w * a for w, a in c))
    with pytest.raises(InputError, match="the smallest widths cost 8, and 7 are asked for"):
        search.within(7, 2)


def test_costs_of_a_network_are_those_of_its_layers() -> None:
    net = Supernet(Shape(), 0)
    costs = costs_of(net, 28)
    first, last = 3 * 3 * 16 * 16, 32 * 64
    assert len(costs.weights) == 8 and costs.weights[0] == first and costs.weights[-1] == last
    assert costs.products[0] == first * 14 * 14 and costs.products[-1] == last * 4 * 4
    assert sum(costs.weights) == 76288
    by_layer = zip(costs.products, net.uniform(3, 5), strict=True)
    assert costs.bitops(net.uniform(3, 5)) == costs.fixed_bitops + sum(15 * n for n, _ in by_layer)
    assert costs.nbytes(net.uniform(4)) == costs.fixed_nbytes + 76288 // 2
    channels = 16 * 3 + 32 * 3 + 64 * 3
    assert costs.fixed_nbytes == 9 * 16 + 640 + 4 * (2 * channels + 10 + 2 * 10)
    assert net.training and not bool(net.stem.norm.mean.any()), "measuring costs changes nothing"
