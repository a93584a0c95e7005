"""Pipelines of diffusers over a parallel transformer: tiny random parts, and prompts as embeddings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from meshes import Mesh
from picture_models import flux, on_ranks, wan
from torch import Tensor, nn

from thinwire.engines.diffusion.parallel import Parallel

pytest.importorskip("diffusers")


def flux_pipeline(transformer: nn.Module, height: int) -> Tensor:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    pipe = FluxPipeline(FlowMatchEulerDiscreteScheduler(), None, None, None, None, None, transformer)
    return ran(
        pipe, prompt_embeds=drawn(1, 7, 32), pooled_prompt_embeds=drawn(1, 32), height=height, width=96
    )


def wan_pipeline(transformer: nn.Module, height: int) -> Tensor:
    """With guidance: two forward passes a step."""
    from diffusers import UniPCMultistepScheduler, WanPipeline

    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    pipe = WanPipeline(None, None, None, scheduler, transformer)
    prompts = {"prompt_embeds": drawn(1, 7, 16), "negative_prompt_embeds": drawn(1, 5, 16, seed=2)}
    return ran(pipe, **prompts, height=height, width=96, num_frames=1, guidance_scale=3.0)


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ran(pipe: Any, **options: Any) -> Tensor:
    pipe.set_progress_bar_config(disable=True)
    options |= {"num_inference_steps": 4, "output_type": "latent", "return_dict": False}
    made: Tensor = pipe(**options, generator=torch.Generator().manual_seed(0))[0]
    return made


@pytest.mark.parametrize(("make", "pipeline"), [(flux, flux_pipeline), (wan, wan_pipeline)])
def test_a_pipeline_makes_the_same_picture(ranks: dict[int, list[Mesh]], make: Any, pipeline: Any) -> None:
    """Twice, and in another size afterwards: each is a generation of its own."""
    model, heights = make(), (96, 96, 80)
    wanted = [pipeline(model, height) for height in heights]

    def use(own: nn.Module, found: Parallel) -> tuple[list[Tensor], int]:
        return [pipeline(own, height) for height in heights], found.generation

    for recipe, bound in (("raw", 1e-6), ("compact:bits=2", 1e-2)):
        made = on_ranks(ranks[2], model, recipe, use)
        for pictures, generation in made:
            assert generation == 3
            for x, y, z in zip(pictures, made[0][0], wanted, strict=True):
                assert torch.equal(x, y)
                assert (x - z).norm() <= bound * z.norm()
            assert torch.equal(pictures[0], pictures[1])
