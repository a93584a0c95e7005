"""Torch's PowerSGD: each pass has its gradient at once, and torch keeps what was dropped."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire.spec import Spec
from thinwire.types import InputError, require
from thinwire.uses.training.replicas.ddp_hook import EXACT, Buckets, HookTerms, Replicated
from thinwire.uses.training.replicas.synchroniser import Apply, ReplicaTally, Synchroniser


@dataclass(frozen=True, repr=False)
class PowerSgd(Spec):
    """Torch's own hook of this name: matrices of low ``rank``, after ``start`` exact passes."""

    rank: int = 1
    start: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.rank >= 1, InputError, f"rank={self.rank} is below 1; give the rank of a matrix")
        require(
            self.start >= EXACT, InputError, f"start={self.start} is below {EXACT}; buckets change so long"
        )


class PowerResiduals(Synchroniser):
    """What torch keeps back, by bucket, and what it kept when the gradients were last taken."""

    def __init__(self, state: power.PowerSGDState) -> None:
        super().__init__(ReplicaTally())
        self._state = state
        self._before: dict[str, Any] | None = None

    def begin(self) -> None:
        state = self._state
        if self._before is None:
            self._before = {
                "iter": state.iter,
                "rng": copy.deepcopy(state.rng),
                "error_dict": dict(state.error_dict),  # of which torch makes new tensors, of these not:
                "p_memory_dict": {k: x.clone() for k, x in state.p_memory_dict.items()},
                "q_memory_dict": {k: x.clone() for k, x in state.q_memory_dict.items()},
            }

    def keep(self) -> None:
        self._before = None

    def undo(self) -> None:
        for name, value in (self._before or {}).items():
            setattr(self._state, name, value)
        self._before = None


class PowerReplicated(Replicated):
    """Let torch's hook exchange, and tell it which passes count for nothing."""

    def __init__(
        self, ddp: DistributedDataParallel, buckets: Buckets, state: power.PowerSGDState, terms: HookTerms
    ) -> None:
        super().__init__(ddp, buckets, PowerResiduals(state), terms, None)
        self._state, self.scales = state, False  # as torch's hook is used

    @property
    def ready(self) -> bool:
        self.take()
        return True

    def receive(self, bucket: dist.GradBucket) -> Future[Tensor]:
        if bucket.index() == 0:
            self._synchroniser.begin()
        future = power_hook(self._state, bucket)
        if bucket.is_last():
            self._exchanged(vacant=False)
        return future

    def drain(self, step: Apply) -> None:
        self._check_settled("drain")
        self._settle_buffers()

    def state_dict(self) -> dict[str, Tensor]:
        raise InputError(
            "torch's powersgd keeps residuals by bucket, and a later run has other buckets; save none"
        )

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        raise InputError("a run with powersgd has nothing to load; leave it out")


def power_hook(state: power.PowerSGDState, bucket: dist.GradBucket) -> Future[Tensor]:
    """Call torch's hook, and forget what it remembers of gradients that were not finite.

    Bucket by bucket: over gloo, torch's callbacks of two buckets average in any order, another on each rank.
    """
    index = bucket.index()
    before = state.error_dict.get(index)
    future = power.powerSGD_hook(state, bucket)
    if not bool(future.wait().isfinite().all()):  # the same on all ranks
        for memory in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
            memory.pop(index, None)
        if before is not None:
            state.error_dict[index] = before
    return future
