"""flux-fashion-moe: flux-fashion with experts in its double blocks, trained on pictures of one garment."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from thinwire.seeding import seeded
from thinwire.types import InputError, require
from thinwire.uses.pictures.run import flux_fashion

if TYPE_CHECKING:
    from torch import nn

NAME = "flux-fashion-moe"
WEIGHTS = Path(__file__).parent / f"{NAME}.safetensors"
EXPERTS, CHOSEN = 8, 2  # of a layer, and by each token
HIDDEN = 384  # makes diffusers' class build experts of 256 hidden units, and a shared one of 256
SCALE = ".scale"  # the suffix of the float16 that a row of int8 is multiplied by


def build(seed: int, experts: int = EXPERTS, chosen: int = CHOSEN, **changes: Any) -> nn.Module:
    """Return the model with random weights; ``changes`` are of flux-fashion's configuration.

    The feed-forward of the picture's tokens in each double block is diffusers' ``MOEFeedForwardSwiGLU``.
    Errors: ``MissingExtra`` without diffusers.
    """
    model: Any = flux_fashion.build(seed, **changes)
    hidream: Any = import_module("diffusers.models.transformers.transformer_hidream_image")
    with seeded(seed):
        for block in model.transformer_blocks:
            width = block.ff.net[-1].out_features
            block.ff = hidream.MOEFeedForwardSwiGLU(width, HIDDEN, experts, chosen)
    made: nn.Module = model.eval()
    return made


def load() -> nn.Module:
    """Return the trained model. Errors: ``InputError`` where its weights are not in the package."""
    require(WEIGHTS.exists(), InputError, f"{WEIGHTS.name} is not in this package; install thinwire anew")
    model = build(0)
    model.load_state_dict(unpacked(load_file(WEIGHTS)))
    return model


def packed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights as a file has them: matrices in int8 with a scale a row, all else in float16.

    >>> kept = packed({"w": torch.tensor([[1.0, -127.0], [0.0, 0.0]]), "b": torch.ones(1)})
    >>> kept["w"].tolist(), kept["w.scale"].tolist(), kept["b"].dtype
    ([[1, -127], [0, 0]], [[1.0], [0.0]], torch.float16)
    """
    kept = dict[str, Tensor]()
    for name, weight in state.items():
        if weight.dim() != 2:
            kept[name] = weight.half()
            continue
        scale = (weight.abs().amax(1, keepdim=True) / 127).half()
        steps = weight / scale.float().where(scale > 0, torch.ones(()))
        kept[name], kept[name + SCALE] = steps.round().clamp(-127, 127).to(torch.int8), scale
    return kept


def unpacked(kept: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return in float32 what ``packed`` made."""
    scales = {name.removesuffix(SCALE): x.float() for name, x in kept.items() if name.endswith(SCALE)}
    weights = {name: x.float() for name, x in kept.items() if not name.endswith(SCALE)}
    return {name: x * scales[name] if name in scales else x for name, x in weights.items()}
