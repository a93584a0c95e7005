"""Tiny random transformers with layers of experts, inputs for them, and several ranks of them in threads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from meshes import Mesh, together
from picture_models import Inputs, flux, flux_inputs
from torch import Tensor, nn

import thinwire
from thinwire.uses.pictures.expert_parallel.routing import Experts

T = TypeVar("T")


def drawn(model: nn.Module) -> nn.Module:
    """Give a model random weights of a fair size, and return it in evaluation."""
    for p in model.parameters():
        p.data = torch.randn_like(p) * (p.shape[-1] ** -0.5 if p.dim() > 1 else 0.1)
    return model.eval()


def flux_moe(layers: int = 2, experts: int = 8, chosen: int = 2) -> nn.Module:
    """Flux with HiDream's layers of experts in its double blocks."""
    from diffusers import FluxTransformer2DModel
    from diffusers.models.transformers.transformer_hidream_image import MOEFeedForwardSwiGLU

    model: Any = FluxTransformer2DModel.from_config(dict(flux().config) | {"num_layers": layers})
    torch.manual_seed(6)
    drawn(model)
    for block in model.transformer_blocks:
        block.ff = MOEFeedForwardSwiGLU(64, 96, experts, chosen)
    made: nn.Module = model.eval()
    return made


def hidream() -> nn.Module:
    """HiDream's own transformer, which calls its times ``timesteps``."""
    from diffusers import HiDreamImageTransformer2DModel

    torch.manual_seed(8)
    model: Any = HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_channels=[32, 16],
        text_emb_dim=64,
        num_routed_experts=4,
        num_activated_experts=2,
        axes_dims_rope=(4, 2, 2),
        max_resolution=(32, 32),
        llama_layers=(0, 1),
    )
    return drawn(model)


def hidream_inputs(pictures: Sequence[int], time: float) -> Inputs:
    draws = [torch.Generator().manual_seed(k) for k in pictures]

    def normal(*shape: int) -> Tensor:
        return torch.cat([torch.randn(1, *shape, generator=g) for g in draws])

    return {
        "hidden_states": normal(4, 8, 8),
        "encoder_hidden_states_t5": normal(8, 32),
        "encoder_hidden_states_llama3": torch.stack([normal(8, 16), normal(8, 16)]),
        "pooled_embeds": normal(64),
        "timesteps": torch.full((len(pictures),), 1000 * time),
        "return_dict": False,
    }


def nucleus() -> nn.Module:
    from diffusers import NucleusMoEImageTransformer2DModel

    torch.manual_seed(7)
    model: Any = NucleusMoEImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
        dense_moe_strategy="all_moe",
        num_experts=4,
        moe_intermediate_dim=24,
        capacity_factors=[2.0, 2.0],
    )
    return drawn(model)


def nucleus_inputs(pictures: Sequence[int], time: float) -> Inputs:
    inputs = batch([0], time)
    draws = [torch.Generator().manual_seed(k) for k in pictures]
    return {
        "hidden_states": torch.cat([torch.randn(1, 16, 16, generator=g) for g in draws]),
        "encoder_hidden_states": torch.cat([torch.randn(1, 5, 16, generator=g) for g in draws]),
        "timestep": torch.full((len(pictures),), time),
        "img_shapes": [(1, 4, 4)] * len(pictures),
        "return_dict": inputs["return_dict"],
    }


def batch(pictures: Sequence[int], time: float = 0.5, tokens: int = 24) -> Inputs:
    """Return inputs for flux_moe; picture ``k`` is the same in every batch."""
    each = [flux_inputs(tokens, time, seed=k) for k in pictures]
    inputs = {name: torch.cat([one[name][:1] for one in each]) for name in BY_PICTURE}
    shared = flux_inputs(tokens, time)
    return {name: inputs.get(name, value) for name, value in shared.items()}


BY_PICTURE = ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep")


def shares(pictures: int, world: int) -> list[list[int]]:
    """Return the pictures of each rank."""
    return [list(range(pictures))[rank::world] for rank in range(world)]


@torch.no_grad()
def sampled(
    model: nn.Module, pictures: Sequence[int], steps: int, make: Callable[..., Inputs] = batch
) -> Tensor:
    """Return the latents of pictures after some Euler steps."""
    x = make(pictures, 1.0)["hidden_states"]
    for i in range(steps):
        inputs = make(pictures, 1 - i / steps) | {"hidden_states": x}
        x = x - model(**inputs)[0] / steps
    return x


def on_ranks(
    ranks: Sequence[Mesh],
    model: nn.Module | Sequence[nn.Module],
    recipe: str,
    use: Callable[[nn.Module, Experts, int], T],
    **options: Any,
) -> list[T]:
    """Call ``use`` on every rank with a model whose experts are spread; return what each call returns.

    ``model``: one for all ranks, or one each.
    """

    def one(rank: int, peers: Mesh) -> T:
        own = copy.deepcopy(model if isinstance(model, nn.Module) else model[rank])
        with torch.no_grad(), thinwire.spread_experts(own, peers, recipe, **options) as found:
            return use(own, found, rank)

    return together([lambda r=r, p=p: one(r, p) for r, p in enumerate(ranks)])
