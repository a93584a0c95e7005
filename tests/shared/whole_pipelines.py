"""Pipelines of diffusers with tiny random parts, and what people add to them or run them with."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from bench.pictures.tiny import made
from bench.pictures.tiny_images import IMAGES
from bench.pictures.tiny_images import SD3 as SD3_TINY
from bench.pictures.tiny_videos import VIDEOS
from picture_hosts import HOSTS
from picture_models import flux
from picture_pipelines import drawn
from torch import Tensor, nn


class Whole(NamedTuple):
    """A pipeline, and what it is called with."""

    pipe: Any
    options: dict[str, Any]

    @property
    def models(self) -> list[Any]:
        """Its transformers."""
        found = [getattr(self.pipe, name, None) for name in ("transformer", "transformer_2")]
        return [model for model in found if model is not None]


def diffusers(name: str, *parts: Any, **named: Any) -> Any:
    """Make something of diffusers by name."""
    import diffusers

    return getattr(diffusers, name)(*parts, **named)


def picture(height: int = 48, width: int = 80) -> Tensor:
    return drawn(1, 3, height, width, seed=5).clamp(-1, 1) / 2 + 0.5


def hole(height: int = 48, width: int = 80) -> Tensor:
    """A mask of what is painted anew."""
    mask = torch.zeros(1, 1, height, width)
    mask[..., height // 4 : height // 2, width // 3 : width // 2] = 1
    return mask


def autoencoder(name: str, **sizes: Any) -> nn.Module:
    torch.manual_seed(6)
    model: nn.Module = diffusers(name, **sizes).eval()
    return model


@cache
def vae() -> Any:
    blocks = {f"{way}_block_types": (f"{way.title()}{kind}Block2D",) * 4 for way, kind in WAYS.items()}
    sizes = {"block_out_channels": (2,) * 4, "norm_num_groups": 1, "latent_channels": 4, "shift_factor": 0.1}
    model: Any = autoencoder("AutoencoderKL", **blocks, **sizes, sample_size=32)
    model.encode = partial(_by_mean, model.encode)
    return model


def _by_mean(encode: Callable[[Tensor], Any], x: Tensor) -> Any:
    """Draw nothing from the generator of the process, which ranks in threads would share."""
    found = encode(x)
    found.latent_dist.std.zero_()
    return found


WAYS = {"down": "Encoder", "up": "Decoder"}


def sees_a_picture(options: dict[str, Any]) -> bool:
    """Say whether a pipeline has to encode one; without an autoencoder, it may be offloaded."""
    return "image" in options or "control_image" in options


def controlling(kind: str, **sizes: Any) -> nn.Module:
    """A control network; its layers that begin at nought do not stay there, and time has no say in it."""
    net: nn.Module = made(kind, **sizes)()
    untimed(net)
    return net


def untimed(model: nn.Module) -> None:
    for part in model.modules():
        if type(part).__name__ == "TimestepEmbedding":
            part.linear_2.weight.data.zero_()  # type: ignore[operator,union-attr]
        elif type(part).__name__ == "TimestepEmbedder":
            part.mlp[-1].weight.data.zero_()  # type: ignore[operator,index]


FLUX = {"prompt_embeds": drawn(1, 7, 32), "pooled_prompt_embeds": drawn(1, 32)}
SD3 = {"prompt_embeds": drawn(1, 5, 16), "pooled_prompt_embeds": drawn(1, 8)}
WAN = {"prompt_embeds": drawn(1, 7, 16), "negative_prompt_embeds": drawn(1, 5, 16, seed=2)}
SD3_SIZES = SD3_TINY | {"num_layers": 4}
NEAR = {"strength": 1.0, "sigmas": [1.0, 0.999, 0.998]}  # what is painted over is drawn in each step
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
WAN_SIZES = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 32,
    "ffn_dim": 32,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}


def guided(prompts: dict[str, Tensor]) -> dict[str, Tensor]:
    return prompts | {f"negative_{name}": -x for name, x in prompts.items()}


def flux_by(kind: str, *more: Any, **options: Any) -> Whole:
    scheduler, sees = diffusers("FlowMatchEulerDiscreteScheduler"), vae() if sees_a_picture(options) else None
    pipe = diffusers(kind, scheduler, sees, *[None] * 4, flux(), *more)
    return Whole(pipe, FLUX | {"height": 48, "width": 80} | options)


def flux_controlled() -> Whole:
    sizes = {k: v for k, v in dict(flux().config).items() if not k.startswith("_") and k != "out_channels"}
    net = controlling("FluxControlNetModel", **sizes)
    return flux_by("FluxControlNetPipeline", net, control_image=picture())


def flux_adapted() -> Whole:
    """With an IP-Adapter, and guidance: image prompts of both passes."""
    made = flux_by("FluxPipeline", **guided(FLUX), true_cfg_scale=3.0)
    sizes = {"proj.weight": (128, 8), "proj.bias": (128,), "norm.weight": (32,), "norm.bias": (32,)}
    state = {"image_proj": {name: 0.3 * drawn(*size, seed=3) for name, size in sizes.items()}}
    layer = {"weight": (64, 32), "bias": (64,)}
    state["ip_adapter"] = {
        f"0.to_{x}_ip.{p}": 0.3 * drawn(*size, seed=4) for x in "kv" for p, size in layer.items()
    }
    made.pipe.transformer._load_ip_adapter_weights([state])
    images = {"ip_adapter_image_embeds": [drawn(1, 1, 8, seed=7)]}
    images["negative_ip_adapter_image_embeds"] = [drawn(1, 1, 8, seed=8)]
    return made._replace(options=made.options | images)


def sd3_by(
    kind: str = "StableDiffusion3Pipeline",
    *more: Any,
    scheduler: str = "FlowMatchEulerDiscreteScheduler",
    **options: Any,
) -> Whole:
    model, sees = made("SD3Transformer2DModel", **SD3_SIZES)(), vae() if sees_a_picture(options) else None
    pipe = diffusers(kind, model, diffusers(scheduler), sees, *[None] * 6, *more)
    return Whole(pipe, guided(SD3) | {"height": 48, "width": 80, "guidance_scale": 3.0} | options)


def sd3_controlled() -> Whole:
    net = controlling("SD3ControlNetModel", **SD3_SIZES | {"num_layers": 1})
    return sd3_by("StableDiffusion3ControlNetPipeline", net, control_image=picture())


def sd3_tiled() -> Whole:
    made = sd3_by(output_type="pt", image=None)
    made.options.pop("image")
    made.pipe.vae = autoencoder("AutoencoderKL", **{k: v for k, v in vae().config.items() if k[0] != "_"})
    made.pipe.vae.enable_tiling()
    made.pipe.vae.tile_sample_min_size, made.pipe.vae.tile_latent_min_size = 32, 4
    return made


def wan_by(scheduler: str, *more: Any, channels: int = 4, **options: Any) -> Whole:
    model = made("WanTransformer3DModel", **WAN_SIZES, in_channels=channels)()
    named = {name: options.pop(name) for name in ("boundary_ratio", "expand_timesteps") if name in options}
    flow = FLOW if "Multistep" in scheduler else {}
    pipe = diffusers("WanPipeline", None, None, None, diffusers(scheduler, **flow), model, *more, **named)
    return Whole(pipe, WAN | VIDEO | options)


VIDEO = {"height": 48, "width": 80, "num_frames": 9, "guidance_scale": 3.0}


def wan_of_two() -> Whole:
    """Wan 2.2: one transformer for the first steps, another for the last ones."""
    other = made("WanTransformer3DModel", **WAN_SIZES, in_channels=4)()
    for p in other.parameters():
        p.data = p.data.flip(-1)
    return wan_by(
        "UniPCMultistepScheduler",
        other,
        boundary_ratio=0.7,
        guidance_scale_2=2.0,
        num_inference_steps=5,
    )


def wan_vae() -> nn.Module:
    """Of one rank alone: it keeps frames while it works."""
    sizes = {"base_dim": 4, "z_dim": 4, "dim_mult": [1] * 4, "num_res_blocks": 1}
    means = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    return autoencoder("AutoencoderKLWan", **sizes, **means, temperal_downsample=[False, True, True])


def wan_from_a_picture() -> Whole:
    """Wan 2.1: its text and a picture's embedding are attended to by layers of their own."""
    from transformers import CLIPVisionConfig, CLIPVisionModel
    from transformers.models.clip import CLIPImageProcessorPil

    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(8)
    sees = CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=32, patch_size=16)).eval()
    model = made("WanTransformer3DModel", **WAN_SIZES, in_channels=12, image_dim=8, added_kv_proj_dim=24)()
    scheduler = diffusers("UniPCMultistepScheduler", **FLOW)
    processor = CLIPImageProcessorPil(size=32, crop_size=32)
    pipe = diffusers("WanImageToVideoPipeline", None, None, wan_vae(), scheduler, processor, sees, model)
    (image,) = pipe.video_processor.numpy_to_pil(picture().permute(0, 2, 3, 1).numpy())
    return Whole(pipe, WAN | VIDEO | {"image": image})


