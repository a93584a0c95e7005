"""flux-fashion: diffusers' Flux transformer of 5.1 M parameters, trained on sheets of Fashion-MNIST."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file

from thinwire.seeding import seeded
from thinwire.types import InputError, require
from thinwire.uses.pictures.diffusers_names.tested_version import version
from thinwire.uses.pictures.run.sheets import CHANNELS, WORDS

if TYPE_CHECKING:
    from torch import nn

NAME = "flux-fashion"
WEIGHTS = Path(__file__).parent / f"{NAME}.safetensors"
CONFIG: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": CHANNELS,
    "num_layers": 2,
    "num_single_layers": 4,
    "attention_head_dim": 32,
    "num_attention_heads": 6,
    "joint_attention_dim": WORDS,
    "pooled_projection_dim": WORDS,
    "axes_dims_rope": (8, 12, 12),
}


def build(seed: int, **changes: Any) -> nn.Module:
    """Return the model with random weights. Errors: ``MissingExtra`` without diffusers."""
    version()
    from diffusers import FluxTransformer2DModel

    with seeded(seed):
        model: Any = FluxTransformer2DModel(**CONFIG | changes)
    made: nn.Module = model.eval()
    return made


def load() -> nn.Module:
    """Return the trained model. Errors: ``InputError`` where its weights are not in the package."""
    require(WEIGHTS.exists(), InputError, f"{WEIGHTS.name} is not in this package; install thinwire anew")
    model = build(0)
    model.load_state_dict({name: p.float() for name, p in load_file(WEIGHTS).items()})
    return model
