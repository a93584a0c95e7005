"""Tiny random transformers that have no plan for how to split them, and inputs for them."""

from __future__ import annotations

import torch

from bench.pictures.tiny import Host, drawn, made, padded

HEADS = {"num_attention_heads": 2, "attention_head_dim": 12}
TIMES = torch.tensor([500.0, 500.0])
SANA = {"in_channels": 4, "out_channels": 4, "num_layers": 2, "num_cross_attention_heads": 2, **HEADS}
SANA |= {"cross_attention_head_dim": 12, "cross_attention_dim": 24, "caption_channels": 16, "sample_size": 6}

WHOLE: dict[str, Host] = {
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
