"""Mode pipe: each rank has some of the blocks, and the picture passes through them in patches.

After some steps at first, a rank attends from one patch to all others as they were at their last turn, one
step ago at most; so all ranks work at the same time, on different patches (PipeFusion, arXiv 2405.14430).
Between ranks the hidden state of a patch travels, coded as what has changed since its last turn. The text is
short, and is computed with every patch: its keys and values are never old.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.engines.diffusion.clock import Call, Clock
from thinwire.engines.diffusion.coding import Coding
from thinwire.engines.diffusion.division import Division
from thinwire.engines.diffusion.ends import Ends
from thinwire.engines.diffusion.host_blocks import Embedded, FluxBlocks, cut, piped
from thinwire.engines.diffusion.inputs import checksum, shapes_of, time_of
from thinwire.engines.diffusion.keys import Key, Kind
from thinwire.engines.diffusion.message import Message
from thinwire.engines.diffusion.seam import NO_GRADIENTS, Attention, Stock
from thinwire.engines.diffusion.tally import Tally
from thinwire.exchange import MeshExchange
from thinwire.types import DesyncError, InputError, LinkError, PayloadError, require

_GENERATION, _CALL = 32, 16  # bits of a message's step below its generation, and below its call
_OUTPUTS = 1 << 15  # the first slot of outputs
MOST_PATCHES = 1024


class Pipe:
    """The passes of one model whose blocks are divided; see ``seam.Passes``."""

    def __init__(
        self, exchange: MeshExchange, attention: Coding, output: Coding, division: Division, deadline: float
    ) -> None:
        self.tally, self.clock = Tally(), Clock()
        self._exchange, self._deadline, self._patches = exchange, deadline, division.patches
        self._ranks = exchange.ranks
        self._place = self._ranks.index(exchange.rank)
        self._codings = attention, output
        self._warmup = max(1, attention.warmup)
        self._calls, self._inputs = 0, 0
        self._forget()

    def attached(self, model: nn.Module) -> AbstractContextManager[None]:
        """Let the calls of ``model`` pass through the ranks inside the block."""
        self._model = FluxBlocks(model)
        self._own = cut(self._model.blocks, len(self._ranks))[self._place]
        return piped(model, self, self)  # type: ignore[arg-type]  # of a session it attends alone

    def reset(self) -> None:
        """Let the next call of the model begin a generation."""
        self.clock.reset()

    def leave(self) -> None:
        """Tell the others not to wait for this rank, in this call and in the one after it."""
        stop = Message(stopped=True).pack()
        here = self._step(0)
        with suppress(LinkError):
            for call in (here, here + (1 << _CALL), self.clock.generation + 1 << _GENERATION):
                for m in range(self._patches):
                    self._exchange.post(call + m, stop)
                    self._exchange.post(call + _OUTPUTS + m, stop)

    def run(self, stream: str | None, inputs: Mapping[str, Any], compute: Callable[[], Any]) -> Any:
        """Return the model's output for these inputs, the same bits on all ranks."""
        require(not torch.is_grad_enabled(), InputError, NO_GRADIENTS)
        call = self.clock.call(stream, time_of(inputs), shapes_of(inputs))
        if call.begins:
            self._forget()
        self._call, self._inputs = call, checksum(inputs)
        embedded = self._model.embed(inputs)
        rows = self._cut(embedded.picture.shape[1])
        if call.step < self._warmup:
            self._pass_whole(embedded, rows)
        else:
            for m, part in enumerate(rows):
                self._hand_on(m, *self._through(*self._taken(m, embedded, part), embedded, part), embedded)
        out = torch.cat([self._output(m, part, embedded, inputs) for m, part in enumerate(rows)], 1)
        self.tally.calls += 1
        self._calls += 1
        return self._model.output(out, inputs)

    def attend(self, layer: str, attention: Attention, stock: Stock) -> Tensor:
        """Return the attention of these tokens to all, those of other patches as of their last turn."""
        text = f"{layer} has a mask, which mode pipe does not take; use mode gather"
        require(attention.mask is None, InputError, text)
        name = (self._call.stream, layer)
        if name not in self._kept:
            self._kept[name] = attention.key.clone(), attention.value.clone()
        n = attention.key.shape[1] - (self._rows.stop - self._rows.start)  # text tokens
        for kept, new in zip(self._kept[name], (attention.key, attention.value), strict=True):
            kept[:, :n] = new[:, :n]
            kept[:, n + self._rows.start : n + self._rows.stop] = new[:, n:]
        key, value = self._kept[name]
        return stock(Attention(attention.query, key, value, None))

    def _forget(self) -> None:
        hidden, output = (Ends(coding, self._ranks) for coding in self._codings)
        self._hidden, self._outputs = hidden, output
        self._kept: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        self._made: dict[int, Tensor] = {}
        self._calls = 0

    def _cut(self, tokens: int) -> list[slice]:
        text = f"{self._patches} patches are more than the picture's {tokens} tokens; give fewer patches"
        require(tokens >= self._patches, InputError, text)
        ends = [tokens * (m + 1) // self._patches for m in range(self._patches)]
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def _through(
        self, text: Tensor, picture: Tensor, embedded: Embedded, rows: slice
    ) -> tuple[Tensor, Tensor]:
        self._rows = rows
        return self._model.run(self._own, text, picture, embedded, rows)

    def _pass_whole(self, embedded: Embedded, rows: list[slice]) -> None:
        """Take all patches before the blocks run: nothing of another step is used."""
        taken = [self._taken(m, embedded, part) for m, part in enumerate(rows)]
        whole = torch.cat([picture for _, picture in taken], 1)
        text, picture = self._through(taken[0][0], whole, embedded, slice(0, whole.shape[1]))
        for m, part in enumerate(rows):
            self._hand_on(m, text, picture[:, part], embedded)

    def _taken(self, m: int, embedded: Embedded, rows: slice) -> tuple[Tensor, Tensor]:
        """Return text and a patch as the rank before has left them."""
        if self._place == 0:
            return embedded.text, embedded.picture[:, rows]
        n, like = embedded.text.shape[1], embedded.picture
        shape = (like.shape[0], n + rows.stop - rows.start, like.shape[2])
        both = self._received(self._ranks[self._place - 1], m, Kind.HIDDEN, m, shape, like)
        return both[:, :n], both[:, n:]

    def _hand_on(self, m: int, text: Tensor, picture: Tensor, embedded: Embedded) -> None:
        """Send a patch to the next rank, or the output that is made of it to all."""
        if self._place < len(self._ranks) - 1:
            both = torch.cat((text, picture), 1)
            self._send([self._ranks[self._place + 1]], m, Kind.HIDDEN, m, both)
            return
        out = self._model.finish(picture, embedded)
        others = [rank for rank in self._ranks if rank != self._exchange.rank]
        before = self.tally.nbytes
        self._made[m] = self._send(others, _OUTPUTS + m, Kind.OUTPUT, m, out)
        self.tally.output_nbytes += self.tally.nbytes - before

    def _output(self, m: int, rows: slice, embedded: Embedded, inputs: Mapping[str, Any]) -> Tensor:
        if self._place == len(self._ranks) - 1:
            return self._made.pop(m)
        x: Tensor = inputs["hidden_states"]
        shape = (x.shape[0], rows.stop - rows.start, x.shape[2])
        return self._received(self._ranks[-1], _OUTPUTS + m, Kind.OUTPUT, m, shape, x)

    def _send(self, to: list[int], slot: int, kind: Kind, m: int, x: Tensor) -> Tensor:
        """Send a tensor; return what the others will decode."""
        start = perf_counter()
        ends = self._hidden if kind == Kind.HIDDEN else self._outputs
        key = self._key(kind, m, self._exchange.rank)
        data, x_hat = ends.encode(x.reshape(1, -1, x.shape[-1]), [key], self._call.step)
        body = Message(key, self._inputs, [data]).pack()
        self.tally.code_s += perf_counter() - start
        self._exchange.scatter(self._step(slot), dict.fromkeys(to, body))
        self.tally.exchanges += 1
        self.tally.nbytes += len(body) * len(to)
        return x_hat.reshape(x.shape).to(x.dtype)

    def _received(
        self, rank: int, slot: int, kind: Kind, m: int, shape: tuple[int, ...], like: Tensor
    ) -> Tensor:
        start = perf_counter()
        message = Message.unpack(self._exchange.receive(rank, self._step(slot), self._deadline))
        came = perf_counter()
        self.tally.wait_s += came - start
        message.check_sender(rank)
        text = f"rank {rank} called the model with other inputs; give all ranks one prompt, seed and schedule"
        require(message.inputs == self._inputs, InputError, text)
        key = self._key(kind, m, rank)
        text = f"rank {rank} is at another patch than here; call the model alike on all ranks"
        require(message.key == key, DesyncError, text)
        require(
            len(message.packets) == 1, PayloadError, f"rank {rank} sent {len(message.packets)} packets, not 1"
        )
        ends = self._hidden if kind == Kind.HIDDEN else self._outputs
        rows = (1, shape[0] * shape[1], shape[2])
        x = ends.decode(rank, message.packets[0], [key], [rows], like)
        self.tally.code_s += perf_counter() - came
        return x.reshape(shape).to(like.dtype)

    def _key(self, kind: Kind, m: int, source: int) -> int:
        return Key(self._call.stream, m, kind, source).pack()

    def _step(self, slot: int) -> int:
        return (self.clock.generation << _GENERATION) + (self._calls << _CALL) + slot

    _call = Call(0, 0, True)
    _rows = slice(0, 0)
