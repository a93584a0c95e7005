"""Mode gather: each rank computes its share of the tokens, and has the keys and values of all.

Own keys and values stay exact; they are coded once, for all peers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.uses.pictures.context_parallel.divided import Divided, Sent, rows
from thinwire.uses.pictures.context_parallel.keys import Kind
from thinwire.uses.pictures.context_parallel.parts import attended, divisible, merged
from thinwire.uses.pictures.context_parallel.seam import Attention, Stock


class Gather(Divided):
    """Attention of own queries over the keys and values of all ranks."""

    def _attend(self, layer: str, attention: Attention, stock: Stock) -> Tensor:
        """Return what this rank's queries find among the keys and values of all ranks.

        Among its own they may while the others' are under way.
        """
        sent = self._offer(layer, attention)
        in_parts = stock.parts and divisible(attention)
        mine = attended(attention, stock.scale) if in_parts else None
        parts, masks = self._others(sent)
        batch, width = attention.key.shape[0], attention.key.shape[2:]
        pairs = [p.reshape(2, -1, batch, *width).transpose(1, 2).to(attention.key.dtype) for p in parts]
        if mine is not None:
            del pairs[self._shares.rank]
            theirs = attention._replace(**dict(zip(("key", "value"), torch.cat(pairs, 2), strict=True)))
            return merged(mine, attended(theirs, stock.scale))
        pairs[self._shares.rank] = torch.stack([attention.key, attention.value])
        keys, values = torch.cat(pairs, 2)
        return stock.whole(Attention(attention.query, keys, values, torch.cat(masks, -1) if masks else None))

    def _offer(self, layer: str, attention: Attention) -> Sent:
        _, key, value, mask = attention
        x = torch.stack([rows(key.transpose(0, 1)), rows(value.transpose(0, 1))])
        return self._post(layer, (Kind.KEYS, Kind.VALUES), x, key.shape[0], mask)

    def _others(self, sent: Sent) -> tuple[list[Tensor], list[Tensor]]:
        """Return keys and values [2, tokens * batch, width] of all ranks, and their masks."""
        return self._collect(sent)
