"""Attention over a part of the keys at a time: own ones while those of the others are under way.

The mean over all keys follows from those over each part and the logarithms of their weights, as in ring
attention (arXiv 2310.01889). torch's public attention keeps the weights to itself; the operator here is
private, and tested with torch 2.13.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.uses.pictures.context_parallel.seam import Attention

TYPES = (torch.float32, torch.bfloat16, torch.float16)


class Part(NamedTuple):
    """What queries find among some keys, [B, heads, tokens, channels], and the logarithms of its weights."""

    output: Tensor
    weight: Tensor  # [B, heads, tokens]


def divisible(attention: Attention) -> bool:
    """Say whether the keys of an attention may come in parts: on the CPU, and without a mask."""
    query, key, value, mask = attention
    alike = query.dtype == key.dtype == value.dtype and query.shape[2] == key.shape[2]
    plain = query.device.type == "cpu" and query.dtype in TYPES and not torch.is_autocast_enabled("cpu")
    return mask is None and alike and plain


def attended(attention: Attention, scale: float | None = None) -> Part:
    """Return what the queries find among these keys; ``scale`` is torch's own unless given."""
    query, key, value = (x.transpose(1, 2) for x in attention[:3])
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return Part(*attend(query, key, value, 0.0, False, attn_mask=None, scale=scale))


def merged(a: Part, b: Part) -> Tensor:
    """Return what the queries find among the keys of both parts, [B, tokens, heads, channels]."""
    share = torch.sigmoid(b.weight - a.weight)[..., None].to(a.output.dtype)
    return torch.lerp(a.output, b.output, share).transpose(1, 2)
