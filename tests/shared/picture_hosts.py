"""A tiny random transformer of each kind of diffusers that can be split over ranks, and inputs for it."""

from __future__ import annotations

from typing import Any

import torch
from bench.pictures.tiny import Host, drawn, made
from bench.pictures.tiny_images import IMAGES
from bench.pictures.tiny_more import MORE
from bench.pictures.tiny_videos import VIDEOS
from picture_models import Inputs, flux, flux_inputs, qwen_inputs, wan, wan_inputs
from torch import Tensor, nn

JOINT = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
ROPE = {"axes_dims_rope": (4, 6, 6)}
PICTURE = {"in_channels": 8, "joint_attention_dim": 16, **JOINT}
VIDEO = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 32,
    "ffn_dim": 32,
}


def joint(text: int = 5, **more: Any) -> Inputs:
    """13 tokens of a picture, and some of text: neither can be shared evenly."""
    return {
        "hidden_states": drawn(2, 13, 8),
        "encoder_hidden_states": drawn(2, text, 16, seed=2),
        "timestep": torch.tensor([0.5, 0.5]),
        "img_ids": drawn(13, 3, seed=3),
        "txt_ids": drawn(text, 3, seed=4),
        **more,
    }


def video(**more: Any) -> Inputs:
    return {
        "hidden_states": drawn(1, 4, 3, 4, 6),
        "encoder_hidden_states": drawn(1, 5, 16, seed=2),
        "timestep": torch.tensor([500.0]),
        **more,
    }


def controlled() -> Inputs:
    samples = {"controlnet_block_samples": 1, "controlnet_single_block_samples": 2}
    added = {name: [drawn(2, 63, 64, seed=7 + i) for i in range(n)] for name, n in samples.items()}
    return flux_inputs(63) | added


def batched_ids() -> Inputs:
    inputs = flux_inputs(63)
    return inputs | {name: inputs[name].expand(2, -1, -1) for name in ("img_ids", "txt_ids")}


def adapted() -> nn.Module:
    """Flux with an IP-Adapter: its attention has tokens of an image prompt, which all ranks have."""
    from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

    model: Any = flux()
    own = {
        name: FluxIPAdapterAttnProcessor(64, 64, (4,), [0.7])
        if "attn" in name and "single" not in name
        else old
        for name, old in model.attn_processors.items()
    }
    model.set_attn_processor(own)
    model.encoder_hid_proj = lambda image: image
    return model.eval()  # type: ignore[no-any-return]


def masked() -> Inputs:
    mask = torch.ones(2, 18)
    mask[1, 3:5] = 0
    return joint(attention_mask=mask)


def ltx(times: Tensor) -> Inputs:
    mask = torch.ones(2, 5)
    mask[1, 3:] = 0
    return {
        "hidden_states": drawn(2, 15, 8),
        "encoder_hidden_states": drawn(2, 5, 16, seed=2),
        "timestep": times,
        "encoder_attention_mask": mask,
        "num_frames": 1,
        "height": 3,
        "width": 5,
    }


def ltx2() -> Inputs:
    mask = torch.ones(2, 5)
    mask[1, 3:] = 0
    return ltx(500 * torch.rand(2, 15, generator=torch.Generator().manual_seed(5))) | {
        "audio_hidden_states": drawn(2, 7, 8, seed=3),
        "audio_encoder_hidden_states": drawn(2, 5, 16, seed=4),
        "audio_timestep": torch.tensor([400.0, 300.0]),
        "audio_encoder_attention_mask": mask,
        "audio_num_frames": 7,
        "sigma": torch.tensor([400.0, 300.0]),
    }


def packed() -> Inputs:
    """MiniMax-H3's one sequence: 4 tokens of text, 8 of a video, 3 of sound."""
    kinds = torch.tensor([1] * 4 + [0] * 8 + [2] * 3)
    return {
        "hidden_states": drawn(1, 8, 16),
        "audio_hidden_states": drawn(1, 3, 8, seed=2),
        "encoder_hidden_states": drawn(1, 4, 16, seed=3),
        "timestep": torch.tensor([0.5, 0.1]),
        "timestep_indices": (kinds == 1).long(),
        "token_tags": kinds,
        "position_ids": torch.arange(45).reshape(15, 3),
        "video_indices": (kinds == 0).nonzero().flatten(),
        "audio_indices": (kinds == 2).nonzero().flatten(),
        "text_indices": (kinds == 1).nonzero().flatten(),
    }


LTX = {
    "in_channels": 8,
    "out_channels": 8,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "cross_attention_dim": 24,
    "num_layers": 2,
    "caption_channels": 16,
}
LTX2 = {f"audio_{name}": LTX[name] for name in list(LTX)[:5]} | LTX
QWEN = {
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 16,
    "axes_dims_rope": (8, 4, 4),
}
TI2V = 900 * torch.rand(1, 18, generator=torch.Generator().manual_seed(5))

