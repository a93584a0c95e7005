"""Hooks on the blocks of a transformer: a rank's own run, and streams pass by the others.

The model's own forward runs once for each patch of the picture, or once for all of them. What stands around
the blocks is computed by each rank, which is little.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from thinwire.types import InputError, require
from thinwire.uses.pictures.diffusers_names.hooks import (
    HookedModules,
    Instead,
    hook_of,
    hooked,
    listening,
    uncompiled,
)
from thinwire.uses.pictures.diffusers_names.interfaces import WholeForward
from thinwire.uses.pictures.diffusers_names.pipe_plans import (
    PipedBlock,
    PipePlan,
    blocks_of,
    patch_split,
    pipe_plan_of,
)
from thinwire.uses.pictures.diffusers_names.plan_entries import SharedOutput
from thinwire.uses.pictures.diffusers_names.plans import SplitPlan, modules_of, whole_of
from thinwire.uses.pictures.diffusers_names.tested_version import Hook, check_host


class PipedForward(Protocol):
    """What the blocks of a model call, in the order in which they run."""

    def at_block(self, number: int, streams: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return what a block takes: at the first one of a rank, what the rank before has sent."""
        ...

    def begin_block(self, number: int) -> None:
        """Note that a block begins."""
        ...

    def owns(self, number: int) -> bool:
        """Say whether a block is this rank's."""
        ...

    def done(self, number: int) -> None:
        """Note that a block of this rank has run."""
        ...

    def again(self) -> bool:
        """Say whether this is a later patch of the same call."""
        ...

    def share(self, x: Tensor) -> Tensor:
        """Return an output that the last rank alone has."""
        ...


_NAMES = ("cut", "attend", "join", "at_block", "begin_block", "owns", "done", "again", "share")


@contextmanager
def piped(
    model: nn.Module, passes: WholeForward, session: PipedForward, given: SplitPlan | None = None
) -> Iterator[None]:
    """Let ``passes`` stand in for the calls of ``model``, and ``session`` for its blocks, inside the block.

    Errors: ``InputError``, one sentence, for a model whose blocks or tokens are not known here.
    """
    check_host()
    plan, split, blocks = pipe_plan_of(model), patch_split(model, given), blocks_of(model)
    own: Any = uncompiled(session, _NAMES)
    with ExitStack() as undo:
        whole = whole_of(model, split)
        undo.enter_context(listening(model, own, whole))
        for number, block in enumerate(blocks):
            undo.callback(hooked(block.module, BlockHook(own, number, block), "pipe"))
        extra = (part for path in plan.everywhere for part in modules_of(model, path))
        for number, part in enumerate(extra, len(blocks)):
            undo.callback(hooked(part, EachRankHook(own, number), "pipe"))
        for path in plan.once:
            for part in modules_of(model, path):
                undo.callback(hooked(part, OnceHook(own), "once"))
        standing = HookedModules(model, own, split, whole)
        for path, parts in standing.places.items():
            shared = isinstance(split[path], SharedOutput)
            for part in parts:
                undo.callback(hooked(part, SharedHook(own) if shared else hook_of(own, split[path]), path))
        undo.callback(hooked(model, PipedCalls(passes, model, plan, standing), "calls"))
        yield


class PipedCalls(Instead):
    """Let the session run the model once for each patch."""

    def __init__(
        self, session: WholeForward, model: nn.Module, plan: PipePlan, standing: HookedModules
    ) -> None:
        super().__init__(session, model)
        self._never, self._standing = plan.never, standing

    def _check(self, module: nn.Module, inputs: Mapping[str, Any]) -> None:
        super()._check(module, inputs)
        self._standing.check(module)
        given = [name for name in self._never if inputs.get(name)]
        text = f"mode pipe does not take {', '.join(given)}; leave it out, or use mode gather"
        require(not given, InputError, text)


class BlockHook(Hook):
    """Run a block of this rank, or hand on what it would take."""

    def __init__(self, session: Any, number: int, block: PipedBlock) -> None:
        self._session, self._number, self._block = session, number, block
        self._signature = signature_of(block.module)
        lacks = [name for name in block.streams if name not in self._signature.parameters]
        text = f"{block.path} takes no {', '.join(lacks)}, as it did in diffusers 0.42; pin 0.42.1"
        require(not lacks, InputError, text)

    @torch.compiler.disable(recursive=False)  # else each block is compiled anew, for its number
    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        bound = self._signature.bind(*args, **kwargs)
        streams = {name: bound.arguments[name] for name in self._block.streams}
        streams = self._session.at_block(self._number, streams)
        if not self._session.owns(self._number):
            returns = self._block.returns
            return streams[returns] if isinstance(returns, str) else tuple(streams[name] for name in returns)
        bound.arguments.update(streams)
        made = self.fn_ref.original_forward(*bound.args, **bound.kwargs)
        self._session.done(self._number)
        return made


class EachRankHook(Hook):
    """Run a block that each rank has, and which attends as the others do."""

    def __init__(self, session: Any, number: int) -> None:
        self._session, self._number = session, number

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], Any]:
        self._session.begin_block(self._number)
        return args, kwargs


class OnceHook(Hook):
    """Return for later patches of a call what a module has returned for the first."""

    def __init__(self, session: Any) -> None:
        self._session, self._made = session, None

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self._session.again():
            self._made = self.fn_ref.original_forward(*args, **kwargs)
        return self._made


class SharedHook(Hook):
    """Return on all ranks what the last one has made."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return self._session.share(output)


def signature_of(module: nn.Module) -> inspect.Signature:
    """Return what a block takes; one that is not here stands for a ``kind``."""
    kind = getattr(module, "kind", type(module))
    parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    return inspect.Signature(parameters)
