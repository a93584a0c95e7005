"""wan-fashion: diffusers' Wan transformer of 4.3 M parameters, trained on clips of moving garments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from thinwire.links.mesh import Peer
from thinwire.seeding import seeded
from thinwire.types import InputError, require
from thinwire.uses.pictures.context_parallel.divided.loading import load_part
from thinwire.uses.pictures.diffusers_names.tested_version import version
from thinwire.uses.pictures.run.sheets import WORDS
from thinwire.uses.pictures.run.video.clips import PATCH

if TYPE_CHECKING:
    from torch import nn

NAME = "wan-fashion"
FOLDER = Path(__file__).parent / NAME  # as save_pretrained writes one
WEIGHTS = FOLDER / "diffusion_pytorch_model.safetensors"
CONFIG: dict[str, Any] = {
    "patch_size": PATCH,
    "in_channels": 1,
    "out_channels": 1,
    "num_layers": 4,
    "attention_head_dim": 64,
    "num_attention_heads": 4,
    "ffn_dim": 768,
    "freq_dim": 128,
    "text_dim": WORDS,
    "rope_max_seq_len": 64,
}


def build(seed: int, **changes: Any) -> nn.Module:
    """Return the model with random weights. Errors: ``MissingExtra`` without diffusers."""
    version()
    from diffusers import WanTransformer3DModel

    with seeded(seed):
        model: Any = WanTransformer3DModel(**CONFIG | changes)
    made: nn.Module = model.eval()
    return made


def load() -> nn.Module:
    """Return the trained model. Errors: ``InputError`` where its weights are not in the package."""
    check()
    model = build(0)
    model.load_state_dict({name: p.float() for name, p in load_file(WEIGHTS).items()})
    return model


def load_own_blocks(peers: Mapping[int, Peer]) -> nn.Module:
    """Return the trained model with this rank's blocks alone, for mode pipe. Errors: as of ``load``."""
    check()
    from diffusers import WanTransformer3DModel

    kind: Any = WanTransformer3DModel
    made: nn.Module = load_part(kind, FOLDER, peers, torch_dtype=torch.float32)
    return made


def check() -> None:
    """Raise ``InputError`` where the weights are not in the package."""
    there = f"the weights of {NAME} are not in this package; install thinwire anew"
    require(WEIGHTS.exists(), InputError, there)
