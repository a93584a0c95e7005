"""A site of several processes that step alike, as under DDP: the first one exchanges for all.

After each step the first tells the others in one byte whether an exchange has moved the parameters, and then
sends them these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.types import LinkError, ThinwireError, require
from thinwire.uses.training.replicas.choosing.replica_policy import ReplicaChoice, ReplicaPolicy, ReplicaSite

STAYED, MOVED, ENDED = range(3)  # what the first process says


class InStep:
    """A policy whose first process decides for all of a site, which hold different parts of a model."""

    def __init__(self, policy: ReplicaPolicy, group: dist.ProcessGroup, device: torch.device) -> None:
        self._policy, self._group, self._device = policy, group, device

    def choose(self, sites: Sequence[ReplicaSite]) -> list[ReplicaChoice]:
        """Return the first process's choices. All processes of the site ask at the same time."""
        found = list(self._policy.choose(sites))
        numbers = [[*map(_number, (c.ratio, c.bits, c.rank)), c.staleness, c.local_steps] for c in found]
        told = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        dist.broadcast(told, dist.get_global_rank(self._group, 0), self._group)
        return [_chosen(c, row) for c, row in zip(found, told.tolist(), strict=True)]


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _chosen(own: ReplicaChoice, row: list[float]) -> ReplicaChoice:
    ratio, bits, rank = (None if math.isnan(x) else x for x in row[:3])
    kept = None if rank is None else int(rank)
    return replace(own, ratio=ratio, bits=bits, rank=kept, staleness=int(row[3]), local_steps=int(row[4]))


class InsideSite:
    """The processes of ``group``, whose rank 0 has the links to other sites."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._first = group, dist.get_global_rank(group, 0)
        self.leads = group.rank() == 0
        self._said = torch.zeros(1, dtype=torch.uint8, device=device)

    def tell(self, what: int, tensors: list[Tensor]) -> None:
        """Say ``what`` happened, and where parameters have moved give the others ``tensors``."""
        self._said.fill_(what)
        self._broadcast(self._said)
        if what == MOVED:
            self._give(tensors)

    def hear(self, tensors: list[Tensor]) -> None:
        """Take what the first process says. Errors: ``ThinwireError`` where it ended with one."""
        self._broadcast(self._said)
        what = int(self._said)
        text = "the first process of this site ended with an error, which it names; see there"
        require(what != ENDED, ThinwireError, text)
        if what == MOVED:
            self._give(tensors)

    def _give(self, tensors: list[Tensor]) -> None:
        with torch.no_grad():
            for x in tensors:
                whole = x.contiguous()
                self._broadcast(whole)
                if whole is not x:
                    x.copy_(whole)

    def _broadcast(self, x: Tensor) -> None:
        try:
            dist.broadcast(x, self._first, self._group)
        except RuntimeError as e:  # as gloo and NCCL say that a process is gone
            who = "another process" if self.leads else "the first process"
            text = (
                f"{who} of this site is gone ({str(e).partition(chr(10))[0][:120]}); see what happened there"
            )
            raise LinkError(text) from e
