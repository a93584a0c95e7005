"""Where transformers of diffusers can be cut between blocks: one entry a family, by names of its own.

An entry says which lists of blocks a model runs one after the other, and what a block returns, by the names
of the inputs that its next one takes. How the tokens of a patch are cut is the plan of ``plans.py``, without
the text: that is computed with every patch. As tested with version 0.42.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import nn

from thinwire.types import InputError, require
from thinwire.uses.pictures.diffusers_names.plan_entries import SharedOutput, entry_of
from thinwire.uses.pictures.diffusers_names.plans import (
    SplitInput,
    SplitPlan,
    Whole,
    has_plan,
    modules_of,
    plan_of,
)

HIDDEN, TEXT, SOUND = "hidden_states", "encoder_hidden_states", "audio_hidden_states"
_TEXTS = {"text", TEXT, "txt_ids", "encoder_attention_mask", "encoder_hidden_states_mask", "attention_mask"}


@dataclass(frozen=True)
class BlockList:
    """A list of blocks by its path, and what each returns: names of inputs, or one name."""

    path: str
    returns: tuple[str, ...] | str


@dataclass(frozen=True)
class PipePlan:
    """How the blocks and tokens of a family are cut.

    ``more``: what is added to how tokens are cut, or None for what is not cut. ``beside``: streams that go
    whole with each patch; ``words``: the inputs of these, where they have other names. ``everywhere``: blocks
    beside the lists, which each rank runs. ``once``: modules before the blocks whose output all patches of a
    step have in common.
    ``text_after``: whether attention has the text's keys behind the picture's. ``never``: inputs that do not
    go with patches. ``frames``: in how many frames a call's tokens are. ``divided``: whether a rank can do
    without the weights of others' blocks.
    """

    lists: tuple[BlockList, ...]
    more: SplitPlan = field(default_factory=dict)
    beside: tuple[str, ...] = (TEXT,)
    words: tuple[str, ...] = ()
    everywhere: tuple[str, ...] = ()
    once: tuple[str, ...] = ()
    text_after: bool = False
    never: tuple[str, ...] = ()
    frames: Callable[[Any, Mapping[str, Any]], int] = lambda model, inputs: 0
    divided: bool = True


class PipedBlock(NamedTuple):
    """One block of a model: the path of it, the module, and what it returns."""

    path: str
    module: nn.Module
    returns: tuple[str, ...] | str

    @property
    def streams(self) -> tuple[str, ...]:
        """The names of the inputs that it changes."""
        return (self.returns,) if isinstance(self.returns, str) else self.returns


def pipe_plan_of(model: nn.Module) -> PipePlan:
    """Return how the blocks of a model are cut. Errors: ``InputError`` for a family that has no entry."""
    kind, found = type(model), entry_of(PIPES, model)
    other = "gather" if has_plan(model) else "batch"
    text = f"mode pipe does not know where to cut a {kind.__name__}; use mode {other}"
    require(found is not None, InputError, text)
    return found  # type: ignore[return-value]  # require has checked it


def blocks_of(model: nn.Module) -> list[PipedBlock]:
    """Return the blocks of a model, in the order in which they run. Errors: ``InputError``."""
    return list(_blocks(model, pipe_plan_of(model)))


def _blocks(model: nn.Module, plan: PipePlan) -> Iterator[PipedBlock]:
    for each in plan.lists:
        (found,) = modules_of(model, each.path)
        for i, (_, block) in enumerate(found.named_children()):
            yield PipedBlock(f"{each.path}.{i}", block, each.returns)


def patch_split(model: nn.Module, given: SplitPlan | None = None) -> SplitPlan:
    """Return how the tokens of a patch are cut: as ``given``, or as shares of ranks without the text.

    Errors: ``InputError`` as ``plan_of``.
    """
    own = pipe_plan_of(model)
    found = given or {path: _without_text(entries) for path, entries in plan_of(model).items()}
    for path, entries in own.more.items():
        found = {**found, path: _both(found.get(path), entries)}
    return {path: entries for path, entries in found.items() if entries not in ({}, None)}


def _both(known: Any, more: Any) -> Any:
    """Return the entries of a path with what is added to them, or taken from them by None."""
    if not isinstance(known, Mapping) or not isinstance(more, Mapping):
        return more
    return {name: entry for name, entry in {**known, **more}.items() if entry is not None}


def _without_text(entries: Any) -> Any:
    if not isinstance(entries, Mapping):
        return entries
    return {n: entry for n, entry in entries.items() if not {n, getattr(entry, "name", n)} & _TEXTS}


def _frames(axis: int, setting: str = "") -> Callable[[Any, Mapping[str, Any]], int]:
    """Count the frames along an axis of the hidden states, some of which a setting makes one.

    As embeddings count them: what is left over is dropped.
    """

    def count(model: Any, inputs: Mapping[str, Any]) -> int:
        size = getattr(model.config, setting) if setting else 1
        return int(inputs[HIDDEN].shape[axis] // ((size[0] if isinstance(size, Sequence) else size) or 1))

    return count


def _told_frames(model: Any, inputs: Mapping[str, Any]) -> int:
    return inputs.get("num_frames") or 0


_BOTH, _TEXT_LAST = (TEXT, HIDDEN), (HIDDEN, TEXT)
_DOUBLE, _SINGLE = "transformer_blocks", "single_transformer_blocks"
_JOINT = (BlockList(_DOUBLE, _BOTH), BlockList(_SINGLE, _BOTH))  # two streams to the end
_MERGED = (BlockList(_DOUBLE, _BOTH), BlockList(_SINGLE, HIDDEN))  # text and picture are one in the second
_TEXT_FIRST = PipePlan((BlockList(_DOUBLE, _TEXT_LAST),))  # of the keys; of what a block returns, last
_HUNYUAN = PipePlan(
    (BlockList(_DOUBLE, _TEXT_LAST), BlockList(_SINGLE, _TEXT_LAST)),
    once=("context_embedder",),
    text_after=True,
)
_JOY = PipePlan((BlockList("double_blocks", _TEXT_LAST),), text_after=True)
_ALONE = PipePlan((BlockList(_DOUBLE, HIDDEN),))  # its text stays as it is
_MASKED = PipePlan(  # its mask is of the picture's own tokens
    (BlockList(_DOUBLE, HIDDEN),), more={f"{_DOUBLE}.*": {"attention_mask": SplitInput(-1, 3)}}
)
_BESIDE_SOUND = (TEXT, "encoder_attention_mask", "timestep")  # inputs that sound has as well
_OF_WHOLE_KEYS = ("attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn")
_WAN = PipePlan((BlockList("blocks", HIDDEN),), frames=_frames(2, "patch_size"))

PIPES: dict[str | type, PipePlan] = {
    "FluxTransformer2DModel": PipePlan(_JOINT),
    "Flux2Transformer2DModel": PipePlan(_MERGED),
    "ChromaTransformer2DModel": PipePlan(_MERGED, once=("distilled_guidance_layer",)),
    "LongCatImageTransformer2DModel": PipePlan(_JOINT),
    "OvisImageTransformer2DModel": PipePlan(_JOINT),
    "BriaTransformer2DModel": PipePlan(_JOINT),
    "QwenImageTransformer2DModel": PipePlan((BlockList(_DOUBLE, _BOTH),), more={"pos_embed": {1: None}}),
    "SD3Transformer2DModel": PipePlan((BlockList(_DOUBLE, _BOTH),), text_after=True),
    "AuraFlowTransformer2DModel": PipePlan(
        (BlockList("joint_transformer_blocks", _BOTH), BlockList(_SINGLE, HIDDEN))
    ),
    "CogView3PlusTransformer2DModel": _TEXT_FIRST,
    "CogView4Transformer2DModel": _TEXT_FIRST,
    "EasyAnimateTransformer3DModel": replace(_TEXT_FIRST, frames=_frames(2)),
    "PixArtTransformer2DModel": _MASKED,
    "DiTTransformer2DModel": replace(_ALONE, divided=False),  # its first block embeds the time
    "AllegroTransformer3DModel": replace(_MASKED, frames=_frames(2, "patch_size_t")),
    "CosmosTransformer3DModel": replace(_ALONE, frames=_frames(2, "patch_size")),
    "StableAudioDiTModel": _ALONE,
    "LuminaNextDiT2DModel": PipePlan((BlockList("layers", HIDDEN),)),
    "Lumina2Transformer2DModel": PipePlan(  # as Z-Image
        (BlockList("layers", HIDDEN),), once=("noise_refiner.*", "context_refiner.*")
    ),
    "WanTransformer3DModel": _WAN,
    "WanVACETransformer3DModel": replace(_WAN, everywhere=("vace_blocks.*",)),
    "SkyReelsV2Transformer3DModel": _WAN,
    "ChronoEditTransformer3DModel": _WAN,
    "HunyuanVideo15Transformer3DModel": replace(
        _HUNYUAN, lists=_TEXT_FIRST.lists, frames=_frames(2, "patch_size_t")
    ),
    "HunyuanVideoTransformer3DModel": replace(_HUNYUAN, frames=_frames(2, "patch_size_t")),
    "HunyuanVideoFramepackTransformer3DModel": _HUNYUAN,
    "HunyuanImageTransformer2DModel": _HUNYUAN,
    "LTXVideoTransformer3DModel": PipePlan(
        (BlockList(_DOUBLE, HIDDEN),),
        more={f"{_DOUBLE}.*.attn2": Whole()},
        frames=_told_frames,
    ),
    "LTX2VideoTransformer3DModel": PipePlan(  # its sound goes whole with each patch
        (BlockList(_DOUBLE, (HIDDEN, SOUND)),),
        more={
            "": dict.fromkeys((SOUND, *(f"audio_{name}" for name in _BESIDE_SOUND))),
            **dict.fromkeys(("audio_rope", "cross_attn_audio_rope")),
            "audio_proj_out": SharedOutput(),
            **{f"{_DOUBLE}.*.{part}": Whole() for part in _OF_WHOLE_KEYS},
        },
        beside=(SOUND,),
        frames=_told_frames,
    ),
    "CogVideoXTransformer3DModel": replace(_TEXT_FIRST, frames=_frames(1, "patch_size_t")),
    "MochiTransformer3DModel": replace(_TEXT_FIRST, text_after=True, frames=_frames(2)),
    "PRXTransformer2DModel": PipePlan((BlockList("blocks", HIDDEN),)),
    "GlmImageTransformer2DModel": _TEXT_FIRST,
    "Krea2Transformer2DModel": PipePlan((BlockList(_DOUBLE, HIDDEN),), once=("text_fusion",)),
    "JoyImageEditTransformer3DModel": _JOY,
    "JoyImageEditPlusTransformer3DModel": _JOY,
    "AnyFlowTransformer3DModel": PipePlan((BlockList("blocks", HIDDEN),)),
    "StableAudio3DiTModel": _ALONE,
    "Kandinsky5Transformer3DModel": PipePlan(
        (BlockList("visual_transformer_blocks", "visual_embed"),),
        once=("text_transformer_blocks.*",),
        frames=_frames(1, "patch_size"),
    ),
    "BriaFibo2Transformer2DModel": PipePlan(
        (BlockList("layers", "x"),), once=("noise_refiner.*", "perceiver")
    ),
    "ZImageTransformer2DModel": PipePlan(  # one sequence of picture and text, which is cut as a whole
        (BlockList("layers", "x"),),
        once=("noise_refiner.*", "context_refiner.*"),
        never=("siglip_feats",),
    ),
}
