"""Mode guidance: of the two forward passes of a step, each of two ranks computes one.

A rank whose pass is the second returns something for the first one that has no values yet; they are filled
in during the second, before anybody needs them. So the passes run at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from thinwire.engines.diffusion import host
from thinwire.engines.diffusion.clock import Call, Clock
from thinwire.engines.diffusion.coding import Coding
from thinwire.engines.diffusion.division import Division
from thinwire.engines.diffusion.ends import Ends
from thinwire.engines.diffusion.inputs import checksum, shapes_of, time_of
from thinwire.engines.diffusion.keys import Key, Kind
from thinwire.engines.diffusion.later import Later
from thinwire.engines.diffusion.repairs import Kept
from thinwire.engines.diffusion.seam import NO_GRADIENTS
from thinwire.engines.diffusion.traffic import Posted, Traffic
from thinwire.exchange import MeshExchange
from thinwire.types import InputError, require

_OTHERWISE = "mode guidance is for two forward passes a step, and this is {}; use mode gather"


class Guidance:
    """The outputs of one model, of which this rank computes every other one; see ``seam.Passes``."""

    def __init__(
        self, exchange: MeshExchange, attention: Coding, output: Coding, division: Division, deadline: float
    ) -> None:
        n = len(exchange.ranks)
        text = (
            f"mode guidance is for 2 ranks, one for each forward pass of a step, not for {n}; use mode gather"
        )
        require(n == 2, InputError, text)
        self.clock, self._traffic, self._coding = Clock(), Traffic(exchange, deadline), output
        self.tally = self._traffic.tally
        self._ranks, self._rank = exchange.ranks, exchange.rank
        self._outputs: dict[Hashable, tuple[Any, Tensor]] = {}  # how those of a stream look
        self._ended = True
        self._forget()

    def attached(self, model: nn.Module) -> AbstractContextManager[None]:
        """Let the calls of ``model`` exchange inside the block."""
        return host.intercepted(model, self)

    def run(self, stream: str | None, inputs: Mapping[str, object], compute: Callable[[], Any]) -> Any:
        """Return the model's output for these inputs, by ``compute`` or from the other rank."""
        require(not torch.is_grad_enabled(), InputError, NO_GRADIENTS)
        if not self._ended:
            self._traffic.abandon()
            self.clock.reset()
        self._ended = False
        call = self._count(self.clock.call(stream, time_of(inputs), shapes_of(inputs)))
        look, check = (call.stream, shapes_of(inputs)), checksum(inputs)
        mine = self._ranks[call.stream] == self._rank
        made = compute() if mine or look not in self._outputs else None
        if made is not None:
            self._outputs[look] = self._taken_apart(made)
        form, like = self._outputs[look]
        x = self._own(call, like, check) if mine else self._others(call, like, check)
        self.tally.calls += 1
        self._ended = True
        return tree_unflatten([x], form)

    def reset(self) -> None:
        """Let the next call of the model begin a generation."""
        self.clock.reset()

    def leave(self) -> None:
        """Tell the peer not to wait for this rank any more."""
        self._traffic.leave()

    def _forget(self) -> None:
        self._ends = Ends(self._coding, self._traffic.others)
        self._step, self._streams = 0, 0
        self._posted: Posted | None = None
        self._later: tuple[Later, Key, int] | None = None
        self._traffic.begin(self.clock.generation)

    def _count(self, call: Call) -> Call:
        """Check that the streams of a step are two, in one order."""
        if call.begins:
            self._forget()
        elif call.step != self._step:
            require(self._streams == 2, InputError, _OTHERWISE.format("one with one"))
            self._step, self._streams = call.step, 0
        require(call.stream == self._streams < 2, InputError, _OTHERWISE.format("one with more"))
        self._streams += 1
        return call

    def _own(self, call: Call, x: Tensor, check: int) -> Tensor:
        """Send what this rank has computed; take what was due for the pass before."""
        key = self._key(call, self._rank)
        with self._traffic.coding():
            data, x_hat = self._ends.encode(_rows(x), [key.pack()], call.step)
        self._traffic.keep({self._traffic.others[0]: Kept(self._ends, x_hat, [key.pack()])})
        self._posted = self._traffic.post("an output", key, check, [data])
        self.tally.output_nbytes = self.tally.nbytes
        if self._later is not None:
            later, due, inputs = self._later
            later.fill(self._received(due, inputs, call.step, later))
            self._later = None
        return x_hat.reshape(x.shape).to(x.dtype)

    def _others(self, call: Call, like: Tensor, check: int) -> Tensor:
        """Return what the other rank has computed, or will have at the end of the step."""
        key = self._key(call, self._traffic.others[0])
        if call.stream == 1:
            return self._received(key, check, call.step, like)
        later = Later.like(like)
        self._later = later, key, check
        return later

    def _received(self, key: Key, inputs: int, step: int, like: Tensor) -> Tensor:
        if self._posted is None:
            raise InputError(_OTHERWISE.format("one in another order"))
        due = replace(self._posted, key=key, inputs=inputs)
        ((rank, packets),) = self._traffic.collect(due).items()
        with self._traffic.coding():
            shape = tuple(_rows(like).shape)
            x = self._traffic.decode(due, self._ends, rank, packets[0], [key.pack()], [shape], like)
        return x.reshape(like.shape).to(like.dtype)

    def _key(self, call: Call, source: int) -> Key:
        return Key(call.stream, 0, Kind.OUTPUT, source)

    def _taken_apart(self, output: Any) -> tuple[Any, Tensor]:
        """Return the form of what the model returned, and the one tensor in it."""
        leaves, form = tree_flatten(output)
        one = len(leaves) == 1 and isinstance(leaves[0], Tensor)
        text = f"the model returns {len(leaves)} values, where mode guidance takes one; use mode gather"
        require(one, InputError, text)
        return form, leaves[0]


def _rows(x: Tensor) -> Tensor:
    return x.reshape(1, -1, x.shape[-1])
