"""Pipelines of diffusers with tiny random parts, and prompts as embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def flux_pipeline(transformer: nn.Module, height: int, guidance: float = 1.0) -> Tensor:
    """With guidance above 1: two forward passes a step."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    pipe = FluxPipeline(FlowMatchEulerDiscreteScheduler(), None, None, None, None, None, transformer)
    prompts = {"prompt_embeds": drawn(1, 7, 32), "pooled_prompt_embeds": drawn(1, 32)}
    if guidance > 1:
        prompts |= {f"negative_{name}": -x for name, x in prompts.items()}
    return ran(pipe, **prompts, height=height, width=96, true_cfg_scale=guidance)


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
    options = {"num_inference_steps": 4, "output_type": "latent", "return_dict": False} | options
    made: Tensor = pipe(**options, generator=torch.Generator().manual_seed(0))[0]
    return made
