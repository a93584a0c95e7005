"""How transformers of diffusers are split over ranks: its own plans, what they lack, and plans of ours.

As tested with version 0.42.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from thinwire.types import InputError, require
from thinwire.uses.pictures.absent_block import AbsentBlock
from thinwire.uses.pictures.diffusers_names.more_plans import MORE_PLANS, TABLE, hunyuan
from thinwire.uses.pictures.diffusers_names.plan_entries import (
    ADDED,
    CONTROL,
    IDS,
    JOINED,
    PICTURE,
    ROTARY,
    TEXT,
    TOKENS,
    JoinOutput,
    MadePlan,
    Never,
    SplitInput,
    SplitPlan,
    Whole,
    entry_of,
    only,
)

FLUX = {"hidden_states": TOKENS, "encoder_hidden_states": TOKENS, "img_ids": IDS, "txt_ids": IDS}
CACHED = Never("keys of reference images that are kept from step to step are of one rank alone")

FORCED = Never("each frame has a time of its own")


def plan_of(model: nn.Module, given: SplitPlan | None = None) -> SplitPlan:
    """Return how a model is split: as ``given``, by a plan of ours, or by diffusers' own.

    Errors: ``InputError`` for a model without, and for a plan of modules that it has not.
    """
    kind, plan = type(model).__name__, given
    if plan is None:
        plan = getattr(model, "_cp_plan", None)
        made = entry_of(PLANS, model)
        plan = plan if made is None else made(model, plan or {})
    text = f"{kind} has no plan for how to split it (_cp_plan); give parallel one by plan=, or use mode "
    text += "guidance (two ranks) or batch, which leave it whole"
    require(isinstance(model, nn.Module) and isinstance(plan, Mapping), InputError, text)
    for path, entry in plan.items():  # type: ignore[union-attr]  # require has checked it
        text = f"the plan of {kind} says {entry!r:.40} of {path!r}; give inputs to split, or how it is joined"
        fits = isinstance(entry, Mapping | list | tuple | Whole) or hasattr(entry, "gather_dim")
        require(isinstance(path, str) and fits, InputError, text)
    return plan  # type: ignore[return-value]


def has_plan(model: nn.Module) -> bool:
    """Return whether a model can be split without a plan of the caller's."""
    return bool(getattr(model, "_cp_plan", None)) or entry_of(PLANS, model) is not None


def modules_of(model: nn.Module, path: str) -> list[nn.Module]:
    """Return the modules that a path of a plan names; a star stands for each of a list."""
    found = [model]
    for atom in filter(None, path.split(".")):
        parts = [dict(one.named_children()) for one in found if not isinstance(one, AbsentBlock)]
        text = f"the plan of {type(model).__name__} names {path!r}, which it has not"
        require(atom == "*" or all(atom in part for part in parts), InputError, text)
        found = [m for part in parts for m in (part.values() if atom == "*" else [part[atom]])]
    return found


def whole_of(model: nn.Module, plan: SplitPlan) -> set[nn.Module]:
    """Return the modules whose attention a plan leaves whole."""
    paths = [path for path, entry in plan.items() if isinstance(entry, Whole)]
    return {part for path in paths for one in modules_of(model, path) for part in one.modules()}


def _adding(more: SplitPlan) -> MadePlan:
    """Add to diffusers' plan what it leaves out."""

    def made(model: nn.Module, plan: SplitPlan) -> SplitPlan:
        whole = {**plan, **{path: {**plan.get(path, {}), **entries} for path, entries in more.items()}}
        ids = {name: IDS for name in ("img_ids", "txt_ids") if name in whole[""]}
        return {**whole, "": {**whole[""], **ids}}

    return made


def _helios(model: Any, plan: SplitPlan) -> SplitPlan:
    """Diffusers' own is for 40 blocks."""
    text = "HeliosTransformer3DModel scales keys of the history, which a share of the tokens cannot tell; "
    require(not model.config.is_amplify_history, InputError, f"{text}use mode guidance or batch")
    split = {path: entries for path, entries in plan.items() if isinstance(entries, Mapping)}
    parts = ("attn1", "attn2", "ffn")
    return {
        **split,
        **{f"blocks.{i}.{part}": JoinOutput() for i in range(len(model.blocks)) for part in parts},
    }


def _hunyuan_video(model: Any, plan: SplitPlan) -> SplitPlan:
    text = (
        "a HunyuanVideo that replaces the first frame's tokens cannot tell them in a share; use mode guidance"
    )
    replaces = model.config.image_condition_type == "token_replace"
    require(not replaces, InputError, f"{text} or batch")
    return hunyuan({"rope": TABLE})


def _ltx2() -> Iterator[tuple[str, Any]]:
    """Diffusers' own leaves out the sound."""
    root = dict[str, Any]()
    for stream in ("", "audio_"):
        root |= {f"{stream}hidden_states": TOKENS, f"{stream}encoder_hidden_states": TOKENS}
        root[f"{stream}encoder_attention_mask"] = SplitInput(1, 2)
        root[f"{stream}timestep"] = SplitInput(1, 2, (f"{stream}hidden_states",))
        yield f"{stream}proj_out", JoinOutput()
        for rope in (f"{stream}rope", f"cross_attn_{stream}rope"):
            yield rope, {0: IDS, 1: IDS}
    yield "", {**root, "video_keyframes_mask": TOKENS}


PLANS: dict[str | type, MadePlan] = {
    **MORE_PLANS,
    "FluxTransformer2DModel": _adding({"": CONTROL}),
    "Flux2Transformer2DModel": _adding({"": {"kv_cache_mode": CACHED}}),
    "QwenImageTransformer2DModel": _adding({"": {"controlnet_block_samples": ADDED}}),
    "LTXVideoTransformer3DModel": _adding({"": {"timestep": SplitInput(1, 2, PICTURE)}}),
    "LTX2VideoTransformer3DModel": only(dict(_ltx2())),
    "HeliosTransformer3DModel": _helios,
    "HunyuanVideoTransformer3DModel": _hunyuan_video,
    "BriaTransformer2DModel": only({"": {**FLUX, "controlnet_block_samples": ADDED}, **JOINED}),
    "SkyReelsV2Transformer3DModel": only(
        {
            "": {"enable_diffusion_forcing": FORCED},
            "rope": ROTARY,
            "blocks.0": {"hidden_states": TOKENS},
            "blocks.*.attn2": Whole(),
            **JOINED,
        }
    ),
    "ChromaTransformer2DModel": only(
        {"": {**FLUX, **CONTROL, "attention_mask": SplitInput(1, 2, TEXT + PICTURE)}, **JOINED}
    ),
    "LongCatImageTransformer2DModel": only({"": FLUX, **JOINED}),
    "OvisImageTransformer2DModel": only({"": FLUX, **JOINED}),
    "WanVACETransformer3DModel": only(
        {
            "rope": ROTARY,
            "vace_blocks.*": {"hidden_states": TOKENS},
            "vace_blocks.0": {"control_hidden_states": TOKENS},
            "blocks.0": {"hidden_states": TOKENS},
            **JOINED,
        }
    ),
}
