"""More tiny random transformers of pictures and video, and inputs for them."""

from __future__ import annotations

from typing import Any

import torch

from bench.pictures.tiny import Host, Inputs, drawn, made, padded

HEADS = {"num_attention_heads": 2, "attention_head_dim": 12}
TIMES = torch.tensor([500.0, 500.0])
HUNYUAN = {"in_channels": 4, "out_channels": 4, "num_layers": 2, "num_single_layers": 2, **HEADS}
HUNYUAN |= {"num_refiner_layers": 1, "text_embed_dim": 16}
JOY = {"in_channels": 4, "hidden_size": 24, "num_attention_heads": 2, "text_dim": 16, "num_layers": 2}
JOY |= {"rope_dim_list": [4, 4, 4]}
MOTIF = {name: size for name, size in HUNYUAN.items() if name != "num_refiner_layers"}
MOTIF |= {"num_single_layers": 3, "rope_axes_dim": (4, 4, 4)}


def texts(tokens: int = 5, **more: Any) -> Inputs:
    return {"encoder_hidden_states": drawn(2, tokens, 16, seed=2), "timestep": TIMES, **more}


def framepack() -> Inputs:
    """A part of a video, and what came before it at three scales."""
    return texts(
        hidden_states=drawn(2, 4, 3, 4, 8),
        encoder_attention_mask=padded(5, 5, 3),
        pooled_projections=drawn(2, 8, seed=3),
        image_embeds=drawn(2, 3, 8, seed=4),
        indices_latents=torch.arange(20, 23),
        guidance=torch.ones(2),
        latents_clean=drawn(2, 4, 2, 4, 8, seed=5),
        indices_latents_clean=torch.tensor([0, 19]),
        latents_history_2x=drawn(2, 4, 2, 4, 8, seed=6),
        indices_latents_history_2x=torch.arange(17, 19),
        latents_history_4x=drawn(2, 4, 16, 4, 8, seed=7),
        indices_latents_history_4x=torch.arange(1, 17),
    )


def kandinsky6(**more: Any) -> Inputs:
    """Frames with their channels last."""
    return texts(hidden_states=drawn(2, 3, 6, 10, 4), pooled_projections=drawn(2, 8, seed=3), **more)


