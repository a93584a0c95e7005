"""Learned steps: what is rounded, what its gradients are, and that all widths share one set of weights."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.types import InputError
from thinwire.uses.models.oneshot.quantiser import LearnedSteps, SharedConv, codes_of, limits, quantised

ANY = {"seed": st.integers(0, 10_000), "bits": st.integers(2, 8), "signed": st.booleans()}


def values(seed: int, signed: bool) -> tuple[Tensor, Tensor]:
    """Return values, some far out of reach, and a step, in double precision."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(40, generator=draw, dtype=torch.float64) * 3
    return (x if signed else x.abs()), torch.rand((), generator=draw, dtype=torch.float64) + 0.1


@settings(max_examples=60, deadline=None, derandomize=True)
@given(**ANY)
def test_values_become_the_nearest_multiples_within_the_codes(seed: int, bits: int, signed: bool) -> None:
    x, step = values(seed, signed)
    low, high = limits(bits, signed)
    assert high - low == 2**bits - 1
    y = quantised(x, step, bits, signed)
    every = torch.arange(low, high + 1, dtype=x.dtype) * step
    nearest = (x[:, None] - every).abs().min(1).values
    assert torch.allclose((y - x).abs(), nearest, atol=1e-12)
    assert torch.equal(codes_of(x, step, bits, signed) * step, y)
    assert torch.equal(quantised(y, step, bits, signed), y)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(**ANY)
def test_gradients_are_those_of_rounding_held_still(seed: int, bits: int, signed: bool) -> None:
    """Within the codes rounding adds what small changes leave as it is; out of reach, a code stays."""
    x, step = values(seed, signed)
    low, high = limits(bits, signed)
    inside = (x / step).clamp(low, high)
    added = inside.round() - inside
    weights = torch.randn(40, generator=torch.Generator().manual_seed(seed + 1), dtype=x.dtype)

    def held(x: Tensor, step: Tensor) -> Tensor:
        return (weights * ((x / step).clamp(low, high) + added) * step).sum()

    own_x, own_step = x.clone().requires_grad_(), step.clone().requires_grad_()
    (weights * quantised(own_x, own_step, bits, signed)).sum().backward()
    h = 1e-6
    by_step = (held(x, step + h) - held(x, step - h)) / (2 * h)
    scale = 1 / math.sqrt(x.numel() * high)
    assert own_step.grad is not None and own_x.grad is not None
    assert float(own_step.grad) == pytest.approx(float(by_step) * scale, rel=1e-4, abs=1e-6)
    for i in range(0, 40, 7):
        bump = torch.zeros_like(x)
        bump[i] = h
        by_x = (held(x + bump, step) - held(x - bump, step)) / (2 * h)
        assert float(own_x.grad[i]) == pytest.approx(float(by_x), rel=1e-4, abs=1e-6)


def test_the_step_has_rounding_s_true_gradient_where_codes_stay() -> None:
    """Out of reach nothing is passed through: a finite difference of the function itself is its gradient."""
    x, step = torch.tensor([9.0, -9.0], dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64)
    own = step.clone().requires_grad_()
    (quantised(x, own, 3, True) * torch.tensor([1.0, 2.0])).sum().backward()
    h = 1e-6
    difference = (quantised(x, step + h, 3, True) - quantised(x, step - h, 3, True)) / (2 * h)
    assert own.grad is not None
    assert float(own.grad) == pytest.approx(
        float(difference @ torch.tensor([1.0, 2.0]).double()) / math.sqrt(6)
    )


def test_steps_begin_at_what_they_first_see_and_stay_positive() -> None:
    steps = LearnedSteps((2, 4), signed=False)
    x = torch.tensor([0.0, 1.0, 2.0, 3.0])
    steps(x, 4)
    assert float(steps.of(4)) == pytest.approx(2 * 1.5 / math.sqrt(15)) and not bool(steps.begun[0])
    steps(x * 100, 4)
    assert float(steps.of(4)) == pytest.approx(2 * 1.5 / math.sqrt(15))
    with torch.no_grad():
        steps.sizes.fill_(-1.0)
    steps.keep_positive()
    assert float(steps.of(4)) > 0
    with pytest.raises(InputError, match="5 bits are asked for, and the network has 2, 4"):
        steps(x, 5)


def test_widths_share_weights_but_neither_steps_nor_norms() -> None:
    torch.manual_seed(0)
    layer, x = SharedConv((3, 5), 3, 1, (2, 3, 6)), torch.rand(4, 3, 6, 6)
    for pair in [(2, 2), (6, 3), (3, 6)]:
        layer.zero_grad()
        (layer(x, pair) * torch.randn(4, 5, 6, 6)).sum().backward()
        assert layer.weight.grad is not None and bool(layer.weight.grad.any())
        place = [layer.widths.index(bits) for bits in pair]
        for own, i in ((layer.weights.sizes.grad, place[0]), (layer.inputs.sizes.grad, place[1])):
            assert own is not None and own.nonzero().flatten().tolist() == [i]
        norm = layer.norm.scale.grad
        assert norm is not None and norm.abs().sum(2).nonzero().tolist() == [place]
    touched = (layer.norm.mean != 0).any(2).nonzero().tolist()
    assert touched == [[0, 0], [1, 2], [2, 1]]
