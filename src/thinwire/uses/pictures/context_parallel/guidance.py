"""Mode guidance: of the two forward passes of a step, each of two ranks computes one.

A rank gets the first pass of a step from the other as values that come later: they are awaited after its own
pass, or where somebody reads them before. So the passes run at the same time. A step of one pass, or of
three, gives the same values and gains less.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from thinwire.collectives import MeshExchange
from thinwire.types import InputError, LinkError, require
from thinwire.uses.pictures.context_parallel import host
from thinwire.uses.pictures.context_parallel.clock import Call, Clock
from thinwire.uses.pictures.context_parallel.coding import Coding
from thinwire.uses.pictures.context_parallel.division import Division
from thinwire.uses.pictures.context_parallel.ends import Ends
from thinwire.uses.pictures.context_parallel.host_plan import Plan
from thinwire.uses.pictures.context_parallel.inputs import shapes_of, time_of
from thinwire.uses.pictures.context_parallel.keys import Key, Kind
from thinwire.uses.pictures.context_parallel.later import Later
from thinwire.uses.pictures.context_parallel.repairs import Kept
from thinwire.uses.pictures.context_parallel.seam import Given
from thinwire.uses.pictures.context_parallel.traffic import Posted, Traffic
from thinwire.uses.pictures.context_parallel.weights import Weights

Outputs = Sequence[Tensor]


class Guidance:
    """The outputs of one model, of which this rank computes every other one; see ``seam.Passes``."""

    def __init__(
        self, exchange: MeshExchange, attention: Coding, output: Coding, division: Division, deadline: float
    ) -> None:
        n = len(exchange.ranks)
        text = f"mode guidance is for 2 ranks, one for each forward pass of a step, not for {n}; start 2"
        require(n == 2, InputError, f"{text}, or use mode batch")
        self.clock, self._traffic, self._coding = Clock(), Traffic(exchange, deadline), output
        self.tally = self._traffic.tally
        self._ranks, self._rank = exchange.ranks, exchange.rank
        self._outputs: dict[Hashable, tuple[Any, Outputs]] = {}  # how those of a stream look
        self._ended = True
        self._forget()

    def attached(self, model: nn.Module, plan: Plan | None = None) -> AbstractContextManager[None]:
        """Let the calls of ``model`` exchange inside the block."""
        return host.intercepted(model, self)

    def watch(self, weights: Weights) -> None:
        """Compare these weights with the other rank's in each call."""
        self._traffic.inquiry.watch(weights)

    def run(self, given: Given, compute: Callable[[], Any]) -> Any:
        """Return the model's output for these inputs, by ``compute`` or from the other rank."""
        inputs = given.inputs
        if not self._ended:
            self._abandon()
            self.clock.reset()
        self._ended = False
        call = self.clock.call(given.stream, time_of(inputs), shapes_of(inputs))
        if call.begins:
            self._forget()
        given.check()
        self._await()
        look = call.stream, shapes_of(inputs)
        check = self._traffic.inquiry.note(self.clock.generation, inputs)
        mine = self._ranks[call.stream % 2] == self._rank
        made = compute() if mine or look not in self._outputs else None
        if made is not None:
            self._outputs[look] = self._taken_apart(made)
        form, like = self._outputs[look]
        found = self._own(call, like, check) if mine else self._others(call, like, check)
        self.tally.calls += 1
        self._ended = True
        return tree_unflatten(list(found), form)

    def fail(self, cause: BaseException) -> None:
        """Tell the peer at once that a call of the model has failed."""
        with suppress(LinkError):
            self._abandon(cause)

    def reset(self) -> None:
        """Let the next call of the model begin a generation."""
        self.clock.reset()

    def leave(self, cause: BaseException | None = None) -> None:
        """Tell the peer not to wait for this rank any more."""
        with suppress(LinkError):
            self._abandon(cause)
        self._traffic.leave(cause)
        with suppress(LinkError):
            self._abandon(cause)

    def _abandon(self, cause: BaseException | None = None) -> None:
        """Tell the peer, who may wait for this pass or for the next, that none comes."""
        for _ in range(2):
            self._traffic.abandon(cause)
            self._traffic.skip()

    def _forget(self) -> None:
        self._ends = Ends(self._coding, self._traffic.others)
        self._later: Outputs = ()
        self._traffic.begin(self.clock.generation)

    def _await(self) -> None:
        """Take what was to come later, if nobody has read it."""
        later, self._later = self._later, ()
        for x in later:
            if isinstance(x, Later):
                x.fill()

    def _own(self, call: Call, outputs: Outputs, check: int) -> Outputs:
        """Send what this rank has computed; take what was due for the pass before."""
        keys = self._keys(call, len(outputs), self._rank)
        with self._traffic.coding():
            coded = [
                self._ends.encode(_rows(x), [key.pack()], call.step)
                for x, key in zip(outputs, keys, strict=True)
            ]
        if len(coded) == 1:
            kept = Kept(self._ends, coded[0][1], [keys[0].pack()])
            self._traffic.keep({self._traffic.others[0]: kept})
        self._traffic.post("an output", keys[0], check, [data for data, _ in coded])
        self.tally.output_nbytes = self.tally.nbytes
        self._await()
        return [x_hat.reshape(x.shape).to(x.dtype) for x, (_, x_hat) in zip(outputs, coded, strict=True)]

    def _others(self, call: Call, like: Outputs, check: int) -> Outputs:
        """Return what the other rank computes, or will have where it is read."""
        keys = self._keys(call, len(like), self._traffic.others[0])
        due = self._traffic.due("an output", keys[0], check, len(like))
        if call.stream:
            return self._received(due, keys, like)
        self._later = Later.all_like(like, lambda: self._received(due, keys, like))
        return self._later

    def _received(self, due: Posted, keys: Sequence[Key], like: Outputs) -> Outputs:
        ((rank, packets),) = self._traffic.collect(due).items()
        found = []
        with self._traffic.coding():
            for x, key, data in zip(like, keys, packets, strict=True):
                shapes = [tuple(_rows(x).shape)]
                got = self._traffic.decode(due, self._ends, rank, data, [key.pack()], shapes, x)
                found.append(got.reshape(x.shape).to(x.dtype))
        return found

    def _keys(self, call: Call, outputs: int, source: int) -> list[Key]:
        return [Key(call.stream, i, Kind.OUTPUT, source) for i in range(outputs)]

    def _taken_apart(self, output: Any) -> tuple[Any, Outputs]:
        """Return the form of what the model returned, and the tensors in it."""
        leaves, form = tree_flatten(output)
        text = "the model returns more than tensors, which mode guidance does not send; use mode batch"
        require(bool(leaves) and all(isinstance(x, Tensor) for x in leaves), InputError, text)
        fits = len(leaves) == 1 or not self._ends.remember
        text = f"the model returns {len(leaves)} tensors, which go without residuals alone in mode guidance"
        require(fits, InputError, f"{text}; use the recipe guidance")
        return form, leaves


def _rows(x: Tensor) -> Tensor:
    return x.reshape(1, -1, x.shape[-1])