KANDINSKY6 = made(
    "Kandinsky6Transformer3DModel",
    in_visual_dim=4,
    out_visual_dim=4,
    visual_cond=False,
    in_audio_dim=8,
    out_audio_dim=8,
    in_text_dim=16,
    in_text_dim2=8,
    time_dim=8,
    model_dim=24,
    ff_dim=32,
    num_text_blocks=1,
    num_visual_blocks=2,
    axes_dims=(4, 4, 4),
)
MORE: dict[str, Host] = {
    "Kandinsky 6": (KANDINSKY6, lambda: kandinsky6(audio_hidden_states=drawn(2, 7, 8, seed=4))),
    "Kandinsky 6, no sound": (KANDINSKY6, kandinsky6),
    "Bria FIBO 2": (
        made(
            "BriaFibo2Transformer2DModel",
            in_channels=4,
            dim=24,
            n_layers=3,
            n_refiner_layers=1,
            n_heads=2,
            cap_feat_dim=16,
            injection_layer_ids=(1,),
            perceiver_num_layers=1,
            min_num_gist_tokens=2,
            max_num_gist_tokens=4,
            gist_step=1,
            gist_min_text_len=2,
            gist_max_text_len=8,
            axes_dims=(4, 4, 4),
            axes_lens=(32, 32, 32),
        ),
        lambda: {
            "hidden_states": drawn(2, 4, 6, 10),
            "timestep": torch.tensor([0.5, 0.5]),
            "encoder_hidden_states": drawn(2, 2, 5, 16, seed=2),
            "encoder_attention_mask": padded(5, 5, 3).bool(),
        },
    ),
    "HunyuanImage": (
        made("HunyuanImageTransformer2DModel", **HUNYUAN, rope_axes_dim=(6, 6), text_embed_2_dim=8),
        lambda: texts(
            hidden_states=drawn(2, 4, 3, 5),
            encoder_attention_mask=padded(5, 5, 3),
            encoder_hidden_states_2=drawn(2, 4, 8, seed=3),
            encoder_attention_mask_2=padded(4, 4, 1),
        ),
    ),
    "HunyuanVideo Framepack": (
        made(
            "HunyuanVideoFramepackTransformer3DModel",
            **HUNYUAN,
            pooled_projection_dim=8,
            rope_axes_dim=(4, 4, 4),
            has_image_proj=True,
            image_proj_dim=8,
            has_clean_x_embedder=True,
        ),
        framepack,
    ),
    "Kandinsky 5": (
        made(
            "Kandinsky5Transformer3DModel",
            in_text_dim=16,
            in_text_dim2=8,
            time_dim=8,
            model_dim=24,
            ff_dim=32,
            num_text_blocks=1,
            num_visual_blocks=2,
            axes_dims=(4, 4, 4),
        ),
        lambda: texts(
            hidden_states=drawn(2, 3, 6, 10, 4),
            pooled_projections=drawn(2, 8, seed=3),
            visual_rope_pos=[torch.arange(n) for n in (3, 3, 5)],
            text_rope_pos=torch.arange(5),
        ),
    ),
    "Krea 2": (
        made(
            "Krea2Transformer2DModel",
            in_channels=8,
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=12,
            num_key_value_heads=1,
            intermediate_size=32,
            timestep_embed_dim=16,
            text_hidden_dim=16,
            num_text_layers=2,
            text_num_attention_heads=2,
            text_num_key_value_heads=2,
            text_intermediate_size=16,
            num_layerwise_text_blocks=1,
            num_refiner_text_blocks=1,
            axes_dims_rope=(4, 4, 4),
        ),
        lambda: {
            "hidden_states": drawn(2, 15, 8),
            "encoder_hidden_states": drawn(2, 5, 2, 16, seed=2),
            "timestep": torch.tensor([0.5, 0.5]),
            "position_ids": torch.cartesian_prod(torch.arange(1), torch.arange(4), torch.arange(5)).float(),
            "encoder_attention_mask": padded(5, 5, 3).bool(),
        },
    ),
    "GLM-Image": (
        made(
            "GlmImageTransformer2DModel",
            **HEADS,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            text_embed_dim=16,
            time_embed_dim=8,
            condition_dim=4,
            prior_vq_quantizer_codebook_size=32,
        ),
        lambda: texts(
            hidden_states=drawn(2, 4, 6, 10),
            prior_token_id=torch.arange(30).reshape(2, 15),
            prior_token_drop=torch.zeros(2, 15, dtype=torch.bool),
            target_size=torch.tensor([[24, 40]] * 2),
            crop_coords=torch.zeros(2, 2),
        ),
    ),
    "JoyImage-Edit": (
        made("JoyImageEditTransformer3DModel", **JOY),
        lambda: texts(hidden_states=drawn(2, 4, 1, 6, 10)),
    ),
    "JoyImage-Edit-Plus": (
        made("JoyImageEditPlusTransformer3DModel", **JOY),
        lambda: texts(
            hidden_states=drawn(2, 15, 4, 1, 2, 2),
            encoder_hidden_states_mask=padded(5, 5, 3),
            shape_list=[[(1, 3, 5)], [(1, 2, 2), (1, 3, 2)]],
        ),
    ),
    "Motif-Video": (
        made("MotifVideoTransformer3DModel", **MOTIF, num_decoder_layers=1),
        lambda: texts(hidden_states=drawn(2, 4, 3, 6, 10), encoder_attention_mask=padded(5, 5, 3)),
    ),
    "Motif-Video, cross-attention": (
        made(
            "MotifVideoTransformer3DModel",
            **MOTIF,
            enable_text_cross_attention_dual=True,
            enable_text_cross_attention_single=True,
        ),
        lambda: texts(hidden_states=drawn(2, 4, 3, 6, 10), encoder_attention_mask=padded(5, 5, 3)),
    ),
    "AnyFlow": (
        made(
            "AnyFlowTransformer3DModel",
            **HEADS,
            in_channels=4,
            out_channels=4,
            text_dim=16,
            freq_dim=32,
            ffn_dim=32,
            num_layers=2,
            rope_max_seq_len=32,
        ),
        lambda: texts(
            hidden_states=drawn(2, 3, 4, 6, 10),
            timestep=torch.full((2, 3), 500.0),
            r_timestep=torch.full((2, 3), 400.0),
        ),
    ),
    "Stable Audio 3": (
        made(
            "StableAudio3DiTModel",
            io_channels=4,
            embed_dim=128,
            depth=2,
            num_heads=2,
            cond_token_dim=16,
            global_cond_dim=8,
            timestep_features_dim=16,
            num_memory_tokens=3,
        ),
        lambda: texts(
            hidden_states=drawn(2, 4, 14),
            global_hidden_states=drawn(2, 8, seed=3),
            timestep=torch.tensor([0.5, 0.5]),
            encoder_attention_mask=padded(5, 5, 3),
        ),
    ),
    "PRX": (
        made(
            "PRXTransformer2DModel",
            in_channels=4,
            context_in_dim=16,
            hidden_size=24,
            mlp_ratio=2.0,
            num_heads=2,
            depth=2,
            axes_dim=(6, 6),
        ),
        lambda: texts(
            hidden_states=drawn(2, 4, 6, 10),
            timestep=torch.tensor([0.5, 0.5]),
            attention_mask=padded(5, 5, 3),
        ),
    ),
    "ERNIE-Image": (
        made(
            "ErnieImageTransformer2DModel",
            hidden_size=24,
            num_attention_heads=2,
            num_layers=2,
            ffn_hidden_size=32,
            in_channels=4,
            out_channels=4,
            text_in_dim=16,
            rope_axes_dim=(4, 4, 4),
        ),
        lambda: {
            "hidden_states": drawn(2, 4, 3, 5),
            "timestep": TIMES,
            "text_bth": drawn(2, 5, 16, seed=2),
            "text_lens": torch.tensor([5, 3]),
        },
    ),
}
