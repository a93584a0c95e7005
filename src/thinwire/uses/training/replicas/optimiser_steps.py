"""The optimiser steps of a loop: which were taken, and which have nothing to apply.

Torch calls hooks around ``step`` of every optimiser. So a loop need not say when it steps: a step on a
model's parameters is seen here. While no gradient is due, the parameters have none during the step, and
torch's optimisers leave such parameters alone: no momentum, no decay and no count moves.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from thinwire.types import InputError, require
from thinwire.uses.training.replicas.flat_parameters import all_finite, any_of

DEPTH = 8  # calls between a scaler's step and the hook in the optimiser's


class Watched(Protocol):
    """What is asked and told about the steps on its parameters."""

    draining: bool
    undoes: bool  # it is late or keeps back
    scales: bool  # and must know the factor of a scaler
    vacant: bool  # the gradients are those of a pass that left nothing to apply

    def take(self) -> None:
        """Hear of a step."""
        ...


class Aside:
    """Gradients that are out of the way for a while, by parameter."""

    def __init__(self) -> None:
        self._held: dict[nn.Parameter, Tensor | None] = {}

    def put(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take the gradients of those not yet held, and leave None."""
        for p in parameters:
            if p not in self._held:
                self._held[p], p.grad = p.grad, None

    def forget(self) -> None:
        """Let what is held go, as there are newer gradients."""
        self._held.clear()

    def give_back(self) -> None:
        """Put all back where they were."""
        for p, gradient in self._held.items():
            p.grad = gradient
        self._held.clear()


class OptimiserSteps:
    """Watch the steps of all optimisers that have one of ``parameters``, for ``watched``.

    ``scaler``: the ``GradScaler`` whose factor the gradients have.
    """

    def __init__(
        self, watched: Watched, parameters: Iterable[nn.Parameter], scaler: torch.amp.GradScaler | None
    ) -> None:
        self._parameters = tuple(parameters)
        self._ids = {id(p) for p in self._parameters}
        self._watched, self._scaler = weakref.ref(watched), scaler
        self._aside = Aside()  # during one step
        self.aside = Aside()  # during a drain
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._now: set[int] = set()  # the parameters stepped since the last pass
        self._then: set[int] = set()  # and since the last but one that a step followed
        self._handles: list[RemovableHandle] = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def close(self) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()

    def passed(self) -> None:
        """Hear of a pass. Errors: ``InputError`` where steps behind two passes share no parameter."""
        if self._now:
            text = "the steps behind the last two passes were of other parameters, and what is late or kept "
            text += "back meets other steps; give each optimiser a DDP of its own, or exchange at once"
            require(not self._then or not self._now.isdisjoint(self._then), InputError, text)
            self._then, self._now = self._now, set()

    def set_aside(self, parameters: Iterable[nn.Parameter]) -> None:
        """Put these gradients aside for a drain, and those of all that their optimisers step."""
        self.aside.put(parameters)
        for optimizer in self._seen:
            self.aside.put(_all(optimizer))

    def ended(self) -> None:
        """End a step of a drain: update the scaler, where the step has not."""
        scaler = self._scaler
        if scaler is not None:
            states = scaler._per_optimizer_states.values()
            if any(state["stage"] is OptState.STEPPED for state in states):
                scaler.update()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        watched = self._watched()
        if watched is None or self._ids.isdisjoint(map(id, _all(optimizer))):
            return None
        text = "LBFGS needs each gradient at once and exact; take an optimiser such as SGD, or plain DDP"
        require(not (watched.undoes and isinstance(optimizer, torch.optim.LBFGS)), InputError, text)
        text = "this step is a GradScaler's, whose factor may be another one when a gradient is applied"
        known = self._scaler is not None or not watched.scales or not _is_scaled()
        require(known, InputError, f"{text}; call replicate(..., scaler=scaler)")
        self._seen.add(optimizer)
        watched.take()
        if not watched.draining:
            self._now.update(self._ids.intersection(map(id, _all(optimizer))))
        else:
            self.aside.put(p for p in _all(optimizer) if id(p) not in self._ids)
            self._unscale(optimizer)
        return self._emptied(watched, args, kwargs)

    def _emptied(self, watched: Watched, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Take gradients away that are nothing, now and behind a closure; return the step's arguments."""

        def empty() -> None:
            if watched.vacant:
                self._aside.put(self._parameters)

        def behind(closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
            if closure is None:
                return None

            def evaluate() -> Any:
                loss = closure()
                self._aside.forget()
                empty()
                return loss

            return evaluate

        empty()
        if "closure" in kwargs:
            kwargs = kwargs | {"closure": behind(kwargs["closure"])}
        elif len(args) > 1 and callable(args[1]):
            args = (args[0], behind(args[1]), *args[2:])
        return args, kwargs

    def _unscale(self, optimizer: Optimizer) -> None:
        """Let a drain's step have gradients without a scale, where it does not go by the scaler."""
        scaler = self._scaler
        if scaler is None or getattr(optimizer, "grad_scale", None) is not None:
            return
        state = scaler._per_optimizer_states.get(id(optimizer))
        if state is not None and state["stage"] is not OptState.READY:
            return
        ours = [p for p in _all(optimizer) if id(p) in self._ids and p.grad is not None]
        if not any_of(all_finite(p.grad).logical_not_() for p in ours):  # type: ignore[arg-type]
            for p in ours:
                p.grad.div_(scaler.get_scale())  # type: ignore[union-attr]
        else:
            self._aside.put(ours)  # the scaler would skip this step

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        watched = self._watched()
        if watched is not None and not self._ids.isdisjoint(map(id, _all(optimizer))):
            self._aside.give_back()
            watched.take()  # what a closure exchanged


def _is_scaled() -> bool:
    """Return whether a scaler has called this step: torch leaves no other trace of it."""
    frame = sys._getframe(2)
    for _ in range(DEPTH):
        if frame.f_code is torch.amp.GradScaler.step.__code__:
            return bool(frame.f_locals["self"].is_enabled())
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def _all(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]
