"""Keys and values of all tokens where one patch at a time is computed: the others' are of their last turn."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from thinwire.types import InputError, require
from thinwire.uses.pictures.context_parallel.patches import TokenPatch
from thinwire.uses.pictures.diffusers_names.interfaces import Attention

Place = tuple[int, int, int]  # a stream, a block, and which attention of the block


class TokenLayout(NamedTuple):
    """Where an attention's tokens stand: the picture's number, and whether the text's are behind them."""

    tokens: int
    text_after: bool


class KeptKeys:
    """What each layer has last computed as keys, values and mask of all tokens."""

    def __init__(self) -> None:
        self._kept: dict[Place, tuple[Tensor, Tensor, Tensor | None]] = {}

    def whole(self, place: Place, attention: Attention) -> Attention:
        """Keep an attention of all tokens, and return it."""
        _, key, value, mask = attention
        own = _of_keys(mask, key.shape[1])
        self._kept[place] = key.clone(), value.clone(), None if own is None else own.clone()
        return attention

    def renewed(
        self, place: Place, attention: Attention, patch: TokenPatch, layout: TokenLayout
    ) -> Attention:
        """Return an attention of a patch to all tokens. Errors: ``InputError`` for other masks."""
        name = f"attention {place[2]} of block {place[1]}"
        text = f"{name} has no keys of the step before; its model runs other layers in each step"
        require(place in self._kept, InputError, f"{text}; use mode gather")
        key, value, kept_mask = self._kept[place]
        words = attention.key.shape[1] - patch.tokens
        keys = attention.key.shape[1]
        text = f"{name} has {keys} keys for {patch.tokens} tokens and the text; use mode gather"
        require(words >= 0 and key.shape[1] == layout.tokens + words, InputError, text)
        for kept, new in ((key, attention.key), (value, attention.value)):
            _renew(kept, new, patch, layout, 1)
        mask = _mask(attention, kept_mask, patch, layout, name)
        return Attention(attention.query, key, value, mask)


def windows(x: Tensor, tokens: int, text_after: bool, dim: int) -> tuple[Tensor, Tensor]:
    """Return views of the picture's ``tokens`` and of the words, which stand before or after them.

    >>> [part.tolist() for part in windows(torch.arange(5), 3, False, 0)]
    [[2, 3, 4], [0, 1]]
    """
    words = x.shape[dim] - tokens
    start, there = (0, tokens) if text_after else (words, 0)
    return x.narrow(dim, start, tokens), x.narrow(dim, there, words)


def _renew(kept: Tensor, new: Tensor, patch: TokenPatch, layout: TokenLayout, dim: int) -> None:
    """Write text and patch, as they are now, where they stand among all tokens."""
    ours, text = windows(new, patch.tokens, layout.text_after, dim)
    picture, there = windows(kept, layout.tokens, layout.text_after, dim)
    patch.put(picture, ours, dim)
    there.copy_(text)


def taken(x: Tensor, patch: TokenPatch, layout: TokenLayout, dim: int) -> Tensor:
    """Return the text and a patch of what has all tokens along ``dim``, where they stand."""
    picture, text = windows(x, layout.tokens, layout.text_after, dim)
    ours = patch.take(picture, dim)
    return torch.cat((ours, text) if layout.text_after else (text, ours), dim)


def _mask(
    attention: Attention, kept: Tensor | None, patch: TokenPatch, layout: TokenLayout, name: str
) -> Tensor | None:
    """Return the mask of a patch's queries over all keys."""
    mask, own = attention.mask, attention.key.shape[1]
    if mask is None:
        return None
    words = own - patch.tokens
    rows = mask.shape[-2] if mask.dim() > 2 else 1
    if mask.shape[-1] == layout.tokens + words:  # of all keys already
        return mask if rows in (1, attention.query.shape[1]) else taken(mask, patch, layout, -2)
    keys = _of_keys(mask, own)
    text = f"the mask of {name}, {tuple(mask.shape)}, is not over its keys alone; use mode gather"
    require(keys is not None and kept is not None, InputError, text)
    whole, part = cast(Tensor, kept), cast(Tensor, keys)
    _renew(whole, part, patch, layout, whole.dim() - 1)
    return part.mT * whole if rows == own > 1 else whole


def _of_keys(mask: Tensor | None, keys: int) -> Tensor | None:
    """Return a mask of the keys alone; one of pairs of tokens may be the product of both tokens' own."""
    if mask is None or mask.shape[-1] != keys:
        return None
    if mask.dim() == 2 or mask.shape[-2] == 1:
        return mask
    if mask.shape[-2] != keys:
        return None
    own = mask.diagonal(dim1=-2, dim2=-1)[..., None, :]
    return own if torch.equal(own.mT * own, mask) else None
