"""Local steps behind an optimiser's own hooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.types import Closing, InputError, require
from thinwire.uses.training.replicas.ddp_hook import Origin
from thinwire.uses.training.replicas.loop.between_sites import Between
from thinwire.uses.training.replicas.loop.stepped import SteppedModel

STEPS = "local_steps"  # their number in a saved state


class SharedTraining(Closing):
    """What keeps a model in a loop together with other replicas; made by ``local_steps``.

    A context manager: at its end the exchange is closed, and the links stay open.
    """

    def __init__(self, stepped: SteppedModel, between: Between, origin: Origin) -> None:
        self._stepped, self._between, self._origin = stepped, between, origin
        self._steps = 0
        self._closed = self._failed = False
        self._handle = stepped.clock.register_step_post_hook(self._after)

    @property
    def rank(self) -> int:
        """This replica."""
        return self._origin.rank

    @property
    def steps(self) -> int:
        """Local steps done."""
        return self._steps

    def drain(self) -> None:
        """Exchange all that was trained, and leave the same bits in the model of every replica.

        Before an evaluation, a checkpoint and at the end. All replicas drain at the same place. What the code
        dropped goes with the next exchange. Buffers: running statistics are averaged, others are the first
        replica's.
        """
        self._check_open("drain")
        with self._failing():
            self._between.gather()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Have in the model, inside the block, what was last exchanged: a look without a wait."""
        self._check_open("look at what is shared")
        with self._between.shared():
            yield

    def state_dict(self) -> dict[str, Tensor]:
        """Return what this replica needs beside model and optimiser to go on, on the CPU.

        Drain first. Each replica saves its own.
        """
        self._check_open("save")
        return self._between.state_dict() | self._origin.state_dict() | {STEPS: torch.tensor(self._steps)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what ``state_dict`` returned on this replica, before the first step.

        Errors: ``InputError`` where another replica, another number of them or another model saved it.
        """
        require(self.steps == 0, InputError, "this training has begun; load its state before the first step")
        self._origin.check(state)
        self._between.load_state_dict(state)
        self._steps = int(state[STEPS])

    def close(self) -> None:
        """Exchange nothing more; drain first. The links stay open. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._handle.remove()
            self._between.close()
            self._stepped.free()

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch._C._current_graph_task_id() < 0:
            self._step()
        else:  # in a backward pass, by hooks of parameters: others are still to step, from these gradients
            torch.autograd.Variable._execution_engine.queue_callback(self._step)

    def _step(self) -> None:
        self._check_together()
        with self._failing(), torch.no_grad():
            if self._between.is_due:
                self._stepped.check()
            self._between.step()
        self._steps += 1

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Note an error inside the block: nothing can be exchanged behind it."""
        try:
            yield
        except BaseException:
            self._failed = True
            raise

    def _check_open(self, what: str) -> None:
        require(not self._closed, InputError, f"this training is closed; {what} before close")
        self._check_together()

    def _check_together(self) -> None:
        text = "an exchange has failed, and replicas are apart; start them again"
        require(not self._failed, InputError, text)
