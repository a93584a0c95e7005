"""Plans of ours for transformers of diffusers that have none, as tested with version 0.42.1."""

from __future__ import annotations

from typing import Any

from thinwire.uses.pictures.diffusers_names.plan_entries import (
    ADDED,
    IDS,
    JOINED,
    PICTURE,
    TOKENS,
    JoinOutput,
    MadePlan,
    Never,
    SplitInput,
    SplitPlan,
    Whole,
    only,
)

STREAMS = {"hidden_states": TOKENS, "encoder_hidden_states": TOKENS}
MASK = SplitInput(1, 2)
TABLE = {0: SplitInput(0, 2), 1: SplitInput(0, 2)}  # of cosines and sines by token


def joint(blocks: str = "transformer_blocks", every: dict[str, Any] | None = None, **more: Any) -> SplitPlan:
    """Return the plan for blocks that take picture and text as two streams, both split at the first one."""
    return {f"{blocks}.*": every or {}, f"{blocks}.0": STREAMS, **JOINED, **more}


def crossed(every: dict[str, Any] | None = None, **more: Any) -> SplitPlan:
    """Return the plan for blocks whose picture attends to itself (attn1) and to a whole text (attn2)."""
    blocks = "transformer_blocks"
    first = {f"{blocks}.*": every or {}, f"{blocks}.0": {"hidden_states": TOKENS}}
    return {**first, f"{blocks}.*.attn2": Whole(), **JOINED, **more}


def _aura_flow(model: Any, _: SplitPlan) -> SplitPlan:
    """Without joint blocks its first single block gets text and picture in one."""
    if len(model.joint_transformer_blocks):
        return {"joint_transformer_blocks.0": STREAMS, **JOINED}
    return {"single_transformer_blocks.0": {"hidden_states": TOKENS}, **JOINED}


BESIDE = SplitInput(1, 3, PICTURE)
TIMED = {"embedded_timestep": BESIDE, "temb": BESIDE}  # where each frame has a time of its own
PROPORTIONAL = Never("its attention is scaled by how many tokens there are; pass proportional_attn=False")

MORE_PLANS: dict[str, MadePlan] = {
    "SD3Transformer2DModel": only({"": {"block_controlnet_hidden_states": ADDED}, **joint()}),
    "AuraFlowTransformer2DModel": _aura_flow,
    "CogVideoXTransformer3DModel": only(joint(every={"image_rotary_emb": IDS})),
    "CogView3PlusTransformer2DModel": only(joint()),
    "CogView4Transformer2DModel": only(joint(every={"image_rotary_emb": IDS, "attention_mask": MASK})),
    "EasyAnimateTransformer3DModel": only(joint(every={"image_rotary_emb": IDS})),
    "HunyuanVideo15Transformer3DModel": only(
        joint(every={"attention_mask": MASK}, context_embedder=Whole(), rope=TABLE)
    ),
    "MochiTransformer3DModel": only(
        {
            "transformer_blocks.*": {"image_rotary_emb": SplitInput(0, 3, PICTURE)},
            "transformer_blocks.0": {"hidden_states": TOKENS},
            **JOINED,
        }
    ),
    "AllegroTransformer3DModel": only(
        crossed(every={"image_rotary_emb": (None, MASK), "attention_mask": SplitInput(-1, 3)})
    ),
    "CosmosTransformer3DModel": only(
        {
            "": {"block_controlnet_hidden_states": ADDED},
            **crossed(every=TIMED | {"extra_pos_emb": BESIDE}, rope=TABLE, norm_out=TIMED),
        }
    ),
    "PixArtTransformer2DModel": only(crossed(every={"attention_mask": SplitInput(-1, 3)})),
    "DiTTransformer2DModel": only(
        {"transformer_blocks.0": {"hidden_states": TOKENS}, "proj_out_2": JoinOutput()}
    ),
    "HunyuanDiT2DModel": only(
        {
            "": {"image_rotary_emb": IDS, "controlnet_block_samples": ADDED},
            "blocks.0": {"hidden_states": TOKENS},
            "blocks.*.attn2": Whole(),
            **JOINED,
        }
    ),
    "LuminaNextDiT2DModel": only(
        {
            "patch_embedder": {0: TOKENS, 1: MASK, 3: SplitInput(-2)},
            "layers.*.attn1": {"base_sequence_length": PROPORTIONAL},
            "layers.*.attn2": Whole(),
            "norm_out": JoinOutput(),
        }
    ),
    "Lumina2Transformer2DModel": only(
        {
            "context_refiner": Whole(),
            "noise_refiner": Whole(),
            "layers.*": {"attention_mask": MASK, "image_rotary_emb": SplitInput(1)},
            "layers.0": {"hidden_states": TOKENS},
            "norm_out": JoinOutput(),
        }
    ),
    "ZImageTransformer2DModel": only(
        {
            "context_refiner": Whole(),
            "noise_refiner": Whole(),
            "layers.*": {"attn_mask": MASK, "freqs_cis": SplitInput(1), "noise_mask": MASK},
            "layers.0": {"x": TOKENS},
            "all_final_layer.*": JoinOutput(),
        }
    ),
    "StableAudioDiTModel": only(
        crossed(every={"rotary_embedding": IDS, "attention_mask": MASK}),
    ),
}
