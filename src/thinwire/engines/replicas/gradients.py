"""Exchange the gradient of each step: at once, or by a delay line beside the compute of later steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from time import perf_counter

import torch
from torch import Tensor

from thinwire.codecs import Raw
from thinwire.engines.replicas.coder import Coder
from thinwire.engines.replicas.mail import Mail, NotFinite
from thinwire.engines.replicas.replicator import Apply, Replicator
from thinwire.engines.replicas.table import Table
from thinwire.engines.replicas.tally import Tally
from thinwire.exchange import Reduction


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
    """

    def __init__(self, table: Table, coder: Coder, mail: Mail, exact: int = 0, skips: bool = False) -> None:
        super().__init__(mail.tally, [mail])
        self._table, self._coder, self._only, self._exact, self._skips = table, coder, mail, exact, skips
        self._held: deque[Tensor] = deque()  # means that came before they are due
        self._again: Tensor | None = None  # what was sent in vain

    def step(self, apply: Apply) -> None:
        mail = self._only
        with self._timed():
            flat = self._table.gradients()
            finite = bool(flat.isfinite().all())
            if finite and self._again is not None:
                flat, self._again = flat + self._again, None
            codec = Raw() if self._steps < self._exact else mail.pilot.codec
            mail.post(self._coder.encode(flat, codec) if finite else [], finite)
            self._steps += 1
            while len(self._held) + len(mail) > mail.pilot.staleness:
                self._land(apply)

    def drain(self, apply: Apply) -> None:
        while self._held or len(self._only):
            self._land(apply)
        self._pause()

    def hold(self) -> None:
        while len(self._only):
            self._held.append(self._mean())

    def _land(self, apply: Apply) -> None:
        self._table.put_gradients(self._held.popleft() if self._held else self._mean())
        self._apply(apply)

    def _mean(self) -> Tensor:
        try:
            return self._coder.mean(self._only.oldest())
        except NotFinite as e:
            if not self._skips:
                raise
            if e.own:
                own = self._coder.mean({self._only.rank: e.own})
                self._again = own if self._again is None else self._again + own
            return torch.full(self._table.shape, math.inf)

    def state_dict(self) -> dict[str, Tensor]:
        state = {"steps": torch.tensor(self._steps), "held": torch.tensor(len(self._held))}
        for k, mean in enumerate(self._held):
            state |= self._table.named(mean, f"held{k}.")
        if self._again is not None:
            state |= self._table.named(self._again, "again.")
        return state | self._coder.state_dict(self._table)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._steps = self._only.number = int(state["steps"])
        self._held = deque(self._table.flat(state, f"held{k}.") for k in range(int(state["held"])))
        if any(name.startswith("again.") for name in state):
            self._again = self._table.flat(state, "again.")
        self._coder.load_state_dict(self._table, state)
