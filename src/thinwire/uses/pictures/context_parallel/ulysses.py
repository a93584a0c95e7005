"""Mode ulysses: for attention each rank has all tokens and its share of the heads.

Source: DeepSpeed-Ulysses (arXiv 2309.14509, section 3): queries, keys and values go to the ranks of their
heads, and what attention returns goes back to the ranks of its tokens. Each peer is sent something else, so
references are kept for each pair of ranks. The part that stays on this rank is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from thinwire.types import InputError, require
from thinwire.uses.pictures.context_parallel.divided import Divided, Kinds, Sent, shapes
from thinwire.uses.pictures.context_parallel.ends import Ends
from thinwire.uses.pictures.context_parallel.keys import Kind
from thinwire.uses.pictures.context_parallel.repairs import Kept
from thinwire.uses.pictures.context_parallel.seam import Attention, Stock


class Ulysses(Divided):
    """Attention of the queries of all ranks, over the keys and values of all, in own heads."""

    def _attend(self, layer: str, attention: Attention, stock: Stock) -> Tensor:
        """Return what this rank's queries find among the keys and values of all ranks."""
        self._check(layer, attention)
        world, dtype = len(self._ranks), attention.query.dtype
        batch, tokens, heads, width = attention.query.shape
        if attention.key.shape[1] == tokens:
            three = (Kind.QUERIES, Kind.KEYS, Kind.VALUES)
            (query, key, value), masks, lengths = self._all(layer, three, attention[:3], attention.mask)
        else:  # two sequences, each with shares of its own
            (query,), _, lengths = self._all(layer, (Kind.QUERIES,), attention[:1], None)
            two = (Kind.KEYS, Kind.VALUES)
            (key, value), masks, _ = self._all(layer, two, attention[1:3], attention.mask)
        mask = torch.cat(masks, -1) if masks else None
        found = stock.whole(Attention(query, key, value, self._of_heads(mask, heads)))
        back = found.transpose(0, 1)[None].split(lengths, 1)
        due = {rank: {tokens} for rank in self._ranks}
        parts, _ = self._collect(self._scatter(f"what {layer} finds", (Kind.FOUND,), back, due, None))
        own = [p.reshape(tokens, batch, heads // world, width).to(dtype) for p in parts]
        return torch.cat(own, 2).transpose(0, 1)

    def _all(
        self, layer: str, kinds: Kinds, own: Sequence[Tensor], mask: Tensor | None
    ) -> tuple[Tensor, list[Tensor], list[int]]:
        """Return tensors [B, tokens, heads, channels] of all tokens in own heads, masks, and all lengths."""
        world, (batch, tokens, heads, width) = len(self._ranks), own[0].shape
        x = torch.stack([x.transpose(0, 1) for x in own])  # [kinds, tokens, B, heads, channels]
        due = self._lengths(tokens, layer)
        parts, masks = self._collect(self._scatter(layer, kinds, x.tensor_split(world, 3), due, mask))
        shaped = [p.reshape(len(kinds), -1, batch, heads // world, width).to(x.dtype) for p in parts]
        return torch.cat(shaped, 1).transpose(1, 2), masks, [p.shape[1] for p in shaped]

    def _of_heads(self, mask: Tensor | None, heads: int) -> Tensor | None:
        """Return the part of a mask that is of this rank's heads."""
        if mask is None or mask.dim() < 4 or mask.shape[1] != heads:
            return mask
        return mask.tensor_split(len(self._ranks), 1)[self._ranks.index(self._rank)]

    def _check(self, layer: str, attention: Attention) -> None:
        heads, keys, world = attention.query.shape[2], attention.key.shape[2], len(self._ranks)
        text = f"{layer} has {heads} heads, which {world} ranks cannot share evenly; use mode gather"
        require(heads % world == 0, InputError, text)
        text = f"{layer} has {heads} heads of queries and {keys} of keys; use mode gather"
        require(keys == heads, InputError, text)

    def _forget(self) -> None:
        super()._forget()
        self._pairs = {rank: Ends(self._codings[0], [rank]) for rank in self._traffic.others}

    def _scatter(
        self,
        what: str,
        kinds: Kinds,
        parts: Sequence[Tensor],
        due: Mapping[int, set[int]],
        mask: Tensor | None,
    ) -> Sent:
        """Send each rank its part [kinds, tokens, B, heads, channels]; ``due`` are the tokens of theirs."""
        batch, keys, step = parts[0].shape[2], self._keys(kinds), self._call.step
        flat = {r: x.reshape(len(x), x.shape[1] * batch, -1) for r, x in zip(self._ranks, parts, strict=True)}
        with self._traffic.coding():
            masks = self._mask_packets(mask)
            coded = {r: ends.encode(flat[r], keys, step) for r, ends in self._pairs.items()}
        packets = {r: [data, *masks] for r, (data, _) in coded.items()}
        self._traffic.keep({r: Kept(self._pairs[r], x_hat, keys) for r, (_, x_hat) in coded.items()})
        posted = self._traffic.scatter(what, self._key(kinds), self._inputs, packets)
        self._layer += 1
        own = flat[self._rank]
        expected = {rank: shapes(own, batch, some) for rank, some in due.items()}
        return Sent(posted, kinds, own, batch, mask, self._pairs, expected)
