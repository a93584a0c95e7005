"""Tiny random transformers that have no plan for how to split them, and inputs for them."""

from __future__ import annotations

import torch

from bench.pictures.tiny import Host, drawn, made, padded

HEADS = {"num_attention_heads": 2, "attention_head_dim": 12}
TIMES = torch.tensor([500.0, 500.0])
SANA = {"in_channels": 4, "out_channels": 4, "num_layers": 2, "num_cross_attention_heads": 2, **HEADS}
SANA |= {"cross_attention_head_dim": 12, "cross_attention_dim": 24, "caption_channels": 16, "sample_size": 6}

FACTORS = {"short_factor": [1.0] * 6, "long_factor": [1.0] * 6}

WHOLE: dict[str, Host] = {
    "OmniGen": (
        made(
            "OmniGenTransformer2DModel",
            hidden_size=24,
            num_attention_heads=2,
            num_key_value_heads=2,
            intermediate_size=32,
            num_layers=2,
            pad_token_id=0,
            vocab_size=40,
            max_position_embeddings=64,
            original_max_position_embeddings=64,
            time_step_dim=16,
            pos_embed_max_size=12,
            rope_scaling=FACTORS,
        ),
        lambda: {
            "hidden_states": drawn(2, 4, 6, 10),
            "timestep": TIMES,
            "input_ids": torch.arange(10).reshape(2, 5),
            "input_img_latents": [],
            "input_image_sizes": {},
            "attention_mask": torch.ones(2, 21, 21),
            "position_ids": torch.arange(21).expand(2, -1),
        },
    ),
    "Qwen-Image 2.1": (
        made(
            "QwenImage21Transformer2DModel",
            in_channels=16,
            out_channels=16,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            context_in_dim=16,
            axes_dims_rope=(4, 6, 6),
        ),
        lambda: {
            "hidden_states": drawn(2, 16, 16),
            "encoder_hidden_states": drawn(2, 5, 16, seed=2),
            "encoder_hidden_states_mask": padded(5, 5, 3).bool(),
            "timestep": torch.tensor([0.5, 0.5]),
            "img_shapes": [[(1, 4, 4)]] * 2,
            "img_mask": torch.tensor([[False] * 5 + [True] * 4] * 2),
        },
    ),
    "Wan-Animate": (
        made(
            "WanAnimateTransformer3DModel",
            **HEADS,
            in_channels=12,
            latent_channels=4,
            out_channels=4,
            text_dim=16,
            freq_dim=32,
            ffn_dim=32,
            num_layers=2,
            image_dim=8,
            added_kv_proj_dim=24,
            rope_max_seq_len=32,
            motion_encoder_channel_sizes={"4": 4, "8": 4, "16": 4},
            motion_encoder_size=16,
            motion_style_dim=8,
            motion_dim=4,
            motion_encoder_dim=8,
            face_encoder_hidden_dim=8,
            face_encoder_num_heads=2,
            inject_face_latents_blocks=2,
        ),
        lambda: {
            "hidden_states": drawn(2, 12, 3, 6, 10),
            "timestep": TIMES,
            "encoder_hidden_states": drawn(2, 5, 16, seed=2),
            "encoder_hidden_states_image": drawn(2, 3, 8, seed=3),
            "pose_hidden_states": drawn(2, 4, 2, 6, 10, seed=4),
            "face_pixel_values": drawn(2, 3, 8, 16, 16, seed=5),
        },
    ),
    "Latte": (
        made(
            "LatteTransformer3DModel",
            **HEADS,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            cross_attention_dim=24,
            sample_size=6,
            patch_size=2,
            norm_type="ada_norm_single",
            num_embeds_ada_norm=1000,
            caption_channels=16,
            video_length=3,
        ),
        lambda: {
            "hidden_states": drawn(2, 4, 3, 6, 6),
            "encoder_hidden_states": drawn(2, 5, 16, seed=2),
            "timestep": TIMES,
        },
    ),
    "Sana": (
        made("SanaTransformer2DModel", **SANA),
        lambda: {
            "hidden_states": drawn(2, 4, 6, 6),
            "encoder_hidden_states": drawn(2, 5, 16, seed=2),
            "encoder_attention_mask": padded(5, 5, 3),
            "timestep": TIMES,
        },
    ),
    "Sana-Video": (
        made("SanaVideoTransformer3DModel", **SANA, rope_max_seq_len=32),
        lambda: {
            "hidden_states": drawn(2, 4, 3, 6, 10),
            "encoder_hidden_states": drawn(2, 5, 16, seed=2),
            "encoder_attention_mask": padded(5, 5, 3),
            "timestep": TIMES,
        },
    ),
    "Bria FIBO": (
        made(
            "BriaFiboTransformer2DModel",
            **HEADS,
            in_channels=8,
            num_layers=1,
            num_single_layers=1,
            joint_attention_dim=16,
            axes_dims_rope=[4, 4, 4],
            text_encoder_dim=8,
        ),
        lambda: {
            "hidden_states": drawn(2, 13, 8),
            "encoder_hidden_states": drawn(2, 5, 16, seed=2),
            "text_encoder_layers": [drawn(2, 5, 8, seed=3), drawn(2, 5, 8, seed=4)],
            "timestep": TIMES,
            "img_ids": drawn(13, 3, seed=5),
            "txt_ids": drawn(5, 3, seed=6),
        },
    ),
    "Ideogram 4": (
        made(
            "Ideogram4Transformer2DModel",
            **HEADS,
            in_channels=8,
            num_layers=2,
            intermediate_size=32,
            adaln_dim=8,
            llm_features_dim=16,
            mrope_section=(2, 2, 2),
        ),
        lambda: {
            "hidden_states": drawn(2, 18, 8),
            "encoder_hidden_states": drawn(2, 18, 16, seed=2),
            "timestep": torch.tensor([0.5, 0.5]),
            "position_ids": torch.arange(18)[None, :, None].expand(2, -1, 3),
            "segment_ids": torch.ones(2, 18, dtype=torch.long),
            "indicator": torch.tensor([[3] * 5 + [2] * 13] * 2),
        },
    ),
    "ACE-Step": (
        made(
            "AceStepTransformer1DModel",
            hidden_size=24,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=12,
            in_channels=12,
            audio_acoustic_hidden_dim=4,
            sliding_window=4,
        ),
        lambda: {
            "hidden_states": drawn(2, 14, 4),
            "context_latents": drawn(2, 14, 8, seed=2),
            "encoder_hidden_states": drawn(2, 5, 24, seed=3),
            "timestep": torch.tensor([0.5, 0.5]),
            "timestep_r": torch.tensor([0.5, 0.5]),
        },
    ),
    "Prior": (
        made("PriorTransformer", **HEADS, num_layers=2, embedding_dim=16, num_embeddings=5),
        lambda: {
            "hidden_states": drawn(2, 16),
            "proj_embedding": drawn(2, 16, seed=2),
            "encoder_hidden_states": drawn(2, 5, 16, seed=3),
            "attention_mask": padded(5, 5, 3).bool(),
            "timestep": TIMES,
        },
    ),
    "aMUSEd": (
        made(
            "UVit2DModel",
            hidden_size=24,
            cond_embed_dim=8,
            micro_cond_encode_dim=4,
            micro_cond_embed_dim=20,
            encoder_hidden_size=16,
            vocab_size=33,
            codebook_size=32,
            in_channels=24,
            block_out_channels=24,
            num_res_blocks=1,
            block_num_heads=2,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            sample_size=6,
        ),
        lambda: {
            "input_ids": torch.arange(72).reshape(2, 6, 6) % 33,
            "encoder_hidden_states": drawn(2, 5, 16, seed=2),
            "pooled_text_emb": drawn(2, 8, seed=3),
            "micro_conds": drawn(2, 5, seed=4),
        },
    ),
}
