"""Mode gather: each rank computes its share of the tokens, and has the keys and values of all.

Own keys and values stay exact; they are coded once, for all peers. The joined output is coded as well, and
every rank takes the decoded values for its own share too: so the latents are the same bits on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from time import perf_counter

import torch
from torch import Tensor, nn

from thinwire.engines.diffusion import host
from thinwire.engines.diffusion.clock import Call, Clock
from thinwire.engines.diffusion.coding import Coding
from thinwire.engines.diffusion.division import Division
from thinwire.engines.diffusion.ends import Ends, pack_mask, unpack_mask
from thinwire.engines.diffusion.host import Attention
from thinwire.engines.diffusion.inputs import checksum, shapes_of, time_of
from thinwire.engines.diffusion.keys import Key, Kind
from thinwire.engines.diffusion.message import Message
from thinwire.engines.diffusion.shares import Shares
from thinwire.engines.diffusion.tally import Tally
from thinwire.exchange import MeshExchange
from thinwire.types import DesyncError, InputError, LinkError, PayloadError, require

_GENERATION = 32  # bits of an exchange's step below the number of its generation
Packets = list[bytes | memoryview]


class Gather:
    """The exchanges of one model, which ``host.attached`` lets it make; see ``host.Session``."""

    def __init__(
        self, exchange: MeshExchange, attention: Coding, output: Coding, division: Division, deadline: float
    ) -> None:
        self.tally, self.clock = Tally(), Clock()
        self._exchange, self._rank, self._deadline = exchange, exchange.rank, deadline
        self._shares = Shares(exchange.ranks.index(exchange.rank), len(exchange.ranks))
        self._codings = attention, output
        self._call, self._inputs = Call(0, 0, True), 0
        self._layer = 0  # exchanges of this call so far
        self._number = 0  # exchanges of this generation so far
        self._forget()

    def attached(self, model: nn.Module) -> AbstractContextManager[None]:
        """Let the calls of ``model`` exchange inside the block."""
        return host.attached(model, self)

    def begin(self, stream: str | None, inputs: Mapping[str, object]) -> None:
        """Begin a call of the model, with the whole inputs."""
        text = "a model over several ranks has no gradients; call it under torch.no_grad()"
        require(not torch.is_grad_enabled(), InputError, text)
        self._call = self.clock.call(stream, time_of(inputs), shapes_of(inputs))
        if self._call.begins:
            self._forget()
        self._inputs, self._layer = checksum(inputs), 0
        self._shares.clear()

    def cut(self, name: str, x: Tensor, dim: int) -> Tensor:
        """Return this rank's share of an input along ``dim``."""
        return self._shares.cut(name, x, dim)

    def attend(self, layer: str, attention: Attention, stock: host.Stock) -> Tensor:
        """Return what this rank's queries find among the keys and values of all ranks."""
        keys, values, mask = self._whole(layer, attention)
        return stock(attention._replace(key=keys, value=values, mask=mask))

    def _whole(self, layer: str, attention: Attention) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys and values [B, tokens, heads, channels] of all ranks, and their mask [..., tokens]."""
        _, key, value, mask = attention
        _check(layer, key, value, mask)
        x = torch.stack([_rows(key.transpose(0, 1)), _rows(value.transpose(0, 1))])
        batch, width = key.shape[0], key.shape[2:]
        parts, masks = self._swap(layer, (Kind.KEYS, Kind.VALUES), x, batch, mask)
        pairs = [p.reshape(2, -1, batch, *width).transpose(1, 2).to(key.dtype) for p in parts]
        pairs[self._shares.rank] = torch.stack([key, value])
        keys, values = torch.cat(pairs, 2)
        return keys, values, torch.cat(masks, -1) if masks else None

    def join(self, x: Tensor, dim: int) -> Tensor:
        """Return the outputs of all ranks along ``dim``, as every rank decodes them."""
        moved, before = x.movedim(dim, 0), self.tally.nbytes
        parts, _ = self._swap("the output", (Kind.OUTPUT,), _rows(moved)[None], moved.shape[1], None)
        self.tally.output_nbytes += self.tally.nbytes - before
        whole = torch.cat([p.reshape(-1, *moved.shape[1:]) for p in parts])
        return whole.to(x.dtype).movedim(0, dim)

    def end(self) -> None:
        """End a call of the model."""
        self.tally.calls += 1

    def reset(self) -> None:
        """Let the next call of the model begin a generation."""
        self.clock.reset()

    def leave(self) -> None:
        """Tell the peers not to wait for this rank, in this picture and at the beginning of the next."""
        with suppress(LinkError):
            for step in (self._step, self.clock.generation + 1 << _GENERATION):
                self._exchange.post(step, Message(stopped=True).pack())

    @property
    def _step(self) -> int:
        return self.clock.generation << _GENERATION | self._number

    def _forget(self) -> None:
        attention, output = (Ends(coding, self._exchange.ranks) for coding in self._codings)
        self._ends = {Kind.KEYS: attention, Kind.OUTPUT: output}
        self._number = 0

    def _swap(
        self, what: str, kinds: tuple[Kind, ...], x: Tensor, batch: int, mask: Tensor | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return ``x`` [kinds, tokens * batch, width] of all ranks as decoded, and masks if there are any."""
        lengths = self._shares.lengths(x.shape[1] // batch, what)
        ends, own = self._ends[kinds[0]], self._keys(kinds, self._rank)
        with self._coding():
            data, x_hat = ends.encode(x, own, self._call.step)
            packets: Packets = [data]
            packets += [] if mask is None else [pack_mask(mask, *self._keys((Kind.MASK,), self._rank))]
        parts, masks = {self._rank: x_hat}, {self._rank: mask}
        received = self._trade(what, kinds, packets)
        with self._coding():
            for place, (rank, (first, *rest)) in zip(self._others(), received.items(), strict=True):
                shapes = [(len(x), n * batch, x.shape[2]) for n in lengths[place]]
                parts[rank] = ends.decode(rank, first, self._keys(kinds, rank), shapes, x)
                if mask is not None:
                    tokens = parts[rank].shape[1] // batch
                    masks[rank] = unpack_mask(rest[0], mask, tokens, *self._keys((Kind.MASK,), rank))
        self._layer += 1
        ranks = self._exchange.ranks
        return [parts[r] for r in ranks], [m for r in ranks if (m := masks.get(r)) is not None]

    def _others(self) -> list[int]:
        return [place for place in range(len(self._exchange.ranks)) if place != self._shares.rank]

    def _keys(self, kinds: tuple[Kind, ...], source: int) -> list[int]:
        return [Key(self._call.stream, self._layer, kind, source).pack() for kind in kinds]

    def _trade(self, what: str, kinds: tuple[Kind, ...], packets: Packets) -> dict[int, Packets]:
        """Send the packets to all peers, and return theirs."""
        key, step = self._keys(kinds, self._rank)[0], self._step
        data = Message(key, self._inputs, packets).pack()
        self._exchange.post(step, data)
        self._number += 1
        self.tally.exchanges += 1
        self.tally.nbytes += len(data) * (len(self._exchange.ranks) - 1)
        start = perf_counter()
        received = self._exchange.collect(step, self._deadline)
        self.tally.wait_s += perf_counter() - start
        messages = {rank: Message.unpack(body) for rank, body in received.items()}
        for rank, message in messages.items():
            self._check(rank, message, what, kinds, len(packets))
        return {rank: list(message.packets) for rank, message in messages.items()}

    def _check(self, rank: int, message: Message, what: str, kinds: tuple[Kind, ...], count: int) -> None:
        message.check_sender(rank)
        text = f"rank {rank} called the model with other inputs; give all ranks one prompt, seed and schedule"
        require(message.inputs == self._inputs, InputError, text)
        text = f"rank {rank} is at another layer than {what} here; call the model alike on all ranks"
        require(message.key == self._keys(kinds, rank)[0], DesyncError, text)
        text = f"rank {rank} sent {len(message.packets)} packets for {what}, where {count} are due"
        require(len(message.packets) == count, PayloadError, text)

    @contextmanager
    def _coding(self) -> Iterator[None]:
        start = perf_counter()
        yield
        self.tally.code_s += perf_counter() - start


def _rows(x: Tensor) -> Tensor:
    """Return ``x`` [tokens, B, ...] as [tokens * B, channels]."""
    return x.reshape(x.shape[0] * x.shape[1], -1)


def _check(layer: str, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    text = f"{layer} has keys of shape {tuple(key.shape)} and values of {tuple(value.shape)}; use mode one"
    require(key.shape == value.shape, InputError, text)
    if mask is not None:
        text = f"the mask of {layer}, {tuple(mask.shape)}, is not over its {key.shape[1]} keys; use mode one"
        by_key = mask.shape[-1] == key.shape[1] and (mask.dim() == 2 or mask.shape[-2] == 1)
        require(by_key, InputError, text)
