"""Attention of own queries over the tokens of all ranks: modes gather, displaced and ulysses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.channels.memory import NoMemory
from thinwire.collectives import MeshExchange
from thinwire.types import InputError, LinkError, require
from thinwire.uses.pictures.coding import Coding, Endpoints
from thinwire.uses.pictures.context_parallel.modes import Division
from thinwire.uses.pictures.context_parallel.sharding import ContextParallel, Kinds, SentShare, rows, shapes
from thinwire.uses.pictures.diffusers_names.interfaces import Attention, Given, Stock
from thinwire.uses.pictures.messages import SentValues
from thinwire.uses.pictures.rank_message import TensorKind


class GatheredAttention(ContextParallel):
    """Mode gather: each rank computes its share of the tokens, and has the keys and values of all.

    Own keys and values stay exact; they are coded once, for all peers.
    """

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

    def _offer(self, layer: str, attention: Attention) -> SentShare:
        _, key, value, mask = attention
        x = torch.stack([rows(key.transpose(0, 1)), rows(value.transpose(0, 1))])
        return self._post(layer, (TensorKind.KEYS, TensorKind.VALUES), x, key.shape[0], mask)

    def _others(self, sent: SentShare) -> tuple[list[Tensor], list[Tensor]]:
        """Return keys and values [2, tokens * batch, width] of all ranks, and their masks."""
        return self._collect(sent)


Parts = tuple[list[Tensor], list[Tensor]]


class DisplacedAttention(GatheredAttention):
    """Mode displaced: the peers' keys and values are those of the last step; own ones are fresh.

    Source: DistriFusion (arXiv 2402.19481, section 4): after some synchronous steps, what a layer sends in
    one step is used in the next, so that it travels while the ranks compute.
    """

    def __init__(
        self, exchange: MeshExchange, attention: Coding, output: Coding, division: Division, deadline: float
    ) -> None:
        text = "mode displaced sends no residuals; give it a recipe without, such as displaced or int8"
        require(isinstance(attention.scheme.memory, NoMemory), InputError, text)
        self._last: dict[tuple[int, int], SentShare | Parts] = {}  # by stream and layer
        super().__init__(exchange, attention, output, division, deadline)
        self._warmup = max(1, attention.warmup)

    def begin(self, given: Given) -> None:
        """Begin a call of the model, with the whole inputs."""
        if not self._ended:  # what is still due may never come
            self._last.clear()
        super().begin(given)

    def leave(self, cause: BaseException | None = None) -> None:
        """Tell the peers not to wait for this rank any more."""
        with suppress(LinkError):
            self._drop()
        super().leave(cause)

    def _forget(self) -> None:
        self._drop()
        super()._forget()

    def _drop(self) -> None:
        """Take what the last step of a whole picture sent: nobody needs it, and it would stay in memory."""
        for last in self._last.values() if self._ended or self._call.begins else ():
            if isinstance(last, SentShare):
                self._exchange.drop(last.posted)
        self._last.clear()

    def _others(self, sent: SentShare) -> Parts:
        place = sent.posted.key.stream, sent.posted.key.layer
        last = self._last.get(place)
        if last is None or self._call.step < self._warmup:
            last = self._last[place] = self._collect(sent)
        else:
            self._last[place] = sent
        return self._collect(last) if isinstance(last, SentShare) else last


class UlyssesAttention(ContextParallel):
    """Mode ulysses: for attention each rank has all tokens and its share of the heads.

    Source: DeepSpeed-Ulysses (arXiv 2309.14509, section 3): queries, keys and values go to the ranks of their
    heads, and what attention returns goes back to the ranks of its tokens. Each peer is sent something else,
    so references are kept for each pair of ranks. The part that stays on this rank is exact.
    """

    def _attend(self, layer: str, attention: Attention, stock: Stock) -> Tensor:
        """Return what this rank's queries find among the keys and values of all ranks."""
        self._check(layer, attention, stock)
        world, dtype = len(self._ranks), attention.query.dtype
        batch, tokens, heads, width = attention.query.shape
        if attention.key.shape[1] == tokens:
            three = (TensorKind.QUERIES, TensorKind.KEYS, TensorKind.VALUES)
            (query, key, value), masks, lengths = self._all(layer, three, attention[:3], attention.mask)
        else:  # two sequences, each with shares of its own
            (query,), _, lengths = self._all(layer, (TensorKind.QUERIES,), attention[:1], None)
            two = (TensorKind.KEYS, TensorKind.VALUES)
            (key, value), masks, _ = self._all(layer, two, attention[1:3], attention.mask)
        mask = torch.cat(masks, -1) if masks else None
        found = stock.whole(Attention(query, key, value, self._of_heads(mask, heads)))
        back = found.transpose(0, 1)[None].split(lengths, 1)
        due = {rank: {tokens} for rank in self._ranks}
        parts, _ = self._collect(self._scatter(f"what {layer} finds", (TensorKind.FOUND,), back, due, None))
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

    def _check(self, layer: str, attention: Attention, stock: Stock) -> None:
        text = f"{layer} attends to tokens that are not split as well; use mode gather"
        require(not stock.beside, InputError, text)
        heads, keys, world = attention.query.shape[2], attention.key.shape[2], len(self._ranks)
        text = f"{layer} has {heads} heads, which {world} ranks cannot share evenly; use mode gather"
        require(heads % world == 0, InputError, text)
        text = f"{layer} has {heads} heads of queries and {keys} of keys; use mode gather"
        require(keys == heads, InputError, text)

    def _forget(self) -> None:
        super()._forget()
        self._pairs = {rank: Endpoints(self._codings[0], [rank]) for rank in self._exchange.others}

    def _scatter(
        self,
        what: str,
        kinds: Kinds,
        parts: Sequence[Tensor],
        due: Mapping[int, set[int]],
        mask: Tensor | None,
    ) -> SentShare:
        """Send each rank its part [kinds, tokens, B, heads, channels]; ``due`` are the tokens of theirs."""
        batch, keys, step = parts[0].shape[2], self._keys(kinds), self._call.step
        flat = {r: x.reshape(len(x), x.shape[1] * batch, -1) for r, x in zip(self._ranks, parts, strict=True)}
        with self._exchange.coding():
            masks = self._mask_packets(mask)
            coded = {r: ends.encode(flat[r], keys, step) for r, ends in self._pairs.items()}
        packets = {r: [packet, *masks] for r, (packet, _) in coded.items()}
        kept = {r: SentValues(self._pairs[r], x_hat, keys) for r, (_, x_hat) in coded.items()}
        posted = self._exchange.scatter(what, self._key(kinds), self._inputs, packets, kept)
        self._layer += 1
        own = flat[self._rank]
        expected = {rank: shapes(own, batch, some) for rank, some in due.items()}
        return SentShare(posted, kinds, own, batch, mask, self._pairs, expected)


