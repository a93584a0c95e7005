"""Attention whose processor calls torch's own by itself, not through diffusers' back ends.

Within the forward of the module that has such a processor, a mode of torch functions, which is of the calling
thread alone, hands each call of ``scaled_dot_product_attention`` to a layer of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from thinwire.uses.pictures.diffusers_names.tested_version import Hook

WITH_TAIL = "_with_tail"  # the name of a back end that adds keys which are no shares
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")  # in torch's order

# How many of the keys are shares, given the tokens of the queries, the keys and the picture; the others
# are of tokens that every rank has: a text that is not split, or an image prompt.
_SHARED: dict[str, Callable[[int, int, int], int]] = {
    "MochiAttnProcessor2_0": lambda queries, keys, picture: picture,
    "SD3IPAdapterJointAttnProcessor2_0": lambda queries, keys, picture: min(queries, keys),
}


class Attending(Protocol):
    """What a call of torch's attention is handed to: an ``AttentionLayer``."""

    def attend(self, stock: Callable[..., Any], given: Mapping[str, Any]) -> Any:
        """Return the attention [B, tokens, heads, channels] by ``stock``, of arguments in that layout."""
        ...


class SdpaHook(Hook):
    """Let torch's attention within a module's forward be the layer's."""

    def __init__(self, layer: Attending, processor: object) -> None:
        self.layer, self.processor = layer, processor
        self._forward = torch.compiler.disable(self._intercepting)

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def _intercepting(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs.get("hidden_states")
        shared = _SHARED.get(type(self.processor).__name__)
        picture = x.shape[1] if shared and isinstance(x, Tensor) else 0
        with _Intercepted(self.layer, lambda q, k: shared(q, k, picture) if shared else k):
            return self.fn_ref.original_forward(*args, **kwargs)


class _Intercepted(TorchFunctionMode):
    """torch takes a mode off while it runs, so that what the layer calls is torch's own again."""

    def __init__(self, layer: Attending, shared: Callable[[int, int], int]) -> None:
        super().__init__()
        self._layer, self._shared = layer, shared

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        given = dict(zip(_NAMES, args, strict=False)) | (kwargs or {})
        given |= {name: given[name].transpose(1, 2) for name in _NAMES[:3]}
        given["attn_mask"] = _by_keys(given.get("attn_mask"))
        n = self._shared(given["query"].shape[1], given["key"].shape[1])
        return self._layer.attend(*_without_tail(given, n)).transpose(1, 2)


def _native_attention(**given: Any) -> Tensor:
    """Attend by torch, as diffusers' back end of this name: [B, tokens, heads, channels] in and out."""
    query, key, value = (given.pop(name).transpose(1, 2) for name in _NAMES[:3])
    given = {name: x for name, x in given.items() if not name.startswith("_")}
    return scaled_dot_product_attention(query, key, value, **given).transpose(1, 2)


def _without_tail(given: dict[str, Any], n: int) -> tuple[Callable[..., Tensor], dict[str, Any]]:
    """Return an attention over the first ``n`` keys, and a back end that puts the others behind them."""
    if n >= given["key"].shape[1] or given["attn_mask"] is not None:
        return _native_attention, given
    tails = {name: given[name][:, n:] for name in ("key", "value")}

    def _with_tail(**whole: Any) -> Tensor:
        own = {name: torch.cat([whole[name], tail], 1) for name, tail in tails.items()}
        return _native_attention(**whole | own)

    return _with_tail, given | {name: given[name][:, :n] for name in tails}


def _by_keys(mask: Tensor | None) -> Tensor | None:
    """Return a mask of torch's, for which two dimensions are queries and keys, as one for all of a batch.

    What was expanded over the queries says the same of each.
    """
    if mask is None or mask.dim() < 2:
        return mask
    whole = mask if mask.dim() > 2 else mask[None, None]
    return whole[..., :1, :] if whole.stride(-2) == 0 else whole
