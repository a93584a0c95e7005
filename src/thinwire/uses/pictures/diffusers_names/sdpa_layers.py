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

PICTURE = "_picture"  # how many tokens of the picture the module was given
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")  # in torch's order


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
        with _Intercepted(self.layer, x.shape[1] if isinstance(x, Tensor) and x.dim() > 1 else 0):
            return self.fn_ref.original_forward(*args, **kwargs)


class _Intercepted(TorchFunctionMode):
    """torch takes a mode off while it runs, so that what the layer calls is torch's own again."""

    def __init__(self, layer: Attending, picture: int) -> None:
        super().__init__()
        self._layer, self._picture = layer, picture

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        given = dict(zip(_NAMES, args, strict=False)) | (kwargs or {})
        given |= {name: given[name].transpose(1, 2) for name in _NAMES[:3]}
        given |= {"attn_mask": _by_keys(given.get("attn_mask")), PICTURE: self._picture}
        return self._layer.attend(_native_attention, given).transpose(1, 2)


def _native_attention(**given: Any) -> Tensor:
    """Attend by torch, as diffusers' back end of this name: [B, tokens, heads, channels] in and out."""
    query, key, value = (given.pop(name).transpose(1, 2) for name in _NAMES[:3])
    given = {name: x for name, x in given.items() if not name.startswith("_")}
    return scaled_dot_product_attention(query, key, value, **given).transpose(1, 2)


def _by_keys(mask: Tensor | None) -> Tensor | None:
    """Return a mask of torch's, for which two dimensions are queries and keys, as one for all of a batch.

    What was expanded over the queries says the same of each.
    """
    if mask is None or mask.dim() < 2:
        return mask
    whole = mask if mask.dim() > 2 else mask[None, None]
    return whole[..., :1, :] if whole.stride(-2) == 0 else whole