def qwen() -> Whole:
    """With guidance: two texts of two lengths, masked."""
    scheduler = diffusers("FlowMatchEulerDiscreteScheduler")
    pipe = diffusers("QwenImagePipeline", scheduler, None, None, None, HOSTS["Qwen-Image"][0]())
    lengths = {"": 7, "negative_": 4}
    texts = {f"{which}prompt_embeds": drawn(1, n, 16, seed=n) for which, n in lengths.items()}
    masks = {f"{which}prompt_embeds_mask": torch.ones(1, n).long() for which, n in lengths.items()}
    return Whole(pipe, texts | masks | {"true_cfg_scale": 3.0, "height": 48, "width": 80})


def z_image() -> Whole:
    """Its time rises."""
    scheduler = diffusers("FlowMatchEulerDiscreteScheduler")
    pipe = diffusers("ZImagePipeline", scheduler, None, None, None, IMAGES["Z-Image"][0]())
    texts = {"prompt_embeds": [drawn(5, 16)], "negative_prompt_embeds": [drawn(9, 16)]}
    return Whole(pipe, texts | {"height": 96, "width": 160, "guidance_scale": 3.0})


def cogvideox() -> Whole:
    pipe = diffusers(
        "CogVideoXPipeline", None, None, None, VIDEOS["CogVideoX"][0](), diffusers("CogVideoXDDIMScheduler")
    )
    texts = {"prompt_embeds": drawn(1, 5, 16), "negative_prompt_embeds": drawn(1, 5, 16, seed=2)}
    return Whole(pipe, texts | VIDEO | {"use_dynamic_cfg": True})


