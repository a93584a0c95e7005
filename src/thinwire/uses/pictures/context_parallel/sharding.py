"""A model whose tokens are divided over the ranks: what all modes that do so have in common.

The joined output is coded as well, and every rank takes the decoded values for its own share too: so the
latents are the same bits on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor, nn

from thinwire.collectives import MeshExchange
from thinwire.staging import to_host
from thinwire.types import InputError, Packet, require
from thinwire.uses.pictures.coding import Coding, Endpoints, Shape, mask_in, mask_packet
from thinwire.uses.pictures.context_parallel.modes import Division
from thinwire.uses.pictures.diffusers_names.hooks import attached
from thinwire.uses.pictures.diffusers_names.interfaces import Attention, Given, Stock
from thinwire.uses.pictures.diffusers_names.plans import SplitPlan
from thinwire.uses.pictures.messages import CheckedExchange, Posted, SentValues
from thinwire.uses.pictures.model_calls import CallInputs, CountedCalls, shapes_of
from thinwire.uses.pictures.rank_message import Key, Packets, TensorKind

Kinds = tuple[TensorKind, ...]


@dataclass(frozen=True)
class SentShare:
    """An exchange that has begun: what this rank has of it, and what is due from each of the others."""

    posted: Posted
    kinds: Kinds
    own: Tensor  # [kinds, tokens * batch, width], as the others decode it
    batch: int
    mask: Tensor | None
    ends: Mapping[int, Endpoints]
    shapes: Mapping[int, list[Shape]]


class SeenMask(NamedTuple):
    """A mask as a layer gave it, for keys of a shape: what it is by keys alone, and that on the host."""

    given: Tensor
    keys: torch.Size
    own: Tensor | None
    here: Tensor | None


class ContextParallel(CountedCalls):
    """The exchanges of one model, but for those of attention; a ``ShardedForward``."""

    def __init__(
        self, exchange: MeshExchange, attention: Coding, output: Coding, division: Division, deadline: float
    ) -> None:
        self._exchange = CheckedExchange(exchange, deadline)
        super().__init__(self._exchange.inquiry)
        self.tally = self._exchange.tally
        self._rank, self._ranks = exchange.rank, exchange.ranks
        self._shares = TokenShares(self._ranks.index(self._rank), len(self._ranks))
        self._codings = attention, output
        self._layer = 0  # exchanges of this call so far
        self._mask: SeenMask | None = None
        self._forget()

    def attached(self, model: nn.Module, plan: SplitPlan | None = None) -> AbstractContextManager[None]:
        """Let the calls of ``model`` exchange inside the block."""
        return attached(model, self, plan)

    def begin(self, given: Given) -> None:
        """Begin a call of the model, with the whole inputs."""
        seen = CallInputs.of(given.inputs)
        self._begin(given, shapes_of(given.inputs), seen.time)
        self._inputs, self._layer = self._inquiry.note(self.clock.generation, seen.sums), 0
        self._shares.clear()
        self._mask = None

    def cut(self, name: str, x: Tensor, dim: int, of: Sequence[str] = ()) -> Tensor:
        """Return this rank's share of an input along ``dim``."""
        return self._shares.cut(name, x, dim, of)

    def attend(self, layer: str, attention: Attention, stock: Stock) -> Tensor:
        """Return the attention of this rank's queries over the tokens of all ranks.

        Before any tokens are split all ranks have all of them.
        """
        if not self._shares.split:
            return stock.whole(attention)
        own = self._by_key(layer, attention)
        if own.mask is not None and own.mask is not attention.mask:
            stock = replace(stock, whole=_outer(stock, own.mask))
        return self._attend(layer, own, stock)

    def _attend(self, layer: str, attention: Attention, stock: Stock) -> Tensor:
        """Attend with a mask by keys alone, if any."""
        raise NotImplementedError

    def _by_key(self, layer: str, attention: Attention) -> Attention:
        """Return what the function ``by_key`` does; what the layers of a call share is looked at once."""
        given, keys = attention.mask, attention.key.shape
        if given is None:
            return by_key(layer, attention)
        alike = self._mask is not None and self._mask.given is given and self._mask.keys == keys
        if self._mask is None or not alike or attention.value.shape != keys:
            own = by_key(layer, attention).mask
            [here] = [None] if own is None else to_host([own]).tensors()
            self._mask = SeenMask(given, keys, own, here)
        return attention._replace(mask=self._mask.own)

    def join(self, x: Tensor, dim: int) -> Tensor:
        """Return the outputs of all ranks along ``dim``, as every rank decodes them."""
        moved = x.movedim(dim, 0)
        sent = self._post("the output", (TensorKind.OUTPUT,), rows(moved)[None], moved.shape[1], None)
        parts, _ = self._collect(sent)
        whole = torch.cat([p.reshape(-1, *moved.shape[1:]) for p in parts])
        return whole.to(x.dtype).movedim(0, dim)

    def end(self) -> None:
        """End a call of the model."""
        self._exchange.end()
        self._ended = True

    def leave(self, cause: BaseException | None = None) -> None:
        """Tell the peers not to wait for this rank any more."""
        self._exchange.leave(cause)

    def _renew(self) -> None:
        self._exchange.renew()

    def _abandon(self, cause: BaseException | None = None) -> None:
        self._exchange.abandon(cause)

    def _forget(self) -> None:
        attention, output = (Endpoints(coding, self._ranks) for coding in self._codings)
        self._ends = {TensorKind.KEYS: attention, TensorKind.OUTPUT: output}
        self._exchange.begin(self.clock.generation)

    def _post(self, what: str, kinds: Kinds, x: Tensor, batch: int, mask: Tensor | None) -> SentShare:
        """Send ``x`` [kinds, tokens * batch, width], coded once, to all others, and the mask if any."""
        lengths, ends = self._lengths(x.shape[1] // batch, what), self._ends[kinds[0]]
        with self._exchange.coding():
            packet, x_hat = ends.encode(x, self._keys(kinds), self._call.step)
            packets: Packets = [packet, *self._mask_packets(mask)]
        kept = SentValues(ends, x_hat, self._keys(kinds))
        posted = self._exchange.post(what, self._key(kinds), self._inputs, packets, kept)
        self._layer += 1
        due = {rank: shapes(x, batch, some) for rank, some in lengths.items()}
        return SentShare(posted, kinds, x_hat, batch, mask, dict.fromkeys(self._ranks, ends), due)

    def _collect(self, sent: SentShare) -> tuple[list[Tensor], list[Tensor]]:
        """Return what was sent of all ranks, as decoded, and masks if there are any."""
        parts, masks = {self._rank: sent.own}, {self._rank: sent.mask}
        received = self._exchange.collect(sent.posted, sent.own.device)
        with self._exchange.coding():
            for rank, (first, *rest) in received.items():
                keys = self._keys(sent.kinds, sent.posted.key._replace(source=rank))
                parts[rank] = self._exchange.decode(
                    sent.posted, sent.ends[rank], rank, first, keys, sent.shapes[rank], sent.own
                )
                if sent.mask is not None:
                    tokens = parts[rank].shape[1] // sent.batch
                    key = sent.posted.key._replace(source=rank, kind=TensorKind.MASK)
                    masks[rank] = mask_in(rest[0], sent.mask, tokens, key.pack())
        return [parts[r] for r in self._ranks], [m for r in self._ranks if (m := masks.get(r)) is not None]

    def _lengths(self, tokens: int, what: str) -> dict[int, set[int]]:
        found = self._shares.lengths(tokens, what)
        return {rank: found[place] for place, rank in enumerate(self._ranks)}

    def _mask_packets(self, mask: Tensor | None) -> list[Packet]:
        if mask is None or self._mask is None or self._mask.here is None:
            return []
        return [mask_packet(self._mask.here, self._key((TensorKind.MASK,)).pack())]

    def _key(self, kinds: Kinds) -> Key:
        return Key(self._call.stream, self._layer, kinds[0], self._rank)

    def _keys(self, kinds: Kinds, like: Key | None = None) -> list[int]:
        return [(like or self._key(kinds))._replace(kind=kind).pack() for kind in kinds]


def shapes(x: Tensor, batch: int, tokens: Iterable[int]) -> list[Shape]:
    """Return the shapes that a part like ``x`` [kinds, tokens * batch, width] may have with other tokens."""
    return [(len(x), n * batch, x.shape[2]) for n in tokens]


def rows(x: Tensor) -> Tensor:
    """Return ``x`` [tokens, B, ...] as [tokens * B, channels]."""
    return x.reshape(x.shape[0] * x.shape[1], -1)


def by_key(layer: str, attention: Attention) -> Attention:
    """Return an attention with a mask of its keys alone [..., 1, keys], if any.

    A mask of 0 and 1 for pairs of tokens is one of tokens if it is the product of both tokens' own.
    Errors: ``InputError`` for keys, values or a mask that cannot be put together from those of ranks.
    """
    _, key, value, mask = attention
    text = f"{layer} has keys of shape {tuple(key.shape)} and values of {tuple(value.shape)}; use mode one"
    require(key.shape == value.shape, InputError, text)
    if mask is not None and mask.dim() > 2 and mask.shape[-2] == mask.shape[-1] == key.shape[1] > 1:
        own = mask.diagonal(dim1=-2, dim2=-1)[..., None, :]
        if torch.equal(own.mT * own, mask):
            return attention._replace(mask=own)
    if mask is not None:
        text = f"the mask of {layer}, {tuple(mask.shape)}, is not over its {key.shape[1]} keys; use mode one"
        by_keys = mask.shape[-1] == key.shape[1] and (mask.dim() == 2 or mask.shape[-2] == 1)
        require(by_keys, InputError, text)
    return attention


def _outer(stock: Stock, own: Tensor) -> Callable[[Attention], Tensor]:
    """Return a back end whose mask is of pairs of tokens: the product of what both have, ``own`` here."""

    def whole(attention: Attention) -> Tensor:
        keys = attention.mask
        if keys is None:
            return stock.whole(attention)
        queries = keys if keys.shape[-1] == attention.query.shape[1] else own
        return stock.whole(attention._replace(mask=queries.mT * keys))

    return whole


class TokenShares:
    """The inputs that were split in one call of the model, and what follows for the peers' parts.

    Replicated tokens, such as text that a plan does not split, may not be gathered: they would count once
    for each rank. So a part that is gathered must be made of shares.
    """

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self._split: dict[str, int] = {}
        self._known: dict[int, dict[int, set[int]]] = {}  # by the tokens of a part

    def clear(self) -> None:
        """Forget the inputs of the last call."""
        self._split.clear()
        self._known.clear()

    @property
    def split(self) -> bool:
        """Whether tokens were split in this call."""
        return bool(self._split)

    def cut(self, name: str, x: Tensor, dim: int, of: Sequence[str] = ()) -> Tensor:
        """Return this rank's share of ``x`` along ``dim``.

        ``of``: names of inputs that were cut before. If ``x`` is as long as these together, it is made of
        shares of a part for each; if not, it is no input of tokens, and stays whole.
        """
        n = x.shape[dim]
        if of:
            lengths = [self._split.get(each, 0) for each in of]
            if sum(lengths) != n:
                return x
            parts = [part.tensor_split(self.world, dim)[self.rank] for part in x.split(lengths, dim)]
            return torch.cat(parts, dim)
        text = f"{name} has {n} tokens, too few for {self.world} ranks; use fewer ranks"
        require(n >= self.world, InputError, text)
        if x.dim() == 3 and x.is_floating_point():  # tokens with their channels, not positions or masks
            self._split[name] = n
            self._known.clear()
        return x.tensor_split(self.world, dim)[self.rank]

    def lengths(self, own: int, what: str) -> dict[int, set[int]]:
        """Return which lengths each rank's part may have where this rank's has ``own`` tokens.

        Errors: ``InputError`` where no set of split inputs makes a part of that length.
        """
        if own in self._known:
            return self._known[own]
        found: dict[int, set[int]] = {rank: set() for rank in range(self.world)}
        totals = list(self._split.values())
        for size in range(1, len(totals) + 1):
            for some in combinations(totals, size):
                if sum(self._share(n, self.rank) for n in some) == own:
                    for rank, lengths in found.items():
                        lengths.add(sum(self._share(n, rank) for n in some))
        text = f"{what} has {own} tokens here, no shares of what was split, {self._split}; use mode one"
        require(bool(found[self.rank]), InputError, text)
        self._known[own] = found
        return found

    def _share(self, n: int, rank: int) -> int:
        return n // self.world + (rank < n % self.world)
