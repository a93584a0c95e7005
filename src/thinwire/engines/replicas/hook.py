"""A communication hook: what DistributedDataParallel would all-reduce goes through a replicator instead.

Tested with torch 2.13. All that is private to torch's DDP, or odd about it, is in this file:

- It wants a parameter named ``bucket`` and annotations that are no text, so they are not postponed here.
- It lays its buckets out anew after the first passes. So nothing is kept by bucket: the buckets of one pass
  are put together by the names of their parameters, and the last one completes them all.
- It takes one hook ever, and calls none within ``no_sync``: the next pass has the sum of the gradients.
- It leaves the gradient of a parameter alone that no rank used, whatever a hook returns for it.
- An error in a future loses its type on its way out of ``backward``; one that a hook raises does not.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire.engines.replicas.buckets import Buckets
from thinwire.engines.replicas.mail import NotFinite
from thinwire.engines.replicas.replicator import Apply, Replicator
from thinwire.spec import Spec
from thinwire.types import InputError, require

EXACT = 2  # passes until the buckets are final


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


class Replicated:
    """What exchanges the gradients of a DDP model; made by ``replicate``.

    ``ready``: whether the last backward pass left a gradient to step with. Where gradients are late, none is
    due at first: skip ``optimizer.step`` then.
    """

    def __init__(self, ddp: DistributedDataParallel, buckets: Buckets, replicator: Replicator) -> None:
        self.ready = False
        self._ddp, self._buckets, self._replicator = ddp, buckets, replicator
        self._due: Tensor | None = None

    def receive(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Take a bucket; with the last one of a pass, exchange, and complete them all."""
        future = self._buckets.take(bucket)
        if bucket.is_last():
            self._due = None
            with advised():
                self._exchange()
            self.ready = self._due is not None
            self._buckets.complete(self._due)
        return future

    def _exchange(self) -> None:
        self._replicator.step(self._add)

    def _add(self) -> None:
        # Two means may be due in one pass, which has one optimiser step.
        self._due = self._buckets.mean if self._due is None else self._due + self._buckets.mean

    def drain(self, step: Apply) -> None:
        """Wait for what is under way; for each mean put it into the gradients and call ``step``.

        Then average the buffers of floats, such as BatchNorm's, over all ranks. Before an evaluation, and at
        the end. All ranks drain after the same backward pass.
        """

        with advised():
            self._replicator.drain(self._stepping(step))
        average_buffers(self._ddp)

    def _stepping(self, step: Apply) -> Apply:
        def apply() -> None:
            self._buckets.put_mean()
            step()

        return apply

    def state_dict(self) -> dict[str, Tensor]:
        """Return residuals and means that are not due yet, by parameter. Each rank saves its own.

        All ranks call this after the same backward pass; it waits for what is under way.
        """
        with advised():
            self._replicator.hold()
        return self._replicator.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what ``state_dict`` returned on this rank, before the first backward pass."""
        wrong = "residuals fit the pass after which they were saved; load them before the first backward pass"
        require(self._replicator.steps == 0, InputError, wrong)
        self._replicator.load_state_dict(state)

    def close(self) -> None:
        """Exchange nothing more; links or group stay open. Before ``destroy_process_group``; drain first."""
        self._replicator.close()


class PowerReplicated(Replicated):
    """Torch's PowerSGD: each pass has its gradient at once."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.ready, self._ddp = True, ddp

    def drain(self, step: Apply) -> None:
        average_buffers(self._ddp)

    def state_dict(self) -> dict[str, Tensor]:
        raise InputError(
            "torch's powersgd keeps residuals by bucket, and a later run has other buckets; save none"
        )

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        raise InputError("a run with powersgd has nothing to load; leave it out")

    def close(self) -> None:
        pass


def hook(state: Replicated, bucket: dist.GradBucket) -> Future[Tensor]:
    """Hand a bucket over."""
    return state.receive(bucket)


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


def check_free(ddp: object) -> None:
    """Raise ``InputError`` unless this is a DDP model without a hook."""
    if not isinstance(ddp, DistributedDataParallel):
        raise InputError(
            f"replicate takes a DistributedDataParallel, not {type(ddp).__name__}; wrap the model"
        )
    sparse = [name for name, module in ddp.module.named_modules() if getattr(module, "sparse", False)]
    wrong = f"the gradients of {', '.join(sparse)} are sparse tensors; build it with sparse=False"
    require(not sparse, InputError, wrong)
    # A built-in hook, or one of mixed_precision, leaves a name with the logger alone.
    name = ddp._get_ddp_logging_data().get("comm_hook", "")
    taken = ddp._comm_hooks or name
    require(
        not taken, InputError, f"this model has the hook {name or taken}, and DDP takes one; leave it out"
    )


def average_buffers(ddp: DistributedDataParallel) -> None:
    """Average the buffers of floats over DDP's own group; counts, such as BatchNorm's, stay as they are."""
    buffers = [x for x in ddp.module.buffers() if x.is_floating_point()]
    if not buffers:
        return
    flat = torch.cat([x.detach().reshape(-1).float() for x in buffers])
    dist.all_reduce(flat, group=ddp.process_group)
    flat /= ddp.process_group.size()
    with torch.no_grad():
        for x, part in zip(buffers, flat.split([x.numel() for x in buffers]), strict=True):
            x.copy_(part.view_as(x))


@contextmanager
def advised() -> Iterator[None]:
    """Say what helps where a gradient is not finite."""
    try:
        yield
    except NotFinite as e:
        raise NotFinite(f"{e}; lower the learning rate, or give replicate your scaler") from e
