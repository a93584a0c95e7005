"""A communication hook: what DistributedDataParallel would all-reduce goes through a synchroniser instead.

Tested with torch 2.11 to 2.15. All that is private to torch's DDP, or odd about it, is in this file:

- It wants a parameter named ``bucket`` and annotations that are no text, so they are not postponed here.
- It lays its buckets out anew after the first passes. So nothing is kept by bucket: the buckets of one pass
  are put together by the names of their parameters, and the last one completes them all.
- It takes one hook ever, and calls none within ``no_sync``: the next pass has the sum of the gradients.
- It leaves the gradient of a parameter alone that no rank used, whatever a hook returns for it.
- An error in a future loses its type on its way out of ``backward``; one that a hook raises does not.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire.checksum.bit_sums import sums_of
from thinwire.types import WRONG_VALUES, InputError, ThinwireError, require
from thinwire.uses.training.replicas.flat_parameters import FlatParameters, all_finite, any_of, copy_all, real
from thinwire.uses.training.replicas.optimiser_steps import OptimiserSteps
from thinwire.uses.training.replicas.synchroniser import Apply, Synchroniser
from thinwire.uses.training.replicas.transport import ReplicaNotFinite

STATISTICS = ("running_mean", "running_var")  # what torch's norms, and those after them, call their buffers
ORIGIN = "origin"  # the name beside residuals and means
BITS = {2: torch.int16, 4: torch.int32}  # dtypes by the bytes of a value
EXACT = 2  # passes until the buckets are final
MANY = 100  # passes without a step that begin a run, after which it is a loop whose steps nobody sees


class Replicated:
    """What exchanges the gradients of a DDP model; made by ``replicate``.

    What stands in the parameters' ``.grad``:

    - A backward pass outside of ``no_sync`` exchanges what stands there at its end, as in DDP, and leaves the
      mean that is due. If none is, it leaves zeros, ``ready`` is False, and optimisers of torch skip a step.
    - A step takes a mean. So does a look at ``ready``, and any other change of the parameters in place.
    - Gradients that are cleared without a step are thrown away: the pass is as if it had never been.
    - A drain, and only the steps in it, has other gradients for a while, and leaves those that it found.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        buckets: "Buckets",
        synchroniser: Synchroniser,
        terms: "HookTerms",
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.vacant = self.draining = False
        self.undoes = self.scales = terms.undoes
        self._ddp, self._buckets, self._synchroniser, self._terms = ddp, buckets, synchroniser, terms
        self._due: Tensor | None = None
        self._pending = False  # neither a step nor cleared gradients have been seen since the last exchange
        self._looked = -1  # at the gradients before the pass of this number
        self._dtypes = [p.dtype for p in buckets.trained]
        self._moved: list[int] = []  # how often parameters had changed at the last exchange
        self._thrown = 0  # passes, before the first step
        self._steps = OptimiserSteps(self, buckets.trained, scaler)
        self._arrivals = [p.register_hook(self._arrive) for p in buckets.trained]
        self._arrivals += [p.register_post_accumulate_grad_hook(self._add_up) for p in buckets.trained]

    def __reduce__(self) -> tuple[type["Copied"], tuple[()]]:
        return Copied, ()

    @property
    def ready(self) -> bool:
        """Whether the last backward pass left a gradient to step with; who asks takes it.

        Where gradients are late, none is due at first.
        """
        self.take()
        return self._due is not None

    def receive(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Take a bucket; with the last one of a pass, exchange, and complete them all."""
        require(not self.draining, InputError, "a step of a drain may take no backward pass; leave it out")
        future = self._buckets.take(bucket)
        if bucket.is_last():
            self._due = None
            with advised(), told():
                self._exchange()
                self._buckets.complete(self._due)
            self._exchanged(vacant=self._due is None)
        return future

    def _exchanged(self, vacant: bool) -> None:
        check_same(self._ddp, self._buckets.trained)
        if self.undoes:
            self._steps.passed()
        self.vacant, self._pending = vacant, self.undoes
        self._moved = [p._version for p in self._buckets.trained]

    def _exchange(self) -> None:
        self._synchroniser.step(self._add)

    def _add(self) -> None:
        # Two means may be due in one pass, which has one optimiser step.
        self._due = self._buckets.mean if self._due is None else self._due + self._buckets.mean

    def _arrive(self, gradient: Tensor) -> None:
        """Look at the gradients, as the first one of a pass arrives and before it is added."""
        number = torch._C._current_graph_task_id()  # another one for each pass, also after one that failed
        if self._looked != number:
            self._looked = number
            text = "the model has another dtype than when DDP was made, which then reduces nothing"
            same = self._dtypes == [p.dtype for p in self._buckets.trained]
            require(same, InputError, f"{text}; convert the model before it is wrapped")
            self._settle()

    def _add_up(self, parameter: Tensor) -> None:
        self.vacant = False  # not so where gradients arrive for autograd.grad

    def take(self) -> None:
        """Hear of a step."""
        if not self._buckets.are_there():
            self._settle()
        self._thrown = -1
        self._keep()

    def _keep(self) -> None:
        if self._pending:
            self._pending = False
            self._synchroniser.keep()

    def _settle(self) -> None:
        """Undo the last exchanges if their gradients were thrown away."""
        if not self._pending:
            return
        if self._moved != [p._version for p in self._buckets.trained]:
            self._thrown = -1
            self._keep()
        elif not self._buckets.are_finite():
            self._keep()  # the scaler has skipped the step, which nobody sees
        elif self._buckets.are_cleared():
            self._pending, self._due = False, None
            self._synchroniser.undo()
            self._thrown += self._thrown >= 0
            text = (
                f"the gradients of {MANY} passes were cleared, and no torch optimiser has stepped; ask ready"
            )
            text += " before a step of another kind, and run passes without a step under no_sync"
            require(self._thrown < MANY, InputError, text)

    def drain(self, step: Apply) -> None:
        """Wait for what is under way; for each mean put it into the gradients and call ``step``.

        ``step`` is all that follows a backward pass in the loop, such as clipping and a schedule. Then the
        running statistics of norms are averaged over all ranks. All ranks drain at the same place: before an
        evaluation and at the end, where the last pass was followed by a step.
        """
        self._check_settled("drain")
        with self._drained(), advised():
            self._synchroniser.drain(self._stepping(step))
        self._settle_buffers()

    def _check_settled(self, what: str) -> None:
        self._settle()
        text = "the gradients of the last pass were neither applied by a step nor cleared"
        require(not self._pending, InputError, f"{text}; {what} behind one of these")

    @contextmanager
    def _drained(self) -> Iterator[None]:
        """Have the means in the gradients inside the block, and behind it those that were there."""
        due, vacant = self._due, self.vacant
        self.draining, self.vacant = True, False
        self._steps.set_aside(self._ddp.module.parameters())
        try:
            yield
        finally:
            self._due, self.vacant, self.draining = due, vacant, False
            self._steps.aside.give_back()

    def _stepping(self, step: Apply) -> Apply:
        def apply() -> None:
            self._due = self._buckets.mean
            self._buckets.put_mean()
            step()
            self._steps.ended()

        return apply

    def _settle_buffers(self) -> None:
        average_statistics(self._ddp, self._beyond)
        if self._terms.broadcasts:
            broadcast_the_rest(self._ddp)

    def _beyond(self, mean: Tensor) -> Tensor:
        return mean

    def state_dict(self) -> dict[str, Tensor]:
        """Return residuals and means that are not due yet, by parameter. Each rank saves its own.

        All ranks call this after the same step; it waits for what is under way.
        """
        self._check_settled("save")
        with advised():
            self._synchroniser.hold()
        return self._synchroniser.state_dict() | self._terms.origin.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what ``state_dict`` returned on this rank, before the first backward pass.

        Errors: ``InputError`` where another rank, recipe or model saved it.
        """
        wrong = "residuals fit the pass after which they were saved; load them before the first backward pass"
        require(self._synchroniser.steps == 0, InputError, wrong)
        try:
            self._terms.origin.check(state)
            passes = int(state["steps"]) if state else 0
            require(passes >= 0, InputError, f"this state is of {passes} passes; begin without it")
            self._synchroniser.load_state_dict(state)
        except InputError:
            raise
        except WRONG_VALUES as e:
            text = "this state cannot be read"
            raise InputError(f"{text} ({type(e).__name__}: {e}); begin without it") from e

    def close(self) -> None:
        """Exchange nothing more; links or group stay open. Before ``destroy_process_group``; drain first."""
        self._unwatch()
        self._synchroniser.close()

    def _unwatch(self) -> None:
        self._steps.close()
        for handle in self._arrivals:
            handle.remove()


def hook(state: Replicated, bucket: dist.GradBucket) -> Future[Tensor]:
    """Hand a bucket over."""
    return state.receive(bucket)


@contextmanager
def advised() -> Iterator[None]:
    """Say what helps where a gradient is not finite."""
    try:
        yield
    except ReplicaNotFinite as e:
        raise ReplicaNotFinite(f"{e}; lower the learning rate, or give replicate your scaler") from e


@contextmanager
def told() -> Iterator[None]:
    """Say in a sentence what torch raised in a pass, as where a card broke or is full."""
    try:
        yield
    except (RuntimeError, MemoryError) as e:
        words = str(e).partition("\n")[0].rstrip(".")
        text = f"this rank could not exchange the gradients of a pass: {type(e).__name__}: {words}"
        raise ThinwireError(f"{text}; start it again, with a smaller batch where memory is full") from e


class Buckets(FlatParameters):
    """The gradients of one backward pass, bucket by bucket.

    With ``scaler``, a ``GradScaler``, they are exchanged unscaled: its factor may be another one later.
    ``average`` makes a site's mean of them.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        scaler: torch.amp.GradScaler | None,
        average: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(named)
        self._names = {id(p): name for name, p in named.items()}
        self.trained = tuple(named.values())
        self._scaler, self._average = scaler, average
        self._open: list[tuple[Tensor, Future[Tensor]]] = []  # each bucket, and what DDP waits for
        self._views: dict[str, Tensor] = {}  # of the gradients in them
        self._broken: list[Tensor] = []  # whether each bucket was that went back last, for a scaler
        self.mean = torch.empty(0)  # what was exchanged last [n, N]

    def take(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Add the next bucket of a pass; its first one begins anew, should the last pass have failed."""
        if bucket.index() == 0:
            self._open, self._views = [], {}
        buffer = bucket.buffer()
        # Of complex values a buffer has both parts, and ``bucket.gradients()`` the wrong ones.
        names = [self._names[id(p)] for p in bucket.parameters()]
        parts = buffer.split([self._shapes[name].numel() for name in names])
        for name, part in zip(names, parts, strict=True):
            self._views[name] = part.view(self._shapes[name])
        future: Future[Tensor] = Future(devices=None if buffer.device.type == "cpu" else [buffer.device])
        self._open.append((buffer, future))
        return future

    def complete(self, flat: Tensor | None) -> None:
        """Hand all buckets back to DDP with these gradients, or zeros.

        Where all are zeros these are negative: they change no sum, and tell themselves from gradients that
        were cleared.
        """
        buffers = [buffer for buffer, _ in self._open]
        if flat is not None:
            parts = self._parts(self._scaled(flat))
            copy_all([self._views[name] for name, _ in parts], [part for _, part in parts])
        here = self.device.type == "cpu"  # where a look at a value costs no wait
        if flat is None or (here and not any_of(x.any() for x in buffers)):
            for x in buffers:
                x.fill_(-0.0)
        elif not here:
            blank = torch.stack([x.any().to(self.device) for x in buffers]).any().logical_not_()
            for x in buffers:
                x.masked_fill_(blank.to(x.device), -0.0)
        self._broken = [] if self._scaler is None else [all_finite(x).logical_not_() for x in buffers]
        for buffer, future in self._open:
            future.set_result(buffer)
        self._open, self._views = [], {}

    def are_finite(self) -> bool:
        """Return whether what went back last is finite, or no scaler asks."""
        return not any_of(self._broken)

    def are_cleared(self) -> bool:
        """Return whether no parameter has a gradient but zeros such as ``zero_grad`` leaves."""
        found = (real(p.grad) for p in self.trained if p.grad is not None)
        return not any_of(x.view(BITS[x.itemsize]).any() for x in found)  # the bit of a sign counts

    def are_there(self) -> bool:
        """Return whether any parameter has a gradient, be it zeros."""
        return any(p.grad is not None for p in self.trained)

    def gradients(self) -> Tensor:
        flat = self.flat(self._views)
        own = flat if self._scaler is None else flat.div_(self._scale)
        return own if self._average is None else self._average(own)

    def put_gradients(self, flat: Tensor) -> None:
        self.mean = flat

    def put_mean(self) -> None:
        """Write it into the parameters' gradients, outside of a backward pass."""
        super().put_gradients(self._scaled(self.mean))

    def _scaled(self, flat: Tensor) -> Tensor:
        return flat if self._scaler is None else flat * self._scale

    @property
    def _scale(self) -> float | Tensor:
        if self._scaler is None:
            return 1.0
        scale = self._scaler._get_scale_async()  # on its device: to ask for the number would wait
        return self._scaler.get_scale() if scale is None else scale.to(self.device)


@dataclass(frozen=True)
class Origin:
    """Where a saved state comes from: rank of how many, recipe, and shape and dtype of parameters by name.

    It is loaded nowhere else.
    """

    rank: int
    ranks: int
    recipe: str
    parameters: dict[str, str]

    def state_dict(self) -> dict[str, Tensor]:
        """Return it as a tensor of bytes."""
        return {ORIGIN: torch.frombuffer(bytearray(json.dumps(asdict(self)).encode()), dtype=torch.uint8)}

    def check(self, state: Mapping[str, Tensor]) -> None:
        """Raise ``InputError`` unless ``state`` was saved here: by this rank, recipe and model."""
        text = "this is no state that replicate saved, or one of an older thinwire; begin without it"
        require(ORIGIN in state, InputError, text)
        try:
            saved = Origin(**json.loads(bytes(state[ORIGIN].tolist())))
            differs = {n for n, _ in set(saved.parameters.items()) ^ set(self.parameters.items())}
        except (*WRONG_VALUES, AttributeError) as e:
            raise InputError("the origin of this state cannot be read; begin without it") from e
        theirs, own = (f"rank {x.rank} of {x.ranks}" for x in (saved, self))
        text = f"this state was saved by {theirs}, and this is {own}; load what this one saved"
        require(theirs == own, InputError, text)
        text = f"this state was saved with the recipe {saved.recipe}, not {self.recipe}; give the same"
        require(saved.recipe == self.recipe, InputError, text)
        if differs:
            name = min(differs)
            was, is_now = saved.parameters.get(name, "missing"), self.parameters.get(name, "missing")
            text = f"this state is of another model: {name} was {was} and is {is_now}"
            raise InputError(f"{text}; load it into the same")


@dataclass(frozen=True)
class HookTerms:
    """What all ranks of a hooked model have agreed on.

    ``undoes``: gradients are late, or kept back, so it matters which of them are thrown away.
    ``broadcasts``: a drain does what DDP would do before each forward pass, rank 0's buffers to all.
    """

    origin: Origin
    undoes: bool
    broadcasts: bool


class Copied:
    """What a copy of the model has in place of its hook: it exchanges nothing."""


def check_free(ddp: object) -> None:
    """Raise ``InputError`` unless this is a DDP model without a hook."""
    if not isinstance(ddp, DistributedDataParallel):
        raise InputError(
            f"replicate takes a DistributedDataParallel, not {type(ddp).__name__}; wrap the model"
        )
    sparse = [
        name or type(module).__name__
        for name, module in ddp.module.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        and module.sparse
        and module.weight.requires_grad
    ]
    wrong = f"the gradients of {', '.join(sparse)} are sparse tensors; build it with sparse=False"
    require(not sparse, InputError, wrong)
    ddp._comm_hooks = [known for known in ddp._comm_hooks if not isinstance(known[1], Copied)]
    # A built-in hook, or one of mixed_precision, leaves a name with the logger alone.
    name = ddp._get_ddp_logging_data().get("comm_hook", "")
    taken = ddp._comm_hooks or name
    require(
        not taken, InputError, f"this model has the hook {name or taken}, and DDP takes one; leave it out"
    )


def trained(ddp: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """Return what DDP reduces, by name.

    Errors: ``InputError`` where a parameter was added, replaced, frozen or unfrozen since DDP was made.
    """
    found = to_train(ddp)
    buckets = ddp.reducer._get_zeros_like_grad_buckets()
    known = {id(p): bucket.buffer().dtype for bucket in buckets for p in bucket.parameters()}
    new = [name for name, p in found.items() if id(p) not in known]
    text = f"DDP does not reduce {', '.join(new)}, which was added or unfrozen after it was made"
    require(not new, InputError, f"{text}; wrap the model once it is complete")
    gone = len(known) - len(found)
    text = f"DDP reduces {gone} parameters that were removed or frozen after it was made"
    require(gone == 0, InputError, f"{text}; wrap the model once it is complete")
    other = [name for name, p in found.items() if p.dtype.to_real() != known[id(p)]]
    text = f"{', '.join(other)} has another dtype than when DDP was made"
    require(not other, InputError, f"{text}; convert the model before it is wrapped")
    return found


def check_same(ddp: DistributedDataParallel, known: Collection[nn.Parameter]) -> None:
    """Raise ``InputError`` where something is trained that is not ``known``."""
    ids = set(map(id, known))
    new = [name for name, p in to_train(ddp).items() if id(p) not in ids]
    text = f"{', '.join(new)} was added or unfrozen after replicate, and is not exchanged"
    require(not new, InputError, f"{text}; wrap the model and call replicate once it is complete")


def to_train(ddp: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """Return the parameters that DDP would reduce if it were made now, by name, each once."""
    return {name: p for name, p in _parameters(ddp) if p.requires_grad}


def _parameters(ddp: DistributedDataParallel) -> Iterator[tuple[str, nn.Parameter]]:
    seen: set[int] = set()
    left_out = set(ddp.parameters_to_ignore)
    for place, module in ddp.module.named_modules():
        for name, p in module.named_parameters(recurse=False):
            if f"{place}.{name}" not in left_out and id(p) not in seen:  # DDP's own rule, also at the root
                seen.add(id(p))
                yield f"{place}.{name}".lstrip("."), p


def digest_of_weights(ddp: DistributedDataParallel) -> str:
    """Return a digest of all bits of what DDP keeps alike: trained parameters and frozen ones.

    Each parameter is summed where it is, so all of them are waited for once.
    """
    found = dict(sorted(_parameters(ddp)))
    sums = sums_of([real(p.detach()) for p in found.values()])
    told = [[name, list(p.shape), str(p.dtype), n] for (name, p), n in zip(found.items(), sums, strict=True)]
    return hashlib.blake2b(json.dumps(told).encode(), digest_size=16).hexdigest()


def average_statistics(
    ddp: DistributedDataParallel, beyond: Callable[[Tensor], Tensor] = lambda mean: mean
) -> None:
    """Average the running statistics of norms, such as BatchNorm's, over DDP's own group.

    In float64, so that equal ones stay what they are; counts and all other buffers stay as they are.
    ``beyond`` makes the mean of all sites of this site's.
    """
    found = statistics(ddp)
    if not found:
        return
    flat = torch.cat([x.detach().reshape(-1).double() for x in found])
    dist.all_reduce(flat, group=ddp.process_group)
    flat = beyond(flat / ddp.process_group.size())
    with torch.no_grad():
        for x, part in zip(found, flat.split([x.numel() for x in found]), strict=True):
            x.copy_(part.view_as(x))


def broadcast_the_rest(ddp: DistributedDataParallel) -> None:
    """Send rank 0's buffers to all others, but for statistics: what DDP does before a forward pass."""
    averaged = set(map(id, statistics(ddp)))
    ddp._assign_modules_buffers()
    rest = [x for x in ddp.modules_buffers if id(x) not in averaged]
    if rest:
        with torch.no_grad():
            ddp._default_broadcast_coalesced(bufs=rest)


def statistics(ddp: DistributedDataParallel) -> list[Tensor]:
    """Return the running means and variances of the model's norms."""
    left_out = set(ddp.parameters_to_ignore)
    return [x for name, x in ddp.module.named_buffers() if is_statistic(name, x) and name not in left_out]


def is_statistic(name: str, buffer: Tensor) -> bool:
    """Say whether a buffer of this name is the running mean or variance of a norm."""
    return name.rpartition(".")[2] in STATISTICS and buffer.is_floating_point()
