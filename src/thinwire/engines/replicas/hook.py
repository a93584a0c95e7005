"""A communication hook: what DistributedDataParallel would all-reduce goes through a replicator instead.

Tested with torch 2.13. All that is private to torch's DDP, or odd about it, is in this file:

- It wants a parameter named ``bucket`` and annotations that are no text, so they are not postponed here.
- It lays its buckets out anew after the first passes. So nothing is kept by bucket: the buckets of one pass
  are put together by the names of their parameters, and the last one completes them all.
- It takes one hook ever, and calls none within ``no_sync``: the next pass has the sum of the gradients.
- It leaves the gradient of a parameter alone that no rank used, whatever a hook returns for it.
- An error in a future loses its type on its way out of ``backward``; one that a hook raises does not.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire.channels.channel import Scheme
from thinwire.channels.memory import NoMemory
from thinwire.engines.replicas.mail import NotFinite
from thinwire.engines.replicas.method import AllReduce, Differences, Gradients, Method
from thinwire.engines.replicas.networks import over_group, over_mesh
from thinwire.engines.replicas.replicate import Network, Plan, by_gradients
from thinwire.engines.replicas.replicator import Apply, Replicator
from thinwire.engines.replicas.table import Table
from thinwire.links.mesh import Peer
from thinwire.policies.replicas.site import ReplicaPolicy
from thinwire.spec import Spec
from thinwire.types import InputError, require

EXACT = 2  # passes until the buckets are final
EXACT_STATIC = 3  # with static_graph=True


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


class Buckets(Table):
    """The gradients of one backward pass, bucket by bucket.

    With ``scaler``, a ``GradScaler``, they are exchanged unscaled: its factor may be another one later.
    """

    def __init__(self, ddp: DistributedDataParallel, scaler: torch.amp.GradScaler | None) -> None:
        left_out = set(ddp.parameters_to_ignore)
        named = {n: p for n, p in ddp.module.named_parameters() if p.requires_grad and n not in left_out}
        super().__init__(named)
        self._names = {id(p): name for name, p in named.items()}
        self._scaler = scaler
        self._open: list[tuple[Tensor, Future[Tensor]]] = []  # each bucket, and what DDP waits for
        self._views: dict[str, Tensor] = {}  # of the gradients in them
        self._mean = torch.empty(0)  # what was exchanged last

    def take(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Add the next bucket of a pass; its first one begins anew, should the last pass have failed."""
        if bucket.index() == 0:
            self._open, self._views = [], {}
        for p, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self._views[self._names[id(p)]] = view
        buffer = bucket.buffer()
        future: Future[Tensor] = Future(devices=None if buffer.device.type == "cpu" else [buffer.device])
        self._open.append((buffer, future))
        return future

    def complete(self, flat: Tensor | None) -> None:
        """Hand all buckets back to DDP with these gradients, or zeros."""
        if flat is None:
            for buffer, _ in self._open:
                buffer.zero_()
        else:
            for name, part in self._parts(self._scaled(flat)):
                self._views[name].copy_(part)
        for buffer, future in self._open:
            future.set_result(buffer)
        self._open, self._views = [], {}

    def gradients(self) -> Tensor:
        flat = self.flat(self._views)
        return flat if self._scaler is None else flat.div_(self._scale)

    def put_gradients(self, flat: Tensor) -> None:
        self._mean = flat

    @property
    def mean(self) -> Tensor:
        """What was exchanged last [n, N]."""
        return self._mean

    def put_mean(self) -> None:
        """Write it into the parameters' gradients, outside of a backward pass."""
        super().put_gradients(self._scaled(self._mean))

    def _scaled(self, flat: Tensor) -> Tensor:
        return flat if self._scaler is None else flat * self._scale

    @property
    def _scale(self) -> float:
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())


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
            with _advised():
                self._replicator.step(self._add)
            self.ready = self._due is not None
            self._buckets.complete(self._due)
        return future

    def _add(self) -> None:
        # Two means may be due in one pass, which has one optimiser step.
        self._due = self._buckets.mean if self._due is None else self._due + self._buckets.mean

    def drain(self, step: Apply) -> None:
        """Wait for what is under way; for each mean put it into the gradients and call ``step``.

        Then average the buffers of floats, such as BatchNorm's, over all ranks. Before an evaluation, and at
        the end. All ranks drain after the same backward pass.
        """

        def apply() -> None:
            self._buckets.put_mean()
            step()

        with _advised():
            self._replicator.drain(apply)
        _average_buffers(self._ddp)

    def state_dict(self) -> dict[str, Tensor]:
        """Return residuals and means that are not due yet, by parameter. Each rank saves its own.

        All ranks call this after the same backward pass; it waits for what is under way.
        """
        with _advised():
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


