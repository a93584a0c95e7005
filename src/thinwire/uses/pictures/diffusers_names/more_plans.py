"""Plans of ours for transformers of diffusers that have none, as tested with version 0.42.1."""

from __future__ import annotations

from typing import Any

from thinwire.uses.pictures.diffusers_names.plan_entries import (
    ADDED,
    IDS,
    JOINED,
    PICTURE,
    TEXT,
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


def last(path: str, blocks: Any, *outputs: JoinOutput | None) -> SplitPlan:
    """Return what joins the output of the last block, for a model that takes tokens off behind it."""
    return {f"{path}.{len(blocks) - 1}": list(outputs) or JoinOutput()}


def one_stream(path: str, name: str, every: dict[str, Any], **more: Any) -> MadePlan:
    """Return the plan for blocks of one stream, ``name``, which is joined behind the last one."""

    def made(model: Any, _: SplitPlan) -> SplitPlan:
        split = {f"{path}.*": every, f"{path}.0": {name: TOKENS}}
        return {**split, **last(path, getattr(model, path)), **more}

    return made


def hunyuan(rope: SplitPlan) -> SplitPlan:
    """Return the plan for blocks of two streams, then of one, whose mask is of the picture and the text."""
    return {
        "context_embedder": Whole(),
        **rope,
        "transformer_blocks.*": MASKED,  # after the tokens: of one module's hooks the last one begins
        "transformer_blocks.0": STREAMS,
        "single_transformer_blocks.*": MASKED,
        **JOINED,
    }


def _framepack(model: Any, _: SplitPlan) -> SplitPlan:
    """The tokens of earlier frames are taken off behind the last block."""
    plan = dict(hunyuan({}))
    del plan["proj_out"]
    for path, name in (
        ("transformer_blocks", "freqs_cis"),
        ("single_transformer_blocks", "image_rotary_emb"),
    ):
        plan[f"{path}.*"] = {**MASKED, name: SplitInput(0, 2)}
    singles = model.single_transformer_blocks
    return {**plan, **last("single_transformer_blocks", singles, JoinOutput(), None)}


def _motif(model: Any, _: SplitPlan) -> SplitPlan:
    """Its decoder, the last single blocks, begins with the tokens as they were before all blocks."""
    plan = dict(hunyuan({"rope": TABLE, "": {"image_embeds": MOTIF}}))
    del plan["context_embedder"]
    decoder = len(model.single_transformer_blocks) - model.num_decoder_layers
    more = {f"single_transformer_blocks.{decoder}": {"hidden_states": SplitInput(1, 3, name="decoded")}}
    return {**plan, **(more if model.num_decoder_layers else {})}


def _fibo2(model: Any, plan: SplitPlan) -> SplitPlan:
    """Some of its blocks attend to a text, which is whole."""
    numbered = enumerate(model.layers)
    crossed = [i for i, block in numbered if getattr(block, "cross_attention", None) is not None]
    paths = ("noise_refiner", "perceiver", *(f"layers.{i}.cross_attention" for i in crossed))
    every = {"attn_mask": MASK, "freqs_cis": SplitInput(1), "noise_mask": MASK}
    return one_stream("layers", "x", every, **dict.fromkeys(paths, Whole()))(model, plan)


def _kandinsky6(model: Any, _: SplitPlan) -> SplitPlan:
    """Picture and sound, each of which attends to a text of its own that is whole, and to the other."""
    path = "visual_transformer_blocks"
    texts = [f"{which}_text_transformer_blocks" for which in ("video", "audio")]
    texts += [f"{path}.*.{which}_dec_block.cross_attention" for which in ("video", "audio")]
    return {
        **dict.fromkeys(texts, Whole()),
        f"{path}.*": {"vis_rope": SplitInput(0), "aud_rope": SplitInput(0)},
        f"{path}.0": {"vis": TOKENS, "aud": TOKENS},
        **last(path, model.visual_transformer_blocks, JoinOutput(), JoinOutput()),
    }


MASKED = {"attention_mask": SplitInput(-1, 4, PICTURE + TEXT)}
MOTIF = Never("a share of the text cannot tell which of it is the picture's")
SPARSE = Never("its attention looks at blocks of the picture alone")
KEPT = Never("keys of the picture to edit are kept", lambda cache: cache.mode in ("write", "read"))
BESIDE = SplitInput(1, 3, PICTURE)
TIMED = {"embedded_timestep": BESIDE, "temb": BESIDE}  # where each frame has a time of its own
PROPORTIONAL = Never("its attention is scaled by how many tokens there are; pass proportional_attn=False")

MORE_PLANS: dict[str | type, MadePlan] = {
    "SD3Transformer2DModel": only({"": {"block_controlnet_hidden_states": ADDED}, **joint()}),
    "AuraFlowTransformer2DModel": _aura_flow,
    "CogVideoXTransformer3DModel": only(joint(every={"image_rotary_emb": IDS})),
    "ConsisIDTransformer3DModel": only(joint(every={"image_rotary_emb": IDS})),
    "PRXTransformer2DModel": only(
        {
            "blocks.*": {"image_rotary_emb": SplitInput(2)},
            "blocks.0": {"hidden_states": TOKENS},
            "final_layer": JoinOutput(),
        }
    ),
    "CogView3PlusTransformer2DModel": only(joint()),
    "CogView4Transformer2DModel": only(joint(every={"image_rotary_emb": IDS, "attention_mask": MASK})),
    "EasyAnimateTransformer3DModel": only(joint(every={"image_rotary_emb": IDS})),
    "HunyuanVideo15Transformer3DModel": only(
        joint(every={"attention_mask": MASK}, context_embedder=Whole(), rope=TABLE)
    ),
    "HunyuanImageTransformer2DModel": only(hunyuan({"rope": TABLE})),
    "HunyuanVideoFramepackTransformer3DModel": _framepack,
    "MotifVideoTransformer3DModel": _motif,
    "GlmImageTransformer2DModel": only(
        joint(every={"image_rotary_emb": IDS, "attention_mask": MASK, "kv_cache": KEPT})
    ),
    "JoyImageEditTransformer3DModel": only(joint("double_blocks", {"image_rotary_emb": IDS})),
    "JoyImageEditPlusTransformer3DModel": only(joint("double_blocks", {"image_rotary_emb": IDS, **MASKED})),
    "Kandinsky5Transformer3DModel": one_stream(
        "visual_transformer_blocks",
        "visual_embed",
        {"rope": SplitInput(1), "sparse_params": SPARSE},
        **{"text_transformer_blocks": Whole(), "visual_transformer_blocks.*.cross_attention": Whole()},
    ),
    "Kandinsky6Transformer3DModel": _kandinsky6,
    "BriaFibo2Transformer2DModel": _fibo2,
    "Krea2Transformer2DModel": one_stream(
        "transformer_blocks",
        "hidden_states",
        {"image_rotary_emb": IDS, "attention_mask": SplitInput(-1, 4)},
        text_fusion=Whole(),
    ),
    "AnyFlowTransformer3DModel": one_stream(
        "blocks",
        "hidden_states",
        {"rotary_emb": IDS, "temb": SplitInput(1, 4)},
        **{"blocks.*.attn2": Whole()},
    ),
    "StableAudio3DiTModel": one_stream(
        "transformer_blocks",
        "hidden_states",
        {"rope": IDS, "local_seq": Never("a share cannot tell the tokens of memory, which it passes by")},
        **{"transformer_blocks.*.cross_attn": Whole()},
    ),
    "ErnieImageTransformer2DModel": only(  # [tokens, B, width]
        {
            "layers.*": {
                "rotary_pos_emb": SplitInput(1),
                "temb": SplitInput(0, 3, ("x",)),
                "attention_mask": SplitInput(-1, 4),
            },
            "layers.0": {"x": SplitInput(0, 3)},
            "final_linear": JoinOutput(0),
        }
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
