"""The scheduler freezes the lowest width of the layers that waver most, and gives it back to the others."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.uses.models.oneshot.quantiser import SharedConv
from thinwire.uses.models.oneshot.supernet_training import FREEZING, chosen, turbulence, wavering

WIDTHS = (2, 3, 4)


def layer_at(relative: float, widths: tuple[int, ...] = WIDTHS) -> SharedConv:
    """Return a layer whose weights are all so many steps, at every width."""
    layer = SharedConv((1, 2), 3, 1, widths)
    with torch.no_grad():
        layer.weight.fill_(relative)
        layer.weights.sizes.fill_(1.0)
    return layer


@pytest.mark.parametrize(
    ("relative", "share"),
    [
        (0.5, 1.0), (0.4, 1.0), (0.37, 0.0), (0.62, 1.0), (0.64, 0.0),
        (0.0, 0.0), (-1.5, 1.0), (1.5, 0.0), (-7.5, 0.0),
    ],
)  # fmt: skip
def test_only_edges_between_two_codes_count(relative: float, share: float) -> None:
    """At two bits codes are -2 to 1, so that beyond 0.5 and below -1.5 no edge is left."""
    assert wavering(torch.full((9,), relative), torch.tensor(1.0), 2) == share


@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1000), bits=st.integers(2, 6))
def test_wavering_is_what_a_small_push_can_change(seed: int, bits: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    weight, step = torch.randn(500, generator=draw), torch.tensor(0.3)
    layer = SharedConv((1, 1), 1, 1, (bits,))

    def codes(push: float) -> torch.Tensor:
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        return ((weight + push * 0.3) / step).round().clamp(low, high)

    changed = (codes(0.125) != codes(-0.125)).float().mean()
    assert wavering(weight, step, bits) == pytest.approx(float(changed), abs=0.005)
    layer.weight.data, layer.weights.sizes.data = weight, torch.full((1,), 0.3)
    assert turbulence(layer, (bits,)) == pytest.approx(float(changed) / bits, abs=0.005)


def test_the_most_turbulent_lose_the_lowest_width_and_calm_ones_get_it_back() -> None:
    calm, wild = layer_at(0.0), layer_at(0.5)
    assert turbulence(calm, WIDTHS) == 0 and turbulence(wild, WIDTHS) == pytest.approx(
        (1 / 2 + 1 / 3 + 1 / 4) / 3
    )
    held = [WIDTHS] * 4
    frozen = chosen([calm, wild, calm, wild], held, FREEZING, 0.0)
    assert frozen == [WIDTHS, WIDTHS[1:], WIDTHS, WIDTHS[1:]]
    late = chosen([wild, calm, calm, calm], frozen, FREEZING, 0.5)
    assert late == [WIDTHS[1:], WIDTHS, WIDTHS, WIDTHS]
    assert chosen([wild, calm, calm, calm], late, FREEZING, 1.0) == [WIDTHS] * 4, "a fifth of four is none"
    alone = layer_at(0.5, (3,))
    assert chosen([alone, alone], [(3,), (3,)], FREEZING, 0.0) == [(3,), (3,)]


def test_the_share_of_frozen_layers_falls_along_a_cosine() -> None:
    ratios = [FREEZING.ratio(t / 10) for t in range(11)]
    assert ratios[0] == pytest.approx(0.5) and ratios[-1] == pytest.approx(0.2)
    assert ratios == sorted(ratios, reverse=True)
    due = [step for step in range(3000) if FREEZING.due(step, 3000)]
    assert due[0] == 120 and {b - a for a, b in pairwise(due)} >= {40}
    assert sum(step > 0.75 * 3000 for step in due) <= 3
