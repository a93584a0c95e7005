"""What is asked of diffusers' layers of experts, compared with the installed ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expert_models import flux_moe, nucleus
from picture_models import flux

from thinwire.types import InputError
from thinwire.uses.pictures.diffusers_names import expert_layers, tested_version

pytest.importorskip("diffusers")


def test_the_installed_layers_are_as_expected() -> None:
    tested_version.check_experts()


def test_the_layers_of_a_model_are_found_in_order() -> None:
    layers = [layer for _, layer in expert_layers.layers_of(flux_moe(experts=5))]
    assert [(x.number, x.name, x.experts, x.chosen) for x in layers] == [
        (0, "transformer_blocks.0.ff", 5, 2),
        (1, "transformer_blocks.1.ff", 5, 2),
    ]
    assert [(x.experts, x.chosen) for _, x in expert_layers.layers_of(nucleus())] == [(4, 0), (4, 0)]
    with pytest.raises(InputError, match="FluxTransformer2DModel has no layers of experts that are known"):
        expert_layers.layers_of(flux())


def test_an_expert_alone_makes_what_it_makes_among_all() -> None:
    model: Any = nucleus()
    module: Any
    module, layer = expert_layers.layers_of(model)[0]
    x = torch.randn(8, 32)
    with torch.no_grad():
        whole = module.experts(x, torch.tensor([2, 2, 2, 2]))
        assert torch.equal(torch.cat([layer.each[e](x[2 * e : 2 * e + 2]) for e in range(4)]), whole)


@pytest.mark.parametrize("change", ["method", "call", "version"])
def test_other_layers_are_refused_with_what_changed(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if change == "version":
        monkeypatch.setattr("diffusers.__version__", "0.43.0")
        words = r"diffusers 0\.43\.0 is not 0\.42"
    elif change == "method":
        stock = tested_version.class_of(tested_version.HIDREAM)
        monkeypatch.setattr(stock, "moe_infer", lambda self, x, indices: x)
        words = "has changed: MOEFeedForwardSwiGLU.moe_infer is not as in 0.42"
    else:
        monkeypatch.setitem(tested_version._CALLS, tested_version.NUCLEUS, ("self.experts(other)",))
        words = "has changed: NucleusMoELayer.forward is not as in 0.42"
    with pytest.raises(InputError, match=words):
        expert_layers.layers_of(flux_moe())


def test_a_rule_by_which_experts_choose_other_tokens_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = nucleus()
    monkeypatch.setattr(expert_layers, "_tokens", lambda module, logits: torch.zeros(4, 8, dtype=torch.int64))
    with (
        expert_layers.attached(expert_layers.layers_of(model), SimpleNamespace()),
        pytest.raises(InputError, match=r"img_mlp chooses other tokens than diffusers 0\.42's does"),
    ):
        x = torch.randn(1, 16, 32)
        model.transformer_blocks[0].img_mlp(x, x, torch.zeros(1, 32))