def called_back(pipe: Any, step: int, time: Any, given: dict[str, Any]) -> dict[str, Any]:
    return {"latents": 0.99 * given["latents"]}


SKIPPED = {
    "skip_guidance_layers": [1, 2],  # one of each rank, beside the cut
    "skip_layer_guidance_start": 0.01,
    "skip_layer_guidance_stop": 0.6,
}


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


def as_gguf(model: nn.Module) -> None:
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


def cast(model: Any) -> None:
    model.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)


def nothing(model: nn.Module) -> None:
    pass


Case = tuple[Callable[[], Whole], Callable[[Any], None]]
FLUX_ONE = partial(flux_by, "FluxPipeline")
TWO = {name: torch.cat([x, x.flip(-1)]) for name, x in guided(FLUX).items()}
CASES: dict[str, Case] = {
    "image to image": (
        partial(flux_by, "FluxImg2ImgPipeline", image=picture(), strength=0.8),
        nothing,
    ),
    "inpainting": (
        partial(flux_by, "FluxInpaintPipeline", image=picture(), mask_image=hole(), **NEAR),
        nothing,
    ),
    "ControlNet": (flux_controlled, nothing),
    "ControlNet of SD3": (sd3_controlled, nothing),
    "IP-Adapter": (flux_adapted, nothing),
    "two prompts, guidance": (partial(flux_by, "FluxPipeline", **TWO, true_cfg_scale=3.0), nothing),
    "two texts of two lengths": (qwen, nothing),
    "latents called back": (partial(sd3_by, callback_on_step_end=called_back), nothing),
    "layers skipped": (partial(sd3_by, **SKIPPED), nothing),
    "fused projections": (sd3_by, lambda model: model.fuse_qkv_projections()),
    "rising time": (z_image, nothing),
    "dynamic guidance": (cogvideox, nothing),
    "LoRA": (sd3_by, adapted),
    "LoRA of Flux": (FLUX_ONE, adapted),
    "stored in half": (sd3_by, cast),
    "offloaded": (sd3_by, offloaded),
    "offloaded, Flux": (FLUX_ONE, offloaded),
    "offloaded in groups": (sd3_by, in_groups),
    "GGUF": (FLUX_ONE, as_gguf),
    "VAE in tiles": (sd3_tiled, nothing),
    "two calls a step": (partial(sd3_by, scheduler="FlowMatchHeunDiscreteScheduler"), nothing),
    "DPM++": (partial(wan_by, "DPMSolverMultistepScheduler"), nothing),
    "times of tokens": (
        partial(wan_by, "FlowMatchEulerDiscreteScheduler", expand_timesteps=True),
        nothing,
    ),
    "two transformers": (wan_of_two, nothing),
    "a video from a picture": (wan_from_a_picture, nothing),
}
