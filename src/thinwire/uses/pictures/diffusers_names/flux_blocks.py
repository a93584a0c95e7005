"""A transformer of diffusers block by block, as tested with version 0.42.1.

What surrounds the blocks, embeddings before and a projection behind, is small and is computed anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thinwire.types import InputError, require
from thinwire.uses.pictures.diffusers_names.hooks import intercepted, listening
from thinwire.uses.pictures.diffusers_names.interfaces import ShardedForward, WholeForward
from thinwire.uses.pictures.diffusers_names.plans import has_plan
from thinwire.uses.pictures.diffusers_names.tested_version import version

FLUX = "FluxTransformer2DModel"
_PARTS = (
    "x_embedder",
    "time_text_embed",
    "context_embedder",
    "pos_embed",
    "transformer_blocks",
    "single_transformer_blocks",
    "norm_out",
    "proj_out",
)
_EXTRAS = ("joint_attention_kwargs", "controlnet_block_samples", "controlnet_single_block_samples")


class Embedded(NamedTuple):
    """What the blocks take: picture [B, N, d], text [B, T, d], time [B, d]; positions of text and picture."""

    picture: Tensor
    text: Tensor
    time: Tensor
    positions: tuple[Tensor, Tensor]

    def places(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the positions of the text and of some tokens of the picture."""
        n = self.text.shape[1]
        cos, sin = (torch.cat((p[:n], p[n:][rows])) for p in self.positions)
        return cos, sin


class FluxBlocks:
    """The blocks of a ``FluxTransformer2DModel``, and what is before and behind them.

    Errors: ``InputError`` for another model, and for one that diffusers has changed.
    """

    def __init__(self, model: Any) -> None:
        kind = type(model).__name__
        other = "gather" if has_plan(model) else "batch"
        text = f"mode pipe divides the blocks of {FLUX} alone, not those of {kind}; use mode {other}"
        require(kind == FLUX, InputError, text)
        lacks = [name for name in _PARTS if not hasattr(model, name)]
        text = f"{kind} has no {', '.join(lacks)} in diffusers {version()}; pin 0.42.1"
        require(not lacks, InputError, text)
        self._model = model
        self.blocks: list[nn.Module] = [*model.transformer_blocks, *model.single_transformer_blocks]

    def embed(self, inputs: Mapping[str, Any]) -> Embedded:
        """Return what the first block takes. Errors: ``InputError`` for adapters and control networks."""
        extra = [name for name in _EXTRAS if inputs.get(name)]
        text = f"mode pipe does not take {', '.join(extra)}; leave it out, or use mode gather"
        require(not extra, InputError, text)
        m, x = self._model, self._model.x_embedder(inputs["hidden_states"])
        times, guidance = inputs["timestep"].to(x.dtype) * 1000, inputs.get("guidance")
        more = () if guidance is None else (guidance.to(x.dtype) * 1000,)
        time = m.time_text_embed(times, *more, inputs["pooled_projections"])
        places = [ids[0] if ids.ndim == 3 else ids for ids in (inputs["txt_ids"], inputs["img_ids"])]
        return Embedded(
            x, m.context_embedder(inputs["encoder_hidden_states"]), time, m.pos_embed(torch.cat(places))
        )

    def run(
        self, i: int, text: Tensor, picture: Tensor, time: Tensor, places: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return text and picture tokens after one block."""
        made: tuple[Tensor, Tensor] = self.blocks[i](
            hidden_states=picture, encoder_hidden_states=text, temb=time, image_rotary_emb=places
        )
        return made

    def processor(self, i: int) -> str:
        """Return the kind of a block's attention processor."""
        block: Any = self.blocks[i]
        return type(block.attn.processor).__name__

    def finish(self, picture: Tensor, embedded: Embedded) -> Tensor:
        """Return the model's output for some tokens of the picture after the last block."""
        out: Tensor = self._model.proj_out(self._model.norm_out(picture, embedded.time))
        return out

    def output(self, x: Tensor, inputs: Mapping[str, Any]) -> Any:
        """Return the output in the form that the caller asked for."""
        if not inputs.get("return_dict", True):
            return (x,)
        from diffusers.models.modeling_outputs import Transformer2DModelOutput

        return Transformer2DModelOutput(sample=x)


@contextmanager
def piped(model: nn.Module, passes: WholeForward, session: ShardedForward) -> Iterator[None]:
    """Let ``passes`` stand in for the calls of ``model``, and ``session`` attend, inside the block."""
    with intercepted(model, passes), listening(model, session):
        yield


def cut(blocks: Sequence[object], ranks: int) -> list[range]:
    """Return which blocks each rank has, as even as they go.

    >>> cut("abcdefg", 3)
    [range(0, 3), range(3, 5), range(5, 7)]
    """
    n = len(blocks)
    text = f"mode pipe cuts {n} blocks over the ranks, and there are {ranks} of these; use fewer ranks"
    require(n >= ranks, InputError, text)
    sizes = [n // ranks + (k < n % ranks) for k in range(ranks)]
    ends = [sum(sizes[: k + 1]) for k in range(ranks)]
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
