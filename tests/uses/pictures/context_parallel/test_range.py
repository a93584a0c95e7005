"""Values beyond float16's range: sent as they are by every recipe that sends float16 otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from each import each
from meshes import Mesh
from picture_models import flux, flux_inputs, on_ranks, one_device
from torch import Tensor, nn

pytest.importorskip("diffusers")

WAYS = ["fp16", "displaced", "ulysses", "pipe-fp16", "compact"]


def scaled(keys: float, dtype: torch.dtype) -> nn.Module:
    """Flux whose keys are so many times larger, and queries smaller: attention is the same."""
    model: Any = flux()
    for block in (*model.transformer_blocks, *model.single_transformer_blocks):
        for name, factor in (("norm_k", keys), ("norm_added_k", keys), ("norm_q", 1 / keys)):
            if getattr(block.attn, name, None) is not None:
                getattr(block.attn, name).weight.data *= factor
        if getattr(block.attn, "norm_added_q", None) is not None:
            block.attn.norm_added_q.weight.data /= keys
    model.context_embedder.weight.data *= keys  # what passes through the blocks, in mode pipe
    model.context_embedder.bias.data *= keys
    return model.to(dtype)  # type: ignore[no-any-return]


@each("recipe, dtype", [(r, d) for r in WAYS for d in (torch.bfloat16, torch.float32)])
def test_values_beyond_float16(ranks: dict[int, list[Mesh]], recipe: str, dtype: torch.dtype) -> None:
    errors = []
    for keys in (1.0, 2.0**20, 2.0**-30)[: 3 if dtype == torch.float32 else 2]:
        model, inputs = scaled(keys, dtype), flux_inputs(64)
        inputs |= {k: v.to(dtype) for k, v in inputs.items() if isinstance(v, Tensor) and "ids" not in k}
        wanted = one_device(model, [inputs])[0].float()
        made = on_ranks(ranks[2], model, recipe, lambda own, _, given=inputs: one_device(own, [given])[0])
        assert torch.equal(*made)
        errors.append(float((made[0].float() - wanted).norm() / wanted.norm()))
    assert max(errors[1:]) < 3 * errors[0] + 1e-6