class _PowerReplicated(Replicated):
    """Torch's PowerSGD: each pass has its gradient at once."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.ready, self._ddp = True, ddp

    def drain(self, step: Apply) -> None:
        _average_buffers(self._ddp)

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


def install(
    ddp: DistributedDataParallel,
    method: Method | PowerSgd,
    policy: ReplicaPolicy | None,
    peers: Mapping[int, Peer] | None,
    group: dist.ProcessGroup | None,
    scaler: torch.amp.GradScaler | None,
    deadline: float,
) -> Replicated:
    """Give ``ddp`` the hook of a method; ``recipes/hook.py`` says what for."""
    _check_free(ddp)
    if isinstance(method, PowerSgd):
        return _install_power(ddp, method, peers, group)
    one = (peers is None) != (group is None)
    require(
        one, InputError, "replicas need a network; give peers of connect_mesh, or a torch group, not both"
    )
    if isinstance(method, Differences):
        raise InputError(
            "this recipe exchanges differences of parameters after local steps, which belong to a trainer's "
            "loop, not to a hook; choose one of gradients, such as deco, dd-ef-sgd or topk"
        )
    keeps = isinstance(method, Gradients) and (method.staleness > 0 or method.scheme.memory != NoMemory())
    wrong = (
        "find_unused_parameters=True loses what is late or kept back for a parameter that a step leaves out"
    )
    fits = not ddp.find_unused_parameters or not (keeps or policy)
    require(fits, InputError, f"{wrong}; build the model without it, or exchange at once and without memory")
    exact = EXACT_STATIC if ddp.static_graph else EXACT
    if isinstance(method, Gradients):
        method = replace(method, exact=max(method.exact, exact))
    buckets = Buckets(ddp, scaler)
    network = _network(ddp, method, policy, peers, group, buckets, deadline)
    _check_alike(ddp, f"{buckets.digest} {method} {policy} {peers is None} {scaler is None}")
    plan = None if policy is None else Plan(policy)
    replicated = Replicated(ddp, buckets, by_gradients(method, buckets, network, plan, scaler is not None))
    ddp.register_comm_hook(replicated, hook)
    return replicated


def _install_power(
    ddp: DistributedDataParallel, method: PowerSgd, peers: object, group: dist.ProcessGroup | None
) -> Replicated:
    require(
        peers is None, InputError, "powersgd averages over a torch group; give group, or nothing, not peers"
    )
    state = power.PowerSGDState(group or ddp.process_group, method.rank, method.start)
    ddp.register_comm_hook(state, power_hook)
    return _PowerReplicated(ddp)


def _check_free(ddp: object) -> None:
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


def _check_alike(ddp: DistributedDataParallel, what: str) -> None:
    """Raise ``InputError`` unless all ranks exchange the same in the same way."""
    digest = list(hashlib.blake2b(what.encode(), digest_size=16).digest())
    own = torch.tensor(digest, dtype=torch.uint8, device=next(ddp.module.parameters()).device)
    others = [torch.empty_like(own) for _ in range(ddp.process_group.size())]
    dist.all_gather(others, own, group=ddp.process_group)
    wrong = [rank for rank, other in enumerate(others) if not torch.equal(own, other)]
    text = (
        f"rank {wrong} exchanges other parameters, or by another recipe, than rank {ddp.process_group.rank()}"
    )
    require(not wrong, InputError, f"{text}; give all ranks the same")


def _network(
    ddp: DistributedDataParallel,
    method: AllReduce | Gradients,
    policy: ReplicaPolicy | None,
    peers: Mapping[int, Peer] | None,
    group: dist.ProcessGroup | None,
    table: Table,
    deadline: float,
) -> Network:
    many = ddp.process_group.size()
    if group is None:
        peers = peers or {}
        wrong = (
            f"{len(peers)} peers are not the {many - 1} other replicas; connect all ranks of DDP, no others"
        )
        require(len(peers) == many - 1, InputError, wrong)
        return over_mesh(next(r for r in range(many) if r not in peers), peers, deadline=deadline)
    wrong = f"a group of {group.size()} ranks is not DDP's {many}; make one of all by new_group"
    require(group.size() == many, InputError, wrong)
    wrong = "DDP's own group is taken; make another for the hook by new_group(backend='gloo')"
    require(group is not ddp.process_group, InputError, wrong)
    wrong = "this recipe follows the link, of which a torch group tells nothing"
    require(policy is None, InputError, f"{wrong}; give peers of connect_mesh, or choose dd-ef-sgd or topk")
    scheme, exact = (method.scheme, method.exact) if isinstance(method, Gradients) else (Scheme(), 0)
    return over_group(group, scheme, exact, table, deadline)


def _average_buffers(ddp: DistributedDataParallel) -> None:
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
def _advised() -> Iterator[None]:
    """Say what helps where a gradient is not finite."""
    try:
        yield
    except NotFinite as e:
        raise NotFinite(f"{e}; lower the learning rate, or give replicate your scaler") from e
