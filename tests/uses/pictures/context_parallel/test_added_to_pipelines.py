"""What people add to pipelines: guidance, callbacks, adapters, casts, offloading, quantised weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from bench.pictures.tiny_images import IMAGES
from bench.pictures.tiny_videos import VIDEOS
from each import each
from meshes import Mesh, together
from picture_models import flux
from picture_pipelines import drawn, flux_pipeline, ran
from torch import Tensor, nn

import thinwire

pytest.importorskip("diffusers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
Use = Callable[[nn.Module], Tensor]
TEXT, OTHER = drawn(1, 5, 16), drawn(1, 5, 16, seed=2)


def sd3(model: nn.Module, **options: Any) -> Tensor:
    """With guidance, in one pass a step."""
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

    pipe = StableDiffusion3Pipeline(model, FlowMatchEulerDiscreteScheduler(), *[None] * 7)
    prompts = {"prompt_embeds": TEXT, "pooled_prompt_embeds": drawn(1, 8)}
    prompts |= {f"negative_{name}": -x for name, x in prompts.items()}
    return ran(pipe, **prompts, height=48, width=80, guidance_scale=3.0, **options)


def called_back(pipe: Any, step: int, time: Any, given: dict[str, Any]) -> dict[str, Any]:
    return {"latents": 0.99 * given["latents"]}


SKIPPED = {
    "skip_guidance_layers": [1],
    "skip_layer_guidance_start": 0.01,
    "skip_layer_guidance_stop": 0.6,
    "callback_on_step_end": called_back,
}


def z_image(model: nn.Module) -> Tensor:
    """Its time rises."""
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline

    pipe = ZImagePipeline(FlowMatchEulerDiscreteScheduler(), None, None, None, model)
    texts = {"prompt_embeds": [TEXT[0]], "negative_prompt_embeds": [drawn(9, 16)]}
    return ran(pipe, **texts, height=96, width=160, guidance_scale=3.0)


def cogvideox(model: nn.Module) -> Tensor:
    from diffusers import CogVideoXDDIMScheduler, CogVideoXPipeline

    pipe = CogVideoXPipeline(None, None, None, model, CogVideoXDDIMScheduler())
    texts = {"prompt_embeds": TEXT, "negative_prompt_embeds": OTHER, "use_dynamic_cfg": True}
    return ran(pipe, **texts, height=48, width=80, num_frames=9, guidance_scale=3.0)


def adapted(model: Any) -> None:
    from peft import LoraConfig

    layers = ["to_q", "to_k", "to_v", "to_out.0"]
    model.add_adapter(LoraConfig(r=2, init_lora_weights=False, target_modules=layers))


def offloaded(model: Any) -> None:
    from accelerate import cpu_offload

    cpu_offload(model, execution_device=torch.device("cpu"))


def in_groups(model: Any) -> None:
    here = torch.device("cpu")
    model.enable_group_offload(onload_device=here, offload_device=here, offload_type="leaf_level")


def quantised(model: nn.Module) -> None:
    """In 8 bits a value, as a GGUF file has them."""
    gguf = pytest.importorskip("gguf")
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    kind = gguf.GGMLQuantizationType.Q8_0
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if type(layer) is nn.Linear and layer.in_features % 32 == 0:
                packed = torch.from_numpy(gguf.quants.quantize(layer.weight.detach().numpy(), kind))
                own: Any = GGUFLinear(layer.in_features, layer.out_features, layer.bias is not None)
                own.compute_dtype, own.bias = torch.float32, layer.bias
                own.weight = GGUFParameter(packed, quant_type=kind)
                setattr(module, name, own)


def nothing(model: nn.Module) -> None:
    pass


def cast(model: Any) -> None:
    model.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)


SD3, FLUX = IMAGES["SD3, a control network"][0], flux
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], None], Use]] = {
    "layers skipped, latents called back": (
        IMAGES["SD3, a control network"][0],
        nothing,
        partial(sd3, **SKIPPED),
    ),
    "fused projections": (SD3, lambda model: model.fuse_qkv_projections(), sd3),
    "rising time": (IMAGES["Z-Image"][0], nothing, z_image),
    "dynamic guidance": (VIDEOS["CogVideoX"][0], nothing, cogvideox),
    "LoRA": (SD3, adapted, sd3),
    "LoRA of Flux": (FLUX, adapted, partial(flux_pipeline, height=96)),
    "stored in half": (SD3, cast, sd3),
    "offloaded": (SD3, offloaded, sd3),
    "offloaded, Flux": (FLUX, offloaded, partial(flux_pipeline, height=96)),
    "offloaded in groups": (SD3, in_groups, sd3),
    "GGUF": (FLUX, quantised, partial(flux_pipeline, height=96)),
}


@each("name", CASES)
def test_what_is_added_gives_the_picture_of_one_device(ranks: dict[int, list[Mesh]], name: str) -> None:
    make, add, use = CASES[name]

    def model() -> nn.Module:
        own = make()
        add(own)
        return own.eval()

    def rank(own: nn.Module, peers: Mesh) -> tuple[Tensor, int]:
        with thinwire.parallel(own, peers, "raw") as found:
            return use(own), found.generation

    wanted, models = use(model()), [model() for _ in ranks[2]]
    pairs = zip(models, ranks[2], strict=True)
    for made, generation in together([partial(rank, own, peers) for own, peers in pairs]):
        assert (made - wanted).norm() <= 1e-5 * wanted.norm()
        assert generation == (2 if name == "rising time" else 1)