HOSTS: dict[str, Host] = {
    "Flux": (flux, lambda: flux_inputs(63)),
    "Flux, a control network": (flux, controlled),
    "Flux, ids with a batch": (flux, batched_ids),
    "Flux, an IP-Adapter": (
        adapted,
        lambda: (
            flux_inputs(63)
            | {"joint_attention_kwargs": {"ip_adapter_image_embeds": [drawn(2, 4, 64, seed=8)]}}
        ),
    ),
    "Flux2": (
        made(
            "Flux2Transformer2DModel", **PICTURE, axes_dims_rope=(4, 4, 4, 4), timestep_guidance_channels=16
        ),
        lambda: joint(
            img_ids=drawn(2, 13, 4, seed=3), txt_ids=drawn(2, 5, 4, seed=4), guidance=torch.ones(2)
        ),
    ),
    "Chroma": (
        made(
            "ChromaTransformer2DModel",
            **PICTURE,
            **ROPE,
            approximator_num_channels=8,
            approximator_hidden_dim=16,
            approximator_layers=1,
        ),
        masked,
    ),
    "LongCat-Image": (
        made("LongCatImageTransformer2DModel", **PICTURE, **ROPE, pooled_projection_dim=16),
        joint,
    ),
    "Ovis-Image": (made("OvisImageTransformer2DModel", **PICTURE, **ROPE, out_channels=8), joint),
    "Bria": (
        made("BriaTransformer2DModel", **PICTURE, **ROPE, pooled_projection_dim=None),
        lambda: joint(controlnet_block_samples=[drawn(2, 13, 32, seed=7)]),
    ),
    "Qwen-Image": (made("QwenImageTransformer2DModel", **QWEN), lambda: qwen_inputs(63)),
    "Qwen-Image, a control network": (
        made("QwenImageTransformer2DModel", **QWEN),
        lambda: qwen_inputs(63) | {"controlnet_block_samples": [drawn(2, 63, 32, seed=7)]},
    ),
    "Wan": (wan, lambda: wan_inputs(63)),
    "Wan, times of tokens": (
        made("WanTransformer3DModel", **VIDEO, num_layers=2, rope_max_seq_len=32),
        lambda: video(timestep=TI2V),
    ),
    "Wan-VACE": (
        made(
            "WanVACETransformer3DModel",
            **VIDEO,
            num_layers=3,
            rope_max_seq_len=32,
            vace_layers=[0, 2],
            vace_in_channels=6,
        ),
        lambda: video(control_hidden_states=drawn(1, 6, 3, 4, 6, seed=6)),
    ),
    "SkyReels-V2": (
        made("SkyReelsV2Transformer3DModel", **VIDEO, num_layers=2, rope_max_seq_len=32),
        video,
    ),
    "HunyuanVideo": (
        made(
            "HunyuanVideoTransformer3DModel",
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=12,
            num_layers=2,
            num_single_layers=2,
            num_refiner_layers=1,
            patch_size=2,
            text_embed_dim=16,
            pooled_projection_dim=8,
            rope_axes_dim=(4, 4, 4),
        ),
        lambda: video(
            encoder_attention_mask=torch.tensor([[1, 1, 1, 0, 0]]),
            pooled_projections=drawn(1, 8),
            guidance=torch.ones(1),
        ),
    ),
    "ChronoEdit": (
        made("ChronoEditTransformer3DModel", **VIDEO, num_layers=2, rope_max_seq_len=32),
        video,
    ),
    "LTX-Video": (made("LTXVideoTransformer3DModel", **LTX), lambda: ltx(torch.tensor([500.0, 500.0]))),
    "LTX-Video, from a picture": (
        made("LTXVideoTransformer3DModel", **LTX),
        lambda: ltx(TI2V[:, :15].expand(2, -1)),
    ),
    "LTX-2": (made("LTX2VideoTransformer3DModel", **LTX2), ltx2),
    "Helios": (
        made("HeliosTransformer3DModel", **VIDEO, num_layers=2, rope_dim=(4, 4, 4)),
        lambda: video(
            indices_hidden_states=torch.arange(3)[None],
            latents_history_short=drawn(1, 4, 1, 4, 6, seed=6),
            indices_latents_history_short=torch.arange(1)[None],
        ),
    ),
    "MiniMax-H3": (
        made(
            "MiniMaxH3Transformer3DModel",
            num_attention_heads=2,
            attention_head_dim=12,
            hidden_size=24,
            num_layers=1,
            num_refiner_layers=1,
            ffn_dim=32,
            in_channels=4,
            audio_in_channels=8,
            text_dim=16,
            freq_dim=16,
            time_embed_hidden_dim=16,
            time_embed_dim=16,
            rope_freq_dim=2,
        ),
        packed,
    ),
    **IMAGES,
    **VIDEOS,
    **MORE,
}
