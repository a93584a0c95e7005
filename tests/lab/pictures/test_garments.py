"""flux-fashion-moe: its experts, its weights as a file has them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.lab.pictures import flux_fashion_moe as moe
from thinwire.lab.pictures.sheets import Sheet, conditions

TINY = {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 1}


@pytest.fixture(scope="module", autouse=True)
def _needs_diffusers() -> None:
    pytest.importorskip("diffusers")


def test_experts_stand_in_double_blocks_and_a_batch_is_its_pictures() -> None:
    model = moe.build(0, **TINY)
    [block] = model.transformer_blocks
    assert len(block.ff.experts) == moe.EXPERTS and block.ff.num_activated_experts == moe.CHOSEN
    sheet, words = Sheet(1, 1), torch.tensor([[3], [8]])
    x, times = torch.cat([sheet.noise(0), sheet.noise(1)]), torch.full((2,), 0.5)
    with torch.no_grad():
        both = model(hidden_states=x, **conditions(sheet, words, times))[0]
        each = [
            model(hidden_states=x[i : i + 1], **conditions(sheet, words[i : i + 1], times[:1]))[0]
            for i in (0, 1)
        ]
    torch.testing.assert_close(both, torch.cat(each), atol=1e-5, rtol=1e-5)
    assert torch.equal(moe.build(0, **TINY).proj_out.weight, model.proj_out.weight)


@settings(derandomize=True, max_examples=30)
@given(st.integers(0, 2**31), st.integers(-20, 10))
def test_packed_weights_are_within_half_a_step(seed: int, magnitude: int) -> None:
    weights = torch.randn(7, 33, generator=torch.Generator().manual_seed(seed)) * 2.0**magnitude
    weights[2] = 0
    found = moe.unpacked(moe.packed({"w": weights, "b": weights[0]}))
    step = weights.abs().amax(1, keepdim=True) / 127
    # float16 scales are within 2^-11 of exact; below 6e-5 they are subnormal, in steps of 6e-8
    bound = step * (0.5 + 127 * 2**-11) + 127 * 2.0**-25
    assert ((found["w"] - weights).abs() <= bound * 1.001).all()
    assert torch.equal(found["b"], weights[0].half().float())
