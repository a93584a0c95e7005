"""How models of ComfyUI are cut: an entry a class, by names of its own.

Read in ComfyUI's ``comfy/ldm/wan/model.py`` of commit 56bf4365, ``comfy/ldm/modules/attention.py`` of
05080f60, ``comfy/samplers.py`` of 311c0140, and ``comfy/ldm/flux/model.py`` of that year; the models of Qwen,
HunyuanVideo and LTXV in 0.3.64 and a fork of 0.8.0. All were run by hand with both; the tests have classes
that are written after these files.

Blocks change their inputs in place. So no output before them may be kept for later patches (``once``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from thinwire.uses.pictures.diffusers_names.pipe_plans import BlockList, PipePlan
from thinwire.uses.pictures.diffusers_names.plans import TOKENS, JoinOutput, SplitInput, SplitPlan

OPTIONS = "transformer_options"


@dataclass(frozen=True)
class ComfyFamily:
    """A class of ComfyUI: how it is split, the modules whose attention is over the split tokens, and more.

    ``takes``: what modules must take, by path. ``pipe``: how its blocks are cut. ``never``: inputs that do
    not go with shares, and what they are; ``plain``: inputs of modules with attention which do not.
    """

    split: SplitPlan
    attention: tuple[str, ...]
    takes: Mapping[str, tuple[str, ...]]
    pipe: PipePlan
    never: Mapping[str, str] = field(default_factory=dict)
    plain: tuple[str, ...] = ()


def _frames(model: Any, inputs: Mapping[str, Any]) -> int:
    """Return in how many frames the tokens of a video are."""
    size = getattr(model, "patch_size", (1,))
    x = inputs["x"]
    return int(x.shape[2] // (size[0] if isinstance(size, list | tuple) else 1)) if x.dim() == 5 else 0


def _both(dim: int, first: str, second: str) -> SplitInput:
    """Split what is of the text and the picture, in their order."""
    return SplitInput(dim, 6, (first, second))


_BESIDE, _WORDS = ("txt",), ("context",)
_DOUBLE, _SINGLE = BlockList("double_blocks", ("img", "txt")), BlockList("single_blocks", "x")
_DOUBLE_TAKES = {"double_blocks.0": ("img", "txt", "pe", OPTIONS), "single_blocks.0": ("x", "pe", OPTIONS)}
_FIRST_TEXT, _FIRST_PICTURE = {"pe": _both(2, "txt", "img")}, {"pe": _both(2, "img", "txt")}
_CONTROL = {"control": "a control network's"}
_PLAIN = ("attn_mask", "modulation_dims", "modulation_dims_img", "modulation_dims_txt")
_QWEN_TEXT, _QWEN = "encoder_hidden_states", "hidden_states"
FAMILIES: dict[str, ComfyFamily] = {
    "WanModel": ComfyFamily(
        {"blocks.*": {"freqs": SplitInput(1, 6)}, "blocks.0": {"x": TOKENS}, "head": JoinOutput()},
        ("blocks.*.self_attn",),
        {"blocks.0": ("x", "freqs", OPTIONS), "blocks.0.self_attn": (OPTIONS,), "head": ("x",)},
        PipePlan((BlockList("blocks", "x"),), frames=_frames),
    ),
    "Flux": ComfyFamily(
        {
            "double_blocks.*": _FIRST_TEXT,  # after the tokens: of one module's hooks the last one begins
            "double_blocks.0": {"txt": TOKENS, "img": TOKENS},
            "single_blocks.*": _FIRST_TEXT,
            "final_layer": JoinOutput(),
        },
        ("double_blocks.*", "single_blocks.*"),
        _DOUBLE_TAKES,
        PipePlan((_DOUBLE, _SINGLE), more={"double_blocks.0": {"txt": None}}, beside=_BESIDE, words=_WORDS),
        never={**_CONTROL, "attention_mask": "a mask"},
        plain=_PLAIN,
    ),
    "QwenImageTransformer2DModel": ComfyFamily(
        {
            "transformer_blocks.*": {"image_rotary_emb": _both(1, _QWEN_TEXT, _QWEN)},  # as in 0.3
            "transformer_blocks.*.attn": {"image_rotary_emb": _both(2, _QWEN_TEXT, _QWEN)},  # as later
            "transformer_blocks.0": {_QWEN_TEXT: TOKENS, _QWEN: TOKENS},
            "proj_out": JoinOutput(),
        },
        ("transformer_blocks.*",),
        {
            "transformer_blocks.0": (_QWEN, _QWEN_TEXT, "image_rotary_emb", OPTIONS),
            "transformer_blocks.0.attn": ("image_rotary_emb", OPTIONS),
        },
        PipePlan((BlockList("transformer_blocks", (_QWEN_TEXT, _QWEN)),), words=_WORDS),
        never=_CONTROL,
        plain=("timestep_zero_index",),
    ),
    "HunyuanVideo": ComfyFamily(
        {
            "img_in": {0: SplitInput(1, 3, name="img")},  # it looks how many these are before its blocks
            "txt_in": {0: SplitInput(1, 3, name="txt")},
            "double_blocks.*": _FIRST_PICTURE,
            "single_blocks.*": _FIRST_PICTURE,
            "final_layer": JoinOutput(),
        },
        ("double_blocks.*", "single_blocks.*"),
        _DOUBLE_TAKES,
        PipePlan(
            (_DOUBLE, _SINGLE),
            more={"txt_in": {0: None}},
            beside=_BESIDE,
            words=_WORDS,
            text_after=True,
            frames=_frames,
        ),
        never={
            **_CONTROL,
            "attention_mask": "a mask",
            "guiding_frame_index": "a first frame",
            "ref_latent": "a reference picture",
            "txt_byt5": "text to be drawn",
            "clip_fea": "a picture's embedding",
        },
        plain=_PLAIN,
    ),
    "LTXVModel": ComfyFamily(
        {
            "transformer_blocks.*": {"pe": SplitInput(1, 3, ("x",))},
            "transformer_blocks.0": {"x": TOKENS},
            "proj_out": JoinOutput(),
        },
        ("transformer_blocks.*.attn1",),
        {"transformer_blocks.0": ("x", "pe", OPTIONS), "transformer_blocks.0.attn1": ("pe", OPTIONS)},
        PipePlan((BlockList("transformer_blocks", "x"),), frames=_frames),
    ),
}
