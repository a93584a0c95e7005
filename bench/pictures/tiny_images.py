"""Tiny random transformers of pictures, and inputs for them: odd numbers of tokens, texts of two lengths."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bench.pictures.tiny import Host, Inputs, drawn, made, padded

HEADS = {"num_attention_heads": 2, "attention_head_dim": 12}
TIMES = torch.tensor([500.0, 500.0])
SIZES = {name: torch.tensor([[24, 40]] * 2) for name in ("original_size", "target_size", "crop_coords")}


def picture(channels: int = 4, text: int = 5, **more: Any) -> Inputs:
    """15 tokens of a picture in patches of 2, and some of text."""
    return {
        "hidden_states": drawn(2, channels, 6, 10),
        "encoder_hidden_states": drawn(2, text, 16, seed=2),
        "timestep": TIMES,
        **more,
    }


def z_image() -> Inputs:
    """Two pictures whose texts have two lengths."""
    return {
        "x": [drawn(4, 1, 6, 10, seed=s) for s in (1, 2)],
        "t": torch.tensor([0.5, 0.5]),
        "cap_feats": [drawn(5, 16, seed=3), drawn(39, 16, seed=4)],
    }


def lumina() -> Inputs:
    from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina

    return {
        "hidden_states": drawn(2, 4, 6, 10),
        "encoder_hidden_states": drawn(2, 5, 16, seed=2),
        "timestep": torch.tensor([0.5, 0.5]),
        "encoder_mask": padded(5, 5, 3),
        "image_rotary_emb": get_2d_rotary_pos_embed_lumina(12, 24, 24),
        "cross_attention_kwargs": {},
    }


SD3 = {"in_channels": 4, "out_channels": 4, "num_layers": 2, "joint_attention_dim": 16, **HEADS}
SD3 |= {"caption_projection_dim": 24, "pooled_projection_dim": 8, "pos_embed_max_size": 12, "sample_size": 12}
COG = {"in_channels": 4, "out_channels": 4, "num_layers": 2, "text_embed_dim": 16, **HEADS}
COG |= {"time_embed_dim": 8, "condition_dim": 4, "sample_size": 12, "pos_embed_max_size": 12}
HUNYUAN = {"in_channels": 4, "patch_size": 2, "num_layers": 4, "hidden_size": 24, "cross_attention_dim": 16}
HUNYUAN |= {"sample_size": 12, "cross_attention_dim_t5": 16, "pooled_projection_dim": 8, **HEADS}
HUNYUAN |= {"text_len": 5, "text_len_t5": 6}


def adapted() -> nn.Module:
    """SD3 with an IP-Adapter: its attention has tokens of an image prompt, which all ranks have."""
    from diffusers.models.attention_processor import SD3IPAdapterJointAttnProcessor2_0 as Adapter

    model: Any = made("SD3Transformer2DModel", **SD3)()
    torch.manual_seed(10)
    model.set_attn_processor({name: Adapter(24, 24, 12, 8) for name in model.attn_processors})
    model.image_proj = lambda image, time: (image, drawn(2, 8, seed=6))
    return model.eval()  # type: ignore[no-any-return]


IMAGES: dict[str, Host] = {
    "SD3": (
        made("SD3Transformer2DModel", **SD3, dual_attention_layers=(0,), qk_norm="rms_norm"),
        lambda: picture(pooled_projections=drawn(2, 8, seed=3)),
    ),
    "SD3, a control network": (
        made("SD3Transformer2DModel", **SD3),
        lambda: picture(
            pooled_projections=drawn(2, 8, seed=3),
            block_controlnet_hidden_states=[drawn(2, 15, 24, seed=4)],
        ),
    ),
    "SD3, an IP-Adapter": (
        adapted,
        lambda: picture(
            pooled_projections=drawn(2, 8, seed=3),
            joint_attention_kwargs={"ip_adapter_image_embeds": drawn(2, 4, 24, seed=5)},
        ),
    ),
    "AuraFlow": (
        made(
            "AuraFlowTransformer2DModel",
            **HEADS,
            sample_size=12,
            num_mmdit_layers=1,
            num_single_dit_layers=2,
            joint_attention_dim=16,
            caption_projection_dim=24,
            pos_embed_max_size=144,
        ),
        lambda: picture(timestep=torch.tensor([0.5, 0.5])),
    ),
    "CogView3-Plus": (made("CogView3PlusTransformer2DModel", **COG), lambda: picture(**SIZES)),
    "CogView4": (made("CogView4Transformer2DModel", **COG), lambda: picture(**SIZES)),
    "CogView4, masked": (
        made("CogView4Transformer2DModel", **COG),
        lambda: picture(**SIZES, attention_mask=padded(5, 5, 3)),
    ),
    "PixArt": (
        made(
            "PixArtTransformer2DModel",
            **HEADS,
            num_layers=2,
            cross_attention_dim=24,
            sample_size=12,
            caption_channels=16,
            use_additional_conditions=False,
        ),
        lambda: picture(encoder_attention_mask=padded(5, 5, 3)),
    ),
    "PixArt, as many tokens of text": (
        made(
            "PixArtTransformer2DModel",
            **HEADS,
            num_layers=2,
            cross_attention_dim=24,
            sample_size=12,
            caption_channels=16,
            use_additional_conditions=False,
        ),
        lambda: picture(text=8, encoder_attention_mask=padded(8, 8, 3)),  # as rank 0 has of the picture
    ),
    "DiT": (
        made("DiTTransformer2DModel", **HEADS, num_layers=2, sample_size=6, num_embeds_ada_norm=1000),
        lambda: {
            "hidden_states": drawn(2, 4, 6, 6),
            "timestep": torch.tensor([500, 500]),
            "class_labels": torch.tensor([3, 7]),
        },
    ),
    "Hunyuan-DiT": (
        made("HunyuanDiT2DModel", **HUNYUAN),
        lambda: picture(
            encoder_hidden_states_t5=drawn(2, 6, 16, seed=3),
            text_embedding_mask=padded(5, 5, 3),
            text_embedding_mask_t5=padded(6, 6, 2),
            image_meta_size=torch.tensor([[24, 40, 24, 40, 0, 0]] * 2),
            style=torch.tensor([0, 0]),
            image_rotary_emb=(drawn(15, 12, seed=5), drawn(15, 12, seed=6)),
            controlnet_block_samples=[drawn(2, 15, 24, seed=7)],
        ),
    ),
    "Lumina-Next": (
        made(
            "LuminaNextDiT2DModel",
            sample_size=12,
            in_channels=4,
            hidden_size=24,
            num_layers=2,
            num_attention_heads=2,
            num_kv_heads=1,
            multiple_of=8,
            cross_attention_dim=16,
        ),
        lumina,
    ),
    "Lumina 2": (
        made(
            "Lumina2Transformer2DModel",
            sample_size=12,
            in_channels=4,
            hidden_size=24,
            num_layers=2,
            num_refiner_layers=1,
            num_attention_heads=2,
            num_kv_heads=1,
            multiple_of=8,
            axes_dim_rope=(4, 4, 4),
            axes_lens=(32, 16, 16),
            cap_feat_dim=16,
        ),
        lambda: picture(encoder_attention_mask=padded(5, 5, 3)),
    ),
    "Z-Image": (
        made(
            "ZImageTransformer2DModel",
            in_channels=4,
            dim=24,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=16,
            axes_dims=[4, 4, 4],
            axes_lens=[128, 16, 16],
        ),
        z_image,
    ),
}
