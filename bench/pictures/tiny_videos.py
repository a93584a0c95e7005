"""Tiny random transformers of video and sound, and inputs for them."""

from __future__ import annotations

from typing import Any

import torch

from bench.pictures.tiny import Host, Inputs, drawn, made, padded

HEADS = {"num_attention_heads": 2, "attention_head_dim": 12}


def video(channels: int = 4, text: int = 5, **more: Any) -> Inputs:
    """3 frames of 6 x 10: 45 tokens in patches of 2, and some of text."""
    return {
        "hidden_states": drawn(2, channels, 3, 6, 10),
        "encoder_hidden_states": drawn(2, text, 16, seed=2),
        "timestep": torch.tensor([500.0, 500.0]),
        **more,
    }


def rotary(tokens: int = 45, width: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random cosines and sines [tokens, width]."""
    angles = drawn(tokens, width, seed=9)
    return angles.cos(), angles.sin()


COGVIDEO = {"in_channels": 4, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": 16, "num_layers": 2}
COGVIDEO |= {"sample_width": 10, "sample_height": 6, "sample_frames": 9, "max_text_seq_length": 5}
COGVIDEO |= {"num_attention_heads": 2, "attention_head_dim": 16}
COSMOS = {"in_channels": 4, "out_channels": 4, "num_layers": 2, "text_embed_dim": 16, "adaln_lora_dim": 8}
COSMOS |= {"max_size": (4, 12, 12), "concat_padding_mask": False, "num_attention_heads": 2}
COSMOS |= {"attention_head_dim": 18}


def cogvideox(**more: Any) -> Inputs:
    return video(hidden_states=drawn(2, 3, 4, 6, 10), **more)


VIDEOS: dict[str, Host] = {
    "CogVideoX": (made("CogVideoXTransformer3DModel", **COGVIDEO), cogvideox),
    "CogVideoX, rotary": (
        made("CogVideoXTransformer3DModel", **COGVIDEO, use_rotary_positional_embeddings=True),
        lambda: cogvideox(image_rotary_emb=rotary(45, 16)),
    ),
    "HunyuanVideo 1.5": (
        made(
            "HunyuanVideo15Transformer3DModel",
            in_channels=9,
            out_channels=4,
            **HEADS,
            num_layers=2,
            num_refiner_layers=1,
            text_embed_dim=16,
            text_embed_2_dim=8,
            image_embed_dim=8,
            rope_axes_dim=(4, 4, 4),
        ),
        lambda: {
            "hidden_states": drawn(2, 9, 3, 3, 5),
            "encoder_hidden_states": drawn(2, 5, 16, seed=2),
            "encoder_attention_mask": padded(5, 5, 3),
            "encoder_hidden_states_2": drawn(2, 4, 8, seed=3),
            "encoder_attention_mask_2": padded(4, 4, 1),
            "image_embeds": drawn(2, 3, 8, seed=4),
            "timestep": torch.tensor([500.0, 500.0]),
        },
    ),
    "Mochi": (
        made(
            "MochiTransformer3DModel",
            **HEADS,
            num_layers=2,
            pooled_projection_dim=16,
            in_channels=4,
            text_embed_dim=16,
            time_embed_dim=8,
        ),
        lambda: video(encoder_attention_mask=padded(5, 5, 3).bool()),
    ),
    "Allegro": (
        made(
            "AllegroTransformer3DModel",
            num_attention_heads=2,
            attention_head_dim=18,
            num_layers=2,
            cross_attention_dim=36,
            caption_channels=16,
            sample_height=6,
            sample_width=10,
            sample_frames=3,
        ),
        lambda: video(
            attention_mask=(drawn(2, 3, 6, 10, seed=3) > -2).float(),
            encoder_attention_mask=padded(5, 5, 3),
            image_rotary_emb=allegro(),
        ),
    ),
    "Cosmos": (
        made("CosmosTransformer3DModel", **COSMOS),
        lambda: video(attention_mask=padded(5, 5, 3).bool()),
    ),
    "Cosmos, times of frames": (
        made("CosmosTransformer3DModel", **COSMOS),
        lambda: video(timestep=500 * torch.rand(2, 1, 3, 1, 1, generator=torch.Generator().manual_seed(5))),
    ),
    "EasyAnimate": (
        made(
            "EasyAnimateTransformer3DModel",
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4,
            out_channels=4,
            patch_size=2,
            num_layers=2,
            mmdit_layers=1,
            time_embed_dim=8,
            text_embed_dim=16,
        ),
        video,
    ),
    "Stable Audio": (
        made(
            "StableAudioDiTModel",
            **HEADS,
            sample_size=14,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            num_key_value_attention_heads=1,
            cross_attention_dim=12,
            time_proj_dim=8,
            global_states_input_dim=8,
            cross_attention_input_dim=16,
        ),
        lambda: {
            "hidden_states": drawn(2, 4, 14),
            "encoder_hidden_states": drawn(2, 5, 16, seed=2),
            "global_hidden_states": drawn(2, 1, 8, seed=3),
            "timestep": torch.tensor([0.5, 0.5]),
            "rotary_embedding": rotary(15, 6),
        },
    ),
}


def allegro() -> Any:
    """Cosines and sines by axis, and the places of the tokens: as Allegro's pipeline makes them."""
    places = torch.cartesian_prod(torch.arange(3), torch.arange(3), torch.arange(5)).T
    return tuple(rotary(5, 6) for _ in range(3)), tuple(places[:, None].contiguous())
