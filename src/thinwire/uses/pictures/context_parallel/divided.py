"""A model whose tokens are divided over the ranks: what all modes that do so have in common.

The joined output is coded as well, and every rank takes the decoded values for its own share too: so the
latents are the same bits on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from thinwire.collectives import MeshExchange
from thinwire.types import InputError, LinkError, require
from thinwire.uses.pictures.context_parallel import host
from thinwire.uses.pictures.context_parallel.clock import Call, Clock
from thinwire.uses.pictures.context_parallel.coding import Coding
from thinwire.uses.pictures.context_parallel.division import Division
from thinwire.uses.pictures.context_parallel.ends import Ends, Shape, pack_mask, unpack_mask
from thinwire.uses.pictures.context_parallel.host_plan import Plan
from thinwire.uses.pictures.context_parallel.inputs import shapes_of, time_of
from thinwire.uses.pictures.context_parallel.keys import Key, Kind
from thinwire.uses.pictures.context_parallel.repairs import Kept
from thinwire.uses.pictures.context_parallel.seam import Attention, Given, Stock
from thinwire.uses.pictures.context_parallel.shares import Shares
from thinwire.uses.pictures.context_parallel.traffic import Packets, Posted, Traffic
from thinwire.uses.pictures.context_parallel.weights import Weights

Kinds = tuple[Kind, ...]


@dataclass(frozen=True)
class Sent:
    """An exchange that has begun: what this rank has of it, and what is due from each of the others."""

    posted: Posted
    kinds: Kinds
    own: Tensor  # [kinds, tokens * batch, width], as the others decode it
    batch: int
    mask: Tensor | None
    ends: Mapping[int, Ends]
    shapes: Mapping[int, list[Shape]]


class Divided:
    """The exchanges of one model, but for those of attention; see ``seam.Session``."""

    def __init__(
        self, exchange: MeshExchange, attention: Coding, output: Coding, division: Division, deadline: float
    ) -> None:
        self.clock, self._traffic = Clock(), Traffic(exchange, deadline)
        self.tally = self._traffic.tally
        self._rank, self._ranks = exchange.rank, exchange.ranks
        self._shares = Shares(self._ranks.index(self._rank), len(self._ranks))
        self._codings = attention, output
        self._call, self._inputs = Call(0, 0, True), 0
        self._layer = 0  # exchanges of this call so far
        self._ended = True
        self._forget()

    def attached(self, model: nn.Module, plan: Plan | None = None) -> AbstractContextManager[None]:
        """Let the calls of ``model`` exchange inside the block."""
        return host.attached(model, self, plan)

    def watch(self, weights: Weights) -> None:
        """Compare these weights with the other ranks' in each call."""
        self._traffic.inquiry.watch(weights)

    def begin(self, given: Given) -> None:
        """Begin a call of the model, with the whole inputs."""
        inputs = given.inputs
        if not self._ended:  # an error or an interrupt: the ranks may be at different exchanges of that call
            self._traffic.abandon()
            self.clock.reset()
        self._call, self._ended = self.clock.call(given.stream, time_of(inputs), shapes_of(inputs)), False
        if self._call.begins:
            self._forget()
        given.check()
        self._inputs, self._layer = self._traffic.inquiry.note(self.clock.generation, inputs), 0
        self._shares.clear()

    def cut(self, name: str, x: Tensor, dim: int, of: Sequence[str] = ()) -> Tensor:
        """Return this rank's share of an input along ``dim``."""
        return self._shares.cut(name, x, dim, of)

    def attend(self, layer: str, attention: Attention, stock: Stock) -> Tensor:
        """Return the attention of this rank's queries over the tokens of all ranks.

        Before any tokens are split all ranks have all of them.
        """
        if not self._shares.split:
            return stock.whole(attention)
        own = by_key(layer, attention)
        if own.mask is not None and own.mask is not attention.mask:
            stock = replace(stock, whole=_outer(stock, own.mask))
        return self._attend(layer, own, stock)

    def _attend(self, layer: str, attention: Attention, stock: Stock) -> Tensor:
        """Attend with a mask by keys alone, if any."""
        raise NotImplementedError

    def join(self, x: Tensor, dim: int) -> Tensor:
        """Return the outputs of all ranks along ``dim``, as every rank decodes them."""
        moved, before = x.movedim(dim, 0), self.tally.nbytes
        sent = self._post("the output", (Kind.OUTPUT,), rows(moved)[None], moved.shape[1], None)
        parts, _ = self._collect(sent)
        self.tally.output_nbytes += self.tally.nbytes - before
        whole = torch.cat([p.reshape(-1, *moved.shape[1:]) for p in parts])
        return whole.to(x.dtype).movedim(0, dim)

    def fail(self, cause: BaseException) -> None:
        """Tell the peers at once that a call of the model has failed."""
        with suppress(LinkError):
            self._traffic.abandon(cause)

    def end(self) -> None:
        """End a call of the model."""
        self.tally.calls += 1
        self._ended = True

    def reset(self) -> None:
        """Let the next call of the model begin a generation."""
        self.clock.reset()

    def leave(self, cause: BaseException | None = None) -> None:
        """Tell the peers not to wait for this rank any more."""
        self._traffic.leave(cause)

    def _forget(self) -> None:
        """Begin a generation without references."""
        attention, output = (Ends(coding, self._ranks) for coding in self._codings)
        self._ends = {Kind.KEYS: attention, Kind.OUTPUT: output}
        self._traffic.begin(self.clock.generation)

    def _post(self, what: str, kinds: Kinds, x: Tensor, batch: int, mask: Tensor | None) -> Sent:
        """Send ``x`` [kinds, tokens * batch, width], coded once, to all others, and the mask if any."""
        lengths, ends = self._lengths(x.shape[1] // batch, what), self._ends[kinds[0]]
        with self._traffic.coding():
            data, x_hat = ends.encode(x, self._keys(kinds), self._call.step)
            packets: Packets = [data, *self._mask_packets(mask)]
        kept = Kept(ends, x_hat, self._keys(kinds))
        self._traffic.keep(dict.fromkeys(self._traffic.others, kept))
        posted = self._traffic.post(what, self._key(kinds), self._inputs, packets)
        self._layer += 1
        due = {rank: shapes(x, batch, some) for rank, some in lengths.items()}
        return Sent(posted, kinds, x_hat, batch, mask, dict.fromkeys(self._ranks, ends), due)

    def _collect(self, sent: Sent) -> tuple[list[Tensor], list[Tensor]]:
        """Return what was sent of all ranks, as decoded, and masks if there are any."""
        parts, masks = {self._rank: sent.own}, {self._rank: sent.mask}
        received = self._traffic.collect(sent.posted)
        with self._traffic.coding():
            for rank, (first, *rest) in received.items():
                keys = self._keys(sent.kinds, sent.posted.key._replace(source=rank))
                parts[rank] = self._traffic.decode(
                    sent.posted, sent.ends[rank], rank, first, keys, sent.shapes[rank], sent.own
                )
                if sent.mask is not None:
                    tokens = parts[rank].shape[1] // sent.batch
                    key = sent.posted.key._replace(source=rank, kind=Kind.MASK)
                    masks[rank] = unpack_mask(rest[0], sent.mask, tokens, key.pack())
        return [parts[r] for r in self._ranks], [m for r in self._ranks if (m := masks.get(r)) is not None]

    def _lengths(self, tokens: int, what: str) -> dict[int, set[int]]:
        found = self._shares.lengths(tokens, what)
        return {rank: found[place] for place, rank in enumerate(self._ranks)}

    def _mask_packets(self, mask: Tensor | None) -> list[bytes]:
        return [] if mask is None else [pack_mask(mask, self._key((Kind.MASK,)).pack())]

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