TYPES = (torch.float32, torch.bfloat16, torch.float16)


class PartialAttention(NamedTuple):
    """What queries find among some keys, [B, heads, tokens, channels], and the logarithms of its weights.

    Own keys are attended to while those of the others are under way. The mean over all keys follows from
    those over each part and these logarithms, as in ring attention (arXiv 2310.01889). torch's public
    attention keeps the weights to itself; the operators here are private, and tested with torch 2.13.
    """

    output: Tensor
    weight: Tensor  # [B, heads, tokens]


def divisible(attention: Attention) -> bool:
    """Say whether the keys of an attention may come in parts: without a mask, if torch tells its weights."""
    query, key, value, mask = attention
    alike = query.dtype == key.dtype == value.dtype and query.shape[2] == key.shape[2]
    if mask is not None or not alike or torch.is_autocast_enabled(query.device.type):
        return False
    if query.device.type == "cuda":
        return torch.backends.cuda.flash_sdp_enabled() and _weighs(query.device, query.dtype, query.shape[3])
    return query.device.type == "cpu" and query.dtype in TYPES


@lru_cache(maxsize=64)
def _weighs(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Say whether a card's flash attention takes heads so wide: by trying, since that differs by card."""
    x = torch.zeros(1, 8, 1, width, device=device, dtype=dtype)
    with suppress(RuntimeError, NotImplementedError):
        found = attended(Attention(x, x, x, None))
        return found.weight.shape == (1, 1, 8)
    return False


def attended(attention: Attention, scale: float | None = None) -> PartialAttention:
    """Return what the queries find among these keys; ``scale`` is torch's own unless given."""
    query, key, value = (x.transpose(1, 2) for x in attention[:3])
    if query.device.type == "cuda":
        found = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, scale=scale)
        return PartialAttention(*found[:2])
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return PartialAttention(*attend(query, key, value, 0.0, False, attn_mask=None, scale=scale))


def merged(a: PartialAttention, b: PartialAttention) -> Tensor:
    """Return what the queries find among the keys of both parts, [B, tokens, heads, channels]."""
    share = torch.sigmoid(b.weight - a.weight)[..., None].to(a.output.dtype)
    return torch.lerp(a.output, b.output, share).transpose(1, 2)
