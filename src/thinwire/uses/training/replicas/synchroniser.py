"""Gradient synchronisation: what a trainer calls, and the gradient of each step exchanged.

At once, or by a delay line beside the compute of later steps. ``local_steps.py`` has parameters exchanged.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter

import torch
from torch import Tensor

from thinwire.collectives import Reduction
from thinwire.uses.training.replicas.coder import Coder
from thinwire.uses.training.replicas.controller import PlanChange
from thinwire.uses.training.replicas.flat_parameters import FlatParameters, all_finite, divided
from thinwire.uses.training.replicas.transport import ReplicaNotFinite, ReplicaTally, Transport

AT_ONCE = 2  # means of one step, where they have become due sooner
Apply = Callable[[], None]  # clips the gradients that stand in the parameters, and takes an optimiser step


class Synchroniser:
    """Keep the parameters of one replica together with those of the others.

    Call ``step`` after the backward pass of each step, ``drain`` before an evaluation or a checkpoint, and
    ``finish`` at the end. Every rank makes the same calls in the same order.
    Errors: ``LinkError`` naming a rank that is lost or silent; on every rank ``ReplicaNotFinite`` naming one.
    """

    def __init__(self, tally: ReplicaTally, transports: Sequence[Transport] = ()) -> None:
        self.tally = tally
        begun = [one.controller.begun for one in transports]
        self.changes: list[PlanChange] = [change for change in begun if change]  # the caller takes them
        self._transports = transports
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

    def rest(self, apply: Apply) -> None:
        """Wait for what is under way, so that all replicas are alike, and apply no more than that needs."""
        self.drain(apply)

    def hold(self) -> None:
        """Wait for what is under way, and keep it until it is due: ``state_dict`` has it then."""

    def keep(self) -> None:
        """Take what was exchanged as applied: it can no more be undone."""

    def undo(self) -> None:
        """Make what was exchanged since ``keep`` as if it had never been, on all ranks."""

    def close(self) -> None:
        """Exchange nothing more. The links stay open."""
        for transport in self._transports:
            transport.close()

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
        begun, before = perf_counter(), replace(self.tally)
        self._applied = 0.0
        yield
        coding = self.tally.encode_s + self.tally.decode_s - before.encode_s - before.decode_s
        applied = self._applied + self.tally.compute_s - before.compute_s
        for transport in self._transports:
            if self._ended is not None:
                transport.controller.measured(begun - self._ended + applied, coding)
            change = transport.controller.decide(self._steps)
            if change is not None:
                self.changes.append(change)
        self._ended = perf_counter()

    def _pause(self) -> None:
        """What follows until the next step is no compute of one."""
        self._ended = None


class SummedGradients(Synchroniser):
    """Average each step's gradients as they are, in ``dtype``, before the step is taken.

    ``skips``: a mean that is not finite is applied, since a gradient scaler skips it.
    Else ``ReplicaNotFinite`` is raised.
    """

    def __init__(
        self,
        flat: FlatParameters,
        reduction: Reduction,
        tally: ReplicaTally,
        dtype: torch.dtype,
        deadline: float,
        skips: bool = False,
    ) -> None:
        super().__init__(tally)
        self._skips = skips
        self._flat, self._reduction, self._dtype, self._deadline = flat, reduction, dtype, deadline

    def step(self, apply: Apply) -> None:
        flat = self._flat.gradients()
        own = flat.view(-1)[: self._flat.numel].to(self._dtype)
        total = self._sum(own)
        self.tally.exchanges += 1
        if not (self._skips or bool(all_finite(total))):
            self._name(own)
        self._steps += 1
        flat.view(-1)[: self._flat.numel] = divided(total.float(), len(self._reduction.ranks))
        self._flat.put_gradients(flat)
        apply()

    def _sum(self, own: Tensor, ahead: int = 0) -> Tensor:
        start = perf_counter()
        self._reduction.post(self._steps + ahead, own)
        total = self._reduction.collect(self._steps + ahead, self._deadline)
        self.tally.wait_s += perf_counter() - start
        return total

    def _name(self, own: Tensor) -> None:
        """Raise ``ReplicaNotFinite`` naming the ranks it came from: all have the same sum, so all ask."""
        ranks = self._reduction.ranks
        own_fault = not bool(all_finite(own))
        flags = [float(own_fault and rank == self._reduction.rank) for rank in ranks]
        bad = self._sum(torch.tensor(flags, device="cpu"), ahead=1).tolist()
        named = " and ".join(str(rank) for rank, flag in zip(ranks, bad, strict=True) if flag)
        what = f"the gradient of rank {named}" if named else "the sum of all ranks' gradients"
        raise ReplicaNotFinite(f"{what} is not finite (exchange {self._steps + 1})")

    def state_dict(self) -> dict[str, Tensor]:
        return {"steps": torch.tensor(self._steps, device="cpu")}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._steps = int(state["steps"])

    def close(self) -> None:
        self._reduction.close()


Mean = tuple[int, Tensor]  # of an exchange, by its number


@dataclass
class _Since:
    """What has gone on since the gradients were last taken, for where they are thrown away."""

    revert: Callable[[], None]
    again: dict[int, Tensor]
    sent: set[int] = field(default_factory=set)
    given: list[Mean] = field(default_factory=list)


class DelayedGradients(Synchroniser):
    """Code each step's gradient, and apply the mean of all replicas' some steps later.

    The plan's staleness may move: to one step less, and the mean of two is applied in one step; to one more,
    and a step passes in which nothing is. A rest applies nothing: all replicas have the same parameters.
    ``exact``: steps at the start whose gradients go as they are.
    ``skips``: where a replica's gradient was not finite, all apply infinity, by which a gradient scaler skips
    the step, and what the others sent is sent again with their next gradient. Else ``ReplicaNotFinite``.
    ``undo``, where it is ``undoable``, gives back what was due, drops what was sent, and turns what was kept
    back to what it was.
    """

    def __init__(
        self,
        flat: FlatParameters,
        coder: Coder,
        transport: Transport,
        exact: int = 0,
        skips: bool = False,
        undoable: bool = False,
    ) -> None:
        super().__init__(transport.tally, [transport])
        self._flat, self._coder, self._transport, self._exact, self._skips = (
            flat,
            coder,
            transport,
            exact,
            skips,
        )
        self._held: deque[Mean] = deque()  # means that came before they are due
        self._again: dict[int, Tensor] = {}  # what was sent in vain, by number
        self._void: set[int] = set()  # those under way that count for nothing
        self._undoes = False  # since the last message
        self._undoable = undoable
        self._since: _Since | None = None  # what has gone on since the last ``keep``

    def step(self, apply: Apply) -> None:
        transport = self._transport
        with self._timed():
            if self._undoable:
                self._since = self._since or _Since(self._coder.revert(), dict(self._again))
                self._since.sent.add(transport.number)
            if self._post(sum(self._again.values(), self._flat.gradients())):
                self._again = {}
            self._undoes = False
            self._steps += 1
            due = list[Tensor]()
            while self._waiting > transport.controller.staleness and len(due) < AT_ONCE:
                due.append(self._next())
            self._land(due, apply)
            while transport.first in self._void and len(transport) > transport.controller.staleness:
                self._collect()

    def _post(self, values: Tensor) -> bool:
        """Send the gradients of a step; return whether they are finite."""
        if self._steps < self._exact:
            finite = self._coder.add_kept(values)
            self._transport.post_whole(values, finite, self._undoes, keep=self._skips)
            return finite
        message = self._coder.encode(values, self._transport.controller.codec)
        self._transport.post(message, self._undoes)
        return message is not None

    @property
    def _waiting(self) -> int:
        """How many exchanges are under way or not due yet."""
        return len(self._held) + len(self._transport) - len(self._void)

    def drain(self, apply: Apply) -> None:
        while self._waiting:
            self._land([self._next()], apply)
        self.hold()  # nothing but what was undone
        self._pause()

    def rest(self, apply: Apply) -> None:
        self.hold()
        self._pause()

    def hold(self) -> None:
        while len(self._transport):
            self._held.extend(self._collect())

    def keep(self) -> None:
        self._since = None

    def undo(self) -> None:
        since, self._since = self._since, None
        if since is None:
            return
        since.revert()
        self._undoes = True
        self._void |= {number for number in since.sent if number >= self._transport.first}
        self._held = deque(mean for mean in (*since.given, *self._held) if mean[0] not in since.sent)
        self._again = since.again | {n: x for n, x in self._again.items() if n not in since.sent}

    def _next(self) -> Tensor:
        """Return the oldest mean that is not applied; wait for it."""
        while not self._held:
            self._held.extend(self._collect())
        mean = self._held.popleft()
        if self._since is not None:
            self._since.given.append(mean)
        return mean[1]

    def _land(self, due: Sequence[Tensor], apply: Apply) -> None:
        """Apply means in one step, several by their mean: a step each would go twice from the same place."""
        if due:
            self._flat.put_gradients(due[0] if len(due) == 1 else torch.stack(list(due)).mean(0))
            self._apply(apply)

    def _collect(self) -> list[Mean]:
        """Return the oldest exchange under way, with its number; nothing where it was undone."""
        number = self._transport.first
        try:
            mean = self._coder.mean(self._transport.oldest())
        except ReplicaNotFinite as e:
            if not self._skips and number not in self._void:
                raise
            if number not in self._void and (e.own or e.whole is not None):
                self._again[number] = self._coder.of(e.own) if e.whole is None else e.whole
            mean = torch.full(self._flat.shape, math.inf, device=self._flat.device)
        if number in self._void:
            self._void.remove(number)
            return []
        return [(number, mean)]

    def state_dict(self) -> dict[str, Tensor]:
        counts = {"steps": self._steps, "held": len(self._held)}
        state = {name: torch.tensor(n, device="cpu") for name, n in counts.items()}
        for k, (_, mean) in enumerate(self._held):
            state |= self._flat.named(mean, f"held{k}.")
        if self._again:
            state |= self._flat.named(torch.stack(list(self._again.values())).sum(0), "again.")
        return state | self._coder.state_dict(self._flat)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._steps = self._transport.number = int(state["steps"])
        self._held = deque((-1, self._flat.saved(state, f"held{k}.")) for k in range(int(state["held"])))
        if any(name.startswith("again.") for name in state):
            self._again = {-1: self._flat.saved(state, "again.")}
        self._coder.load_state_dict(self._flat, state)
