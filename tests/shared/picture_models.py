"""Tiny random transformers of diffusers, and inputs for them; several ranks of them in threads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from meshes import Mesh, together
from torch import Tensor, nn

import thinwire
from thinwire.uses.pictures.agreement import Parallel

T = TypeVar("T")
Inputs = dict[str, Any]


def flux(singles: int = 2) -> nn.Module:
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(3)
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=singles,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 6, 6),
    ).eval()


def flux_inputs(tokens: int = 64, time: float = 0.5, seed: int = 1) -> Inputs:
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    return {
        "hidden_states": draw(2, tokens, 16),
        "encoder_hidden_states": draw(2, 7, 32),
        "pooled_projections": draw(2, 32),
        "timestep": torch.tensor([time, time]),
        "img_ids": draw(tokens, 3),
        "txt_ids": draw(7, 3),
        "return_dict": False,
    }


def wan() -> nn.Module:
    from diffusers import WanTransformer3DModel

    torch.manual_seed(4)
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    ).eval()


def wan_inputs(tokens: int = 64, time: float = 0.5, seed: int = 1) -> Inputs:
    g = torch.Generator().manual_seed(seed)
    rows = {64: 8, 63: 7}[tokens]
    return {
        "hidden_states": torch.randn(1, 4, 1, 2 * rows, 2 * tokens // rows, generator=g),
        "encoder_hidden_states": torch.randn(1, 7, 16, generator=g),
        "timestep": torch.tensor([time]),
        "return_dict": False,
    }


def qwen() -> nn.Module:
    from diffusers import QwenImageTransformer2DModel

    torch.manual_seed(5)
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    ).eval()


def qwen_inputs(tokens: int = 64, time: float = 0.5, seed: int = 1) -> Inputs:
    """Two prompts of 7 and 4 tokens: the second is masked."""
    g = torch.Generator().manual_seed(seed)
    rows = {64: 8, 63: 7}[tokens]
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, 4:] = False
    return {
        "hidden_states": torch.randn(2, tokens, 16, generator=g),
        "encoder_hidden_states": torch.randn(2, 7, 16, generator=g),
        "encoder_hidden_states_mask": mask,
        "timestep": torch.tensor([time, time]),
        "img_shapes": [[(1, rows, tokens // rows)]] * 2,
        "return_dict": False,
    }


Family = tuple[Callable[[], nn.Module], Callable[..., Inputs]]
FAMILIES: dict[str, Family] = {
    "flux": (flux, flux_inputs),
    "wan": (wan, wan_inputs),
    "qwen": (qwen, qwen_inputs),
}


@torch.no_grad()
def one_device(model: nn.Module, calls: Sequence[Inputs]) -> list[Tensor]:
    return [model(**inputs)[0] for inputs in calls]


def on_ranks(
    ranks: Sequence[Mesh],
    model: nn.Module,
    recipe: str,
    use: Callable[[nn.Module, Parallel], T],
    **options: Any,
) -> list[T]:
    """Call ``use`` on every rank with a parallel copy of the model; return what each call returns."""

    def rank(peers: Mesh) -> T:
        own = copy.deepcopy(model)
        with torch.no_grad(), thinwire.parallel(own, peers, recipe, **options) as found:
            return use(own, found)

    return together([lambda peers=peers: rank(peers) for peers in ranks])


@torch.no_grad()
def sample(model: nn.Module, inputs: Inputs, steps: int) -> Tensor:
    """Return the latents after some Euler steps."""
    inputs = dict(inputs)
    for i in range(steps):
        inputs["timestep"] = torch.full_like(inputs["timestep"], 1 - i / steps)
        inputs["hidden_states"] = inputs["hidden_states"] - model(**inputs)[0] / steps
    return inputs["hidden_states"]
