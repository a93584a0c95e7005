"""Mode guidance: of the two forward passes of a step, each of two ranks computes one.

A rank gets the first pass of a step from the other as values that come later: they are awaited after its own
pass, or where somebody reads them before. So the passes run at the same time. A step of one pass, or of
three, gives the same values and gains less.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from thinwire.collectives import MeshExchange
from thinwire.types import InputError, require
from thinwire.uses.pictures.coding import Coding
from thinwire.uses.pictures.context_parallel.modes import Division
from thinwire.uses.pictures.context_parallel.whole_outputs import WholeOutputs
from thinwire.uses.pictures.diffusers_names.hooks import intercepted
from thinwire.uses.pictures.diffusers_names.interfaces import Given
from thinwire.uses.pictures.diffusers_names.plans import SplitPlan
from thinwire.uses.pictures.messages import Posted, SentValues
from thinwire.uses.pictures.model_calls import CallInputs, ModelCall, shapes_of
from thinwire.uses.pictures.rank_message import Key, TensorKind

Outputs = Sequence[Tensor]


class GuidanceParallel(WholeOutputs):
    """The outputs of one model, of which this rank computes every other one; a ``WholeForward``."""

    def __init__(
        self, exchange: MeshExchange, attention: Coding, output: Coding, division: Division, deadline: float
    ) -> None:
        n = len(exchange.ranks)
        text = f"mode guidance is for 2 ranks, one for each forward pass of a step, not for {n}; start 2"
        require(n == 2, InputError, f"{text}, or use mode batch")
        super().__init__(exchange, output, deadline)
        self._outputs: dict[Hashable, tuple[Any, Outputs]] = {}  # how those of a stream look

    def attached(self, model: nn.Module, plan: SplitPlan | None = None) -> AbstractContextManager[None]:
        """Let the calls of ``model`` exchange inside the block."""
        return intercepted(model, self)

    def run(self, given: Given, compute: Callable[..., Any]) -> Any:
        """Return the model's output for these inputs, by ``compute`` or from the other rank."""
        inputs, seen = given.inputs, CallInputs.of(given.inputs)
        self._begin(given, shapes_of(inputs), seen.time)
        call = self._call
        look = call.stream, shapes_of(inputs)
        check = self._inquiry.note(self.clock.generation, seen.sums)
        mine = self._ranks[call.stream % 2] == self._rank
        made = compute() if mine or look not in self._outputs else None
        if made is not None:
            self._outputs[look] = self._taken_apart(made)
        form, like = self._outputs[look]
        found = self._own(call, like, check) if mine else self._others(call, like, check)
        self._exchange.end()
        self._ended = True
        return tree_unflatten(list(found), form)

    def _forget(self) -> None:
        super()._forget()
        self._later: Outputs = ()

    def _await(self) -> None:
        """Take what was to come later, if nobody has read it."""
        later, self._later = self._later, ()
        for x in later:
            if isinstance(x, Later):
                x.fill()

    def _own(self, call: ModelCall, outputs: Outputs, check: int) -> Outputs:
        """Send what this rank has computed; take what was due for the pass before."""
        keys = self._keys(call, len(outputs), self._rank)
        with self._exchange.coding():
            coded = [
                self._ends.encode(_rows(x), [key.pack()], call.step)
                for x, key in zip(outputs, keys, strict=True)
            ]
        kept = SentValues(self._ends, coded[0][1], [keys[0].pack()]) if len(coded) == 1 else None
        self._exchange.post("an output", keys[0], check, [packet for packet, _ in coded], kept)
        self._await()
        pairs = zip(outputs, (x_hat for _, x_hat in coded), strict=True)
        return [x_hat.reshape(x.shape).to(x.dtype, copy=True) for x, x_hat in pairs]  # the caller may write

    def _others(self, call: ModelCall, like: Outputs, check: int) -> Outputs:
        """Return what the other rank computes, or will have where it is read."""
        self._await()  # what a step of one pass left
        keys = self._keys(call, len(like), self._exchange.others[0])
        due = self._exchange.due("an output", keys[0], check, len(like))
        if call.stream:
            return self._received(due, keys, like)
        self._later = Later.all_like(like, lambda: self._received(due, keys, like))
        return self._later

    def _received(self, due: Posted, keys: Sequence[Key], like: Outputs) -> Outputs:
        ((rank, packets),) = self._exchange.collect(due, like[0].device).items()
        found = []
        with self._exchange.coding():
            for x, key, packet in zip(like, keys, packets, strict=True):
                shapes = [tuple(_rows(x).shape)]
                got = self._exchange.decode(due, self._ends, rank, packet, [key.pack()], shapes, x)
                found.append(got.reshape(x.shape).to(x.dtype, copy=True))
            self._exchange.settle()  # here, since the caller may read them after the call
        return found

    def _keys(self, call: ModelCall, outputs: int, source: int) -> list[Key]:
        return [Key(call.stream, i, TensorKind.OUTPUT, source) for i in range(outputs)]

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


_ABOUT = {"size", "dim", "ndimension", "numel", "stride", "is_floating_point", "is_complex", "element_size"}
_VIEWS = {
    *("chunk", "split", "tensor_split", "unbind", "narrow", "select", "__getitem__", "movedim", "expand"),
    *("view", "view_as", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose", "permute"),
    *("to", "detach", "contiguous", "float", "type", "type_as", "__get__"),  # if they leave it as it is
}


class Later(Tensor):
    """What ``like`` returns; views of it get their values with it."""

    filled: Filled

    @staticmethod
    def all_like(xs: Sequence[Tensor], values: Callable[[], Sequence[Tensor]]) -> list[Later]:
        """Return tensors of the shapes, types and devices of ``xs``, with ``values()`` once one is read."""
        empty = [torch.empty_like(x) for x in xs]

        def fill() -> None:
            for x, value in zip(empty, values(), strict=True):
                x.copy_(value)

        filled = Filled(fill)
        return [_marked(x, filled) for x in empty]

    def fill(self) -> None:
        """Let it have its values; from now on it is a tensor like any other."""
        self.filled.now()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = tree_flatten((args, kwargs))[0]
        waiting = [x for x in given if isinstance(x, Later) and not x._has_values()]
        with torch._C.DisableTorchFunctionSubclass():
            name = func.__name__
            if waiting and name in _ABOUT:
                return func(*args, **(kwargs or {}))
            if waiting and name in _VIEWS:
                made = func(*args, **(kwargs or {}))
                parts = [x for x in tree_flatten(made)[0] if isinstance(x, Tensor)]
                if all(_views(x, waiting) for x in parts):
                    filled = waiting[0].filled
                    return tree_map(lambda x: _marked(x, filled) if isinstance(x, Tensor) else x, made)
            for x in waiting:
                x.fill()
            return func(*args, **(kwargs or {}))

    def _has_values(self) -> bool:
        filled = self.__dict__.get("filled")
        return filled is None or filled.done


def _marked(x: Tensor, filled: Filled) -> Later:
    later = x.as_subclass(Later)
    later.filled = filled
    return later


def _views(x: Tensor, waiting: Iterable[Tensor]) -> bool:
    own = x.untyped_storage().data_ptr()
    return any(own == other.untyped_storage().data_ptr() for other in waiting)


class Filled:
    """What brings the values of a tensor and of all views of it, until it has."""

    def __init__(self, fill: Callable[[], None]) -> None:
        self._fill: Callable[[], None] | None = fill

    @property
    def done(self) -> bool:
        return self._fill is None

    def now(self) -> None:
        """Wait for the values, unless they are there."""
        if self._fill is not None:
            self._fill()
            self._fill = None
