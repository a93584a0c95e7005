"""ComfyUI's attention by torch's own, where it is over tokens that are split, so that a session hears it.

ComfyUI lets ``optimized_attention_override`` in ``transformer_options`` stand in for its attention. Ours
calls torch's, whichever kind was chosen. Each module whose attention is over the split tokens gets a
``processor``, by which ``diffusers_names/hooks.py`` finds it and hears torch's attention within.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from thinwire.types import InputError, require
from thinwire.uses.pictures.comfy_names.comfy_families import OPTIONS, ComfyFamily
from thinwire.uses.pictures.comfy_names.comfy_models import COMFY, loaded_family
from thinwire.uses.pictures.diffusers_names.block_hooks import signature_of
from thinwire.uses.pictures.diffusers_names.hooks import hooked
from thinwire.uses.pictures.diffusers_names.plans import modules_of
from thinwire.uses.pictures.diffusers_names.tested_version import Hook

OVERRIDE = "optimized_attention_override"


class ComfyAttention:
    """What stands for the attention of a module of ComfyUI."""


class AttentionByTorch(Hook):
    """Let the attention within a module be torch's own; refuse inputs that say where among all tokens."""

    def __init__(self, plain: tuple[str, ...]) -> None:
        self._plain = plain

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], Any]:
        names = list(signature_of(module).parameters)
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        given = [name for name in self._plain if named.get(name) is not None]
        text = f"a {type(module).__name__} is given {', '.join(given)}, which shares of tokens cannot take"
        require(not given, InputError, f"{text}; leave masks and reference pictures out of the workflow")
        return (), {**named, OPTIONS: {**(named.get(OPTIONS) or {}), OVERRIDE: by_torch}}


@contextmanager
def heard_attention(model: nn.Module, family: ComfyFamily) -> Iterator[None]:
    """Let ``parallel`` hear the attention of a model of ComfyUI inside the block."""
    with ExitStack() as undo:
        for path in family.attention:
            for module in modules_of(model, path):
                text = f"a {type(module).__name__} has a processor, as none of ComfyUI's had; update thinwire"
                require(not hasattr(module, "processor"), InputError, text)
                module.processor = ComfyAttention()  # type: ignore[assignment]  # no module
                undo.callback(delattr, module, "processor")
                undo.callback(hooked(module, AttentionByTorch(family.plain), "comfy"))
        yield


@contextmanager
def prepared(model: nn.Module, source: str) -> Iterator[None]:
    """Let ``parallel`` take a model apart that is of a class of ``source``, inside the block."""
    if source != COMFY:
        yield
        return
    with heard_attention(model, loaded_family(model)):
        yield


def by_torch(
    stock: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None = None,
    attn_precision: Any = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **more: Any,
) -> Tensor:
    """Return attention [B, tokens, heads * d]; with ``skip_reshape``, of [B, heads, tokens, d]."""
    if not skip_reshape:
        width = q.shape[-1] // heads
        q, k, v = (x.unflatten(-1, (-1, width)).transpose(1, 2) for x in (q, k, v))
    if mask is not None and mask.dim() == 3:
        mask = mask[:, None]
    given = {name: more[name] for name in ("scale", "enable_gqa") if name in more}
    found = scaled_dot_product_attention(q, k, v, attn_mask=mask, **given)
    return found if skip_output_reshape else found.transpose(1, 2).flatten(2)
