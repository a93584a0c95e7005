"""What all ways to exchange have in common: what a trainer calls, and how the time of a step is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter

from torch import Tensor

from thinwire.uses.training.replicas.mail import Mail
from thinwire.uses.training.replicas.pilot import Change
from thinwire.uses.training.replicas.tally import Tally

Apply = Callable[[], None]  # clips the gradients that stand in the parameters, and takes an optimiser step


class Replicator:
    """Keep the parameters of one replica together with those of the others.

    Call ``step`` after the backward pass of each step, ``drain`` before an evaluation or a checkpoint, and
    ``finish`` at the end. Every rank makes the same calls in the same order.
    Errors: ``LinkError`` naming a rank that is lost or silent; ``NotFinite`` naming a rank, on every rank.
    """

    def __init__(self, tally: Tally, mail: Sequence[Mail] = ()) -> None:
        self.tally = tally
        begun = [one.pilot.begun for one in mail]
        self.changes: list[Change] = [change for change in begun if change]  # the caller takes them
        self._mail = mail
        self._steps = 0
        self._ended: float | None = None  # when the last step ended
        self._applied = 0.0  # seconds of this step's optimiser steps

    @property
    def steps(self) -> int:
        """Steps done."""
        return self._steps

    def begin(self) -> None:
        """Say that the compute of a step begins, where something else came between two steps."""
        self._ended = perf_counter()

    def step(self, apply: Apply) -> None:
        """Exchange what is due, and call ``apply`` for each optimiser step that can be taken."""
        raise NotImplementedError

    def drain(self, apply: Apply) -> None:
        """Wait for what is under way, and apply it."""

    def hold(self) -> None:
        """Wait for what is under way, and keep it until it is due: ``state_dict`` has it then."""

    def keep(self) -> None:
        """Take what was exchanged as applied: it can no more be undone."""

    def undo(self) -> None:
        """Make what was exchanged since ``keep`` as if it had never been, on all ranks."""

    def close(self) -> None:
        """Exchange nothing more. The links stay open."""
        for mail in self._mail:
            mail.close()

    def finish(self, apply: Apply) -> None:
        """Exchange what is left, and leave the same shared parameters in the model of every rank."""
        self.drain(apply)

    def settle(self) -> None:
        """Leave the shared parameters in the model, without what was not exchanged. Drain first."""

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Have the shared parameters in the model inside the block. Drain first."""
        yield

    def state_dict(self) -> dict[str, Tensor]:
        """Return what a replica that goes on needs beside its model and optimiser. Drain or hold first."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what ``state_dict`` returned, in a run of as many replicas."""

    def _apply(self, apply: Apply) -> None:
        start = perf_counter()
        apply()
        self._applied += perf_counter() - start

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Let the plans know what a step takes: compute is what passes outside, and the optimiser's part."""
        begun, coded = perf_counter(), self.tally.encode_s + self.tally.decode_s
        self._applied = 0.0
        yield
        coding = self.tally.encode_s + self.tally.decode_s - coded
        for mail in self._mail:
            if self._ended is not None:
                mail.pilot.measured(begun - self._ended + self._applied, coding)
            change = mail.pilot.decide(self._steps)
            if change is not None:
                self.changes.append(change)
        self._ended = perf_counter()

    def _pause(self) -> None:
        """What follows until the next step is no compute of one."""
        self._ended = None
