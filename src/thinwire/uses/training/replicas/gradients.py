"""Exchange the gradient of each step: at once, or by a delay line beside the compute of later steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from thinwire.codecs import Raw
from thinwire.collectives import Reduction
from thinwire.uses.training.replicas.coder import Coder
from thinwire.uses.training.replicas.mail import Mail, NotFinite
from thinwire.uses.training.replicas.replicator import Apply, Replicator
from thinwire.uses.training.replicas.table import Table
from thinwire.uses.training.replicas.tally import Tally

Mean = tuple[int, Tensor]  # of an exchange, by its number


@dataclass
class _Since:
    """What has gone on since the gradients were last taken, for where they are thrown away."""

    revert: Callable[[], None]
    again: dict[int, Tensor]
    sent: set[int] = field(default_factory=set)
    given: list[Mean] = field(default_factory=list)


class SummedGradients(Replicator):
    """Average each step's gradients as they are, in ``dtype``, before the step is taken.

    ``skips``: a mean that is not finite is applied, since a gradient scaler skips it; else ``NotFinite``.
    """

    def __init__(
        self,
        table: Table,
        reduction: Reduction,
        tally: Tally,
        dtype: torch.dtype,
        deadline: float,
        skips: bool = False,
    ) -> None:
        super().__init__(tally)
        self._skips = skips
        self._table, self._reduction, self._dtype, self._deadline = table, reduction, dtype, deadline

    def step(self, apply: Apply) -> None:
        flat = self._table.gradients()
        own = flat.view(-1)[: self._table.numel].to(self._dtype)
        total = self._sum(own)
        self.tally.exchanges += 1
        if not (self._skips or total.isfinite().all()):
            self._name(own)
        self._steps += 1
        flat.view(-1)[: self._table.numel] = total.float().div_(len(self._reduction.ranks))
        self._table.put_gradients(flat)
        apply()

    def _sum(self, own: Tensor, ahead: int = 0) -> Tensor:
        start = perf_counter()
        self._reduction.post(self._steps + ahead, own)
        total = self._reduction.collect(self._steps + ahead, self._deadline)
        self.tally.wait_s += perf_counter() - start
        return total

    def _name(self, own: Tensor) -> None:
        """Raise ``NotFinite`` naming the ranks it came from: all have the same sum, so all ask."""
        ranks = self._reduction.ranks
        flags = torch.tensor([float(rank == self._reduction.rank) for rank in ranks])
        bad = self._sum(flags if not own.isfinite().all() else torch.zeros(len(ranks)), ahead=1)
        named = " and ".join(str(rank) for rank, flag in zip(ranks, bad, strict=True) if flag)
        what = f"the gradient of rank {named}" if named else "the sum of all ranks' gradients"
        raise NotFinite(f"{what} is not finite (exchange {self._steps + 1})")

    def state_dict(self) -> dict[str, Tensor]:
        return {"steps": torch.tensor(self._steps)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._steps = int(state["steps"])

    def close(self) -> None:
        self._reduction.close()


class DelayedGradients(Replicator):
    """Code each step's gradient, and apply the mean of all replicas' some steps later.

    The plan's staleness may move: to fewer steps, and two means are applied in one step; to more, and a step
    passes in which nothing is. ``exact``: steps at the start whose gradients go as they are.
    ``skips``: where a replica's gradient was not finite, all apply infinity, by which a gradient scaler skips
    the step, and what the others sent is sent again with their next gradient; else ``NotFinite`` is raised.
    ``undo``, where it is ``undoable``, gives back what was due, drops what was sent, and turns what was kept
    back to what it was.
    """

    def __init__(
        self,
        table: Table,
        coder: Coder,
        mail: Mail,
        exact: int = 0,
        skips: bool = False,
        undoable: bool = False,
    ) -> None:
        super().__init__(mail.tally, [mail])
        self._table, self._coder, self._only, self._exact, self._skips = table, coder, mail, exact, skips
        self._held: deque[Mean] = deque()  # means that came before they are due
        self._again: dict[int, Tensor] = {}  # what was sent in vain, by number
        self._void: set[int] = set()  # those under way that count for nothing
        self._undoes = False  # since the last message
        self._undoable = undoable
        self._since: _Since | None = None  # what has gone on since the last ``keep``

    def step(self, apply: Apply) -> None:
        mail = self._only
        with self._timed():
            flat = self._table.gradients()
            finite = bool(flat.isfinite().all())
            if self._undoable:
                self._since = self._since or _Since(self._coder.revert(), dict(self._again))
                self._since.sent.add(mail.number)
            if finite and self._again:
                flat = sum(self._again.values(), flat)
                self._again = {}
            codec = Raw() if self._steps < self._exact else mail.pilot.codec
            mail.post(self._coder.encode(flat, codec) if finite else [], finite, self._undoes)
            self._undoes = False
            self._steps += 1
            while self._waiting > mail.pilot.staleness:
                self._land(apply)
            while mail.first in self._void and len(mail) > mail.pilot.staleness:
                self._collect()

    @property
    def _waiting(self) -> int:
        """How many exchanges are under way or not due yet."""
        return len(self._held) + len(self._only) - len(self._void)

    def drain(self, apply: Apply) -> None:
        while self._waiting:
            self._land(apply)
        self.hold()  # nothing but what was undone
        self._pause()

    def hold(self) -> None:
        while len(self._only):
            self._held.extend(self._collect())

    def keep(self) -> None:
        self._since = None

    def undo(self) -> None:
        since, self._since = self._since, None
        if since is None:
            return
        since.revert()
        self._undoes = True
        self._void |= {number for number in since.sent if number >= self._only.first}
        self._held = deque(mean for mean in (*since.given, *self._held) if mean[0] not in since.sent)
        self._again = since.again | {n: x for n, x in self._again.items() if n not in since.sent}

    def _land(self, apply: Apply) -> None:
        while not self._held:
            self._held.extend(self._collect())
        mean = self._held.popleft()
        if self._since is not None:
            self._since.given.append(mean)
        self._table.put_gradients(mean[1])
        self._apply(apply)

    def _collect(self) -> list[Mean]:
        """Return the oldest exchange under way, with its number; nothing where it was undone."""
        number = self._only.first
        try:
            mean = self._coder.mean(self._only.oldest())
        except NotFinite as e:
            if not self._skips and number not in self._void:
                raise
            if e.own and number not in self._void:
                self._again[number] = self._coder.mean({self._only.rank: e.own})
            mean = torch.full(self._table.shape, math.inf)
        if number in self._void:
            self._void.remove(number)
            return []
        return [(number, mean)]

    def state_dict(self) -> dict[str, Tensor]:
        state = {"steps": torch.tensor(self._steps), "held": torch.tensor(len(self._held))}
        for k, (_, mean) in enumerate(self._held):
            state |= self._table.named(mean, f"held{k}.")
        if self._again:
            state |= self._table.named(torch.stack(list(self._again.values())).sum(0), "again.")
        return state | self._coder.state_dict(self._table)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._steps = self._only.number = int(state["steps"])
        self._held = deque((-1, self._table.saved(state, f"held{k}.")) for k in range(int(state["held"])))
        if any(name.startswith("again.") for name in state):
            self._again = {-1: self._table.saved(state, "again.")}
        self._coder.load_state_dict(self._table, state)
