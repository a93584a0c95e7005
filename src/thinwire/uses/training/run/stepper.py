"""One rank's share of a run: stages and schedule, steps and evaluation passes, what replicas exchange.

Each rank tells of a step by a report. Rank 0, which keeps the recorder, reads it a step late: nobody waits.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from thinwire.channels.disk import open_store
from thinwire.runs.data.task import BatchLoss, learnt
from thinwire.runs.machine.compute import Compute
from thinwire.runs.machine.devices import check_room
from thinwire.runs.models.cnn import CNN, build_cnn
from thinwire.runs.models.dropout import seed_dropout
from thinwire.runs.models.lora import add_adapters
from thinwire.runs.models.split import build_stage, tie
from thinwire.runs.ranks import joining
from thinwire.runs.ranks.telemetry import Telemetry
from thinwire.runs.ranks.world import World
from thinwire.types import InputError, ThinwireError, require
from thinwire.uses.training.pipeline.boundary import StageTally
from thinwire.uses.training.pipeline.compressed_stage import WAYS, CompressedStage, ScheduleEager1F1B
from thinwire.uses.training.replicas.assembly import Adaptation, synchroniser_of
from thinwire.uses.training.replicas.choosing.replica_policy import ReplicaChoice
from thinwire.uses.training.replicas.controller import PlanChange
from thinwire.uses.training.replicas.flat_parameters import FlatParameters
from thinwire.uses.training.replicas.networks import over_mesh
from thinwire.uses.training.replicas.recipes import EXCHANGE
from thinwire.uses.training.replicas.synchroniser import Synchroniser
from thinwire.uses.training.run.options import TrainConfig, sgd_momentum
from thinwire.uses.training.run.record import Decision
from thinwire.uses.training.run.training_job import Job

TAG = b"S"  # of a report
STREAMS = (*WAYS, EXCHANGE)  # of bytes and values: what stages send, and what replicas do
REPLICAS = "replicas"  # the boundary at which their decisions are


class Stepper:
    """Pass batches through the pipeline; ``parts`` are this rank's modules.

    ``optimiser``: one that has the parts' parameters already, where several steppers share them.
    """

    def __init__(
        self,
        job: Job,
        world: World,
        parts: Mapping[int, StagePart],
        optimiser: torch.optim.Optimizer | None = None,
    ) -> None:
        self.job, self.config, self.world = job, job.config, world
        self.pipeline = world.pipeline
        self._norms = Telemetry(self.pipeline, job.config.deadline)
        self.stages = build_stages(job, world, parts)
        self.loss = BatchLoss(job.task.accuracy)
        self.schedule = build_schedule(job, self.stages, self.loss)
        self.parameters = [p for stage in self.stages for p in trained(stage).values()]
        self._sent = 0  # bytes of exchanges
        self.synchroniser = build_synchroniser(job, world, self.stages) if world.replicas > 1 else None
        self.optimiser = optimiser or make_optimiser(self.config, self.parameters)

    def step(self, step: int, ids: Tensor, upcoming: Tensor, rest: str = "") -> StepReport:
        """Do step number ``step`` on the samples ``ids``; ``upcoming`` are those of the step after it.

        ``rest``: what a replica does behind it: nothing, ``rest``, ``drain`` or ``finish``, by name.
        """
        if self.synchroniser is not None:
            self.synchroniser.begin()
        block, own = self.job.train[ids], self._share(len(ids))
        if self.pipeline.rank == 0:
            self.stages[0].begin(ids[own], self.config.microbatches, upcoming[self._share(len(upcoming))])
        loss = self._through(self.schedule.step, block[own], block)
        start, self._waited = time.perf_counter(), 0.0
        self._unscale(self.job.compute.loss_scale)
        self._set_lr(step)
        if self.synchroniser is None:
            self._update(step)
        else:
            self._exchange(self.synchroniser, step, rest)
        report = report_of(self.world.rank, step, loss, self.stages)
        coded = 0.0 if self.synchroniser is None else self._count(self.synchroniser, report)
        report.compute_s += time.perf_counter() - start - self._waited - coded
        report.wait_s += self._waited
        return report

    def _share(self, samples: int) -> slice:
        """Return which of a batch's samples this replica trains on."""
        many = samples // self.world.replicas
        return slice(self.world.replica * many, (self.world.replica + 1) * many)

    def _exchange(self, synchroniser: Synchroniser, step: int, rest: str) -> None:
        def update() -> None:
            self._update(step)

        synchroniser.step(update)
        if rest:
            getattr(synchroniser, rest)(update)
        self.optimiser.zero_grad(set_to_none=True)

    def _count(self, synchroniser: Synchroniser, report: StepReport) -> float:
        """Add what the exchanges of a step cost, values as of an all-reduce; return the seconds of coding."""
        tally, others = synchroniser.tally.take(), self.world.replicas - 1
        report.values[EXCHANGE] = 2 * others * sum(p.numel() for p in self.parameters) // self.world.replicas
        sent = exchanged(self.world)
        report.bytes[EXCHANGE], self._sent = sent - self._sent, sent
        report.exchanges = tally.exchanges
        report.encode_s += tally.encode_s
        report.decode_s += tally.decode_s
        self._waited += tally.wait_s
        return tally.encode_s + tally.decode_s

    def _update(self, step: int) -> None:
        self._waited += self._clip(step)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)

    def close(self) -> None:
        """End the stages' threads and free their references."""
        for stage in self.stages:
            stage.close()

    def evaluate(self, blocks: Tensor) -> tuple[float, int, int]:
        """Pass this replica's batches of ``blocks`` uncompressed, and return three sums over their targets.

        The losses, how many there are, and how many were right; zeros on all ranks but a pipeline's last.
        """
        total, count, right = 0.0, 0, 0
        for block in blocks.split(self.config.samples)[self.world.replica :: self.world.replicas]:
            loss = self._through(self.schedule.eval, block)
            if loss is not None:
                n = learnt(self.job.task.targets(block))
                total, count, right = total + loss * n, count + n, right + int(self.loss.right)
        return total, count, right

    def _through(self, run: Any, block: Tensor, batch: Tensor | None = None) -> float | None:
        """Pass a replica's share of a batch through the pipeline; return the loss on the last rank.

        Losses are by share of the targets of the whole ``batch``, or of these alone.

        The logits are nobody's to see: all micro-batches' together would be the largest tensors of a step.
        """
        losses: list[Tensor] = []
        task, device = self.job.task, self.job.compute.device
        given = (task.inputs(block).to(device, non_blocking=True),) if self.pipeline.rank == 0 else ()
        if self.pipeline.rank == self.pipeline.size - 1:
            wanted = task.targets(block)
            whole, parts = (wanted, 1) if batch is None else (task.targets(batch), self.world.replicas)
            scale = 1.0 if batch is None else self.job.compute.loss_scale
            self.loss.begin(whole, parts * self.config.microbatches, scale)
            run(*given, target=wanted.to(device, non_blocking=True), losses=losses, return_outputs=False)
        else:
            run(*given, return_outputs=False)
        if not losses:
            return None
        return sum(torch.stack([v.detach() for v in losses]).tolist()) / len(losses) / self.loss.scale

    def _unscale(self, scale: float) -> None:
        """Take out of the gradients what the loss was multiplied by."""
        if scale != 1.0:
            torch._foreach_mul_([p.grad for p in self.parameters if p.grad is not None], 1.0 / scale)

    def _clip(self, step: int) -> float:
        """Scale the gradients down to the norm allowed over all ranks; return the seconds waited for them.

        Errors: ``ThinwireError`` on every rank where the norm is not finite: a step would lose the weights.
        """
        limit = self.config.grad_clip
        if not limit:
            return 0.0
        grads = [p.grad for p in self.parameters if p.grad is not None]
        own = torch.nn.utils.get_total_norm(grads).item() if grads else 0.0
        start = time.perf_counter()
        norm = math.sqrt(self._norms.squared_norm(own * own))
        waited = time.perf_counter() - start
        told = self.synchroniser is not None  # all ranks, and whose it was
        require(
            math.isfinite(norm) or told, ThinwireError, ran_away(self.config, "gradient norm", step, norm)
        )
        if norm > limit:
            torch._foreach_mul_(grads, limit / (norm + 1e-6))
        return waited

    def _set_lr(self, step: int) -> None:
        for group in self.optimiser.param_groups:
            group["lr"] = scheduled_rate(self.config, step, self.job.steps)


def ran_away(config: TrainConfig, what: str, step: int, value: float) -> str:
    """Return the sentence for a number of ``step`` that is not finite."""
    return (
        f"the {what} of step {step} is {value}; lower --lr, now {config.learning_rate:g}, or raise --warmup"
    )


def scheduled_rate(config: TrainConfig, step: int, steps: int) -> float:
    """Return the learning rate of ``step``, counted from 1.

    >>> scheduled_rate(TrainConfig(lr=1.0, warmup=2), 1, 10)
    0.5
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    done = (step - 1 - warmup) / max(1, steps - warmup)
    if config.lr_schedule == "linear":
        return peak * (1 - done)
    if config.lr_schedule == "cosine":
        return peak * (1 + math.cos(math.pi * done)) / 2
    return peak


def make_optimiser(config: TrainConfig, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Return the optimiser that a configuration asks for, over ``parameters``."""
    rate, decay, momentum = config.learning_rate, config.weight_decay, sgd_momentum(config.optimizer)
    if momentum is None:
        return torch.optim.AdamW(parameters, rate, weight_decay=decay, fused=True)
    return torch.optim.SGD(parameters, rate, momentum=momentum, weight_decay=decay, fused=True)


@dataclass
class StepReport:
    """One rank's share of a step: seconds by kind, values and bytes by stream, perhaps the loss."""

    rank: int
    step: int
    loss: float | None = None
    compute_s: float = 0.0
    encode_s: float = 0.0
    decode_s: float = 0.0
    wait_s: float = 0.0
    exchanges: int = 0
    seconds: float = 0.0  # of the whole step, for this rank's own record
    ended: float = 0.0  # by this rank's clock
    values: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STREAMS, 0))
    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STREAMS, 0))
    links: list[dict[str, Any]] = field(default_factory=list)  # LinkMetrics

    def add(self, tally: StageTally) -> None:
        """Add what one stage did."""
        for name in ("compute_s", "encode_s", "decode_s", "wait_s"):
            setattr(self, name, getattr(self, name) + getattr(tally, name))
        for way in WAYS:
            self.values[way] += tally.values[way]
            self.bytes[way] += tally.wire_bytes[way]

    def send(self, telemetry: Telemetry) -> None:
        """Send it to rank 0, which keeps its own."""
        if telemetry.world.rank:
            telemetry.send(0, TAG, asdict(self))

    def of_all(self, telemetry: Telemetry) -> list[StepReport]:
        """Return, on rank 0, every rank's report of this step."""
        what = f"the report of step {self.step}"
        return [self] + [StepReport(**telemetry.get(r, TAG, what)) for r in range(1, telemetry.world.size)]


def report_of(rank: int, step: int, loss: float | None, stages: list[CompressedStage]) -> StepReport:
    """Return this rank's report of a step and start the stages' tallies again."""
    report = StepReport(rank, step, loss)
    for stage in stages:
        stage.end()
        report.add(stage.tally.take())
    return report


def joined(job: Job) -> AbstractContextManager[World]:
    """Be one of the ranks of a training run in the block."""
    config = job.config
    return joining.joined(config, config.layout, "--stages or --replicas", config.replicas)


class Autocast(nn.Module):
    """Run a stage's forward pass in the dtype of compute; within it hidden states stay float32.

    ``last``: it has the head, whose logits cross nothing.
    """

    def __init__(self, stage: nn.Module, compute: Compute, last: bool) -> None:
        super().__init__()
        self.stage, self.compute, self.last = stage, compute, last

    def forward(self, x: Tensor) -> Tensor:
        with self.compute.autocast():
            out: Tensor = self.stage(x.float() if x.is_floating_point() else x)
        return out if self.last else out.to(self.compute.crossing)


@dataclass(frozen=True)
class StagePart:
    """One stage's module, and who is to be told the samples that pass through it."""

    module: nn.Module
    on_samples: Callable[[Sequence[int]], None]


def build_parts(job: Job, world: World) -> dict[int, StagePart]:
    """Return this rank's part of the model by stage: every ``size``-th stage, its tensors alone in memory."""
    config, parts, pipeline = job.config, {}, world.pipeline
    for index in range(pipeline.rank, config.stages, pipeline.size):
        parts[index] = _build_part(job, index)
    return parts


def _build_part(job: Job, index: int) -> StagePart:
    """Return a stage. Its weights are made on the processor, so that they are the same for every device."""
    config, last = job.config, index == job.config.stages - 1
    if config.model == CNN:
        return StagePart(_placed(build_cnn(job.source.config, config.seed), job, last), lambda _ids: None)
    stage = build_stage(job.source, job.cut, index, config.seed)
    if config.stages == 1 and job.source.config.tie_word_embeddings:  # both ends of the matrix are here
        tie(stage)
    if config.lora:
        add_adapters(stage, config.lora, config.seed, config.dropout)
    return StagePart(_placed(stage, job, last), seed_dropout(stage, config.seed).set)


def _placed(stage: nn.Module, job: Job, last: bool) -> Autocast:
    """Return a stage on the device that computes it. Errors: ``DeviceFull`` where training it has no room."""
    device = job.compute.device
    kept = sum(p.numel() * p.element_size() for p in stage.parameters())
    trained = sum(p.numel() * p.element_size() for p in stage.parameters() if p.requires_grad)
    momentum = sgd_momentum(job.config.optimizer)
    copies = 3 if momentum is None else 2 if momentum else 1  # of what is trained, besides: gradient, state
    check_room(device, kept + copies * trained, "training this rank's part of the model")
    return Autocast(stage.to(device), job.compute, last)


def trained(stage: CompressedStage) -> dict[str, Tensor]:
    """Return what a stage trains, by name in the order of layers."""
    return {name: p for name, p in stage.submod.named_parameters() if p.requires_grad}


def build_stages(job: Job, world: World, parts: Mapping[int, StagePart]) -> list[CompressedStage]:
    """Return the stages that send between the ``parts`` by the job's recipe."""
    config, compute = job.config, job.compute
    task, rows = job.task, config.rows
    hidden = torch.empty(rows, *task.hidden, dtype=compute.crossing, device="meta")
    given = task.inputs(task.blank(rows)).to("meta")
    logits = torch.empty(rows, *task.logits, device="meta")
    stages = []
    for index, part in parts.items():
        first, last = index == 0, index == config.stages - 1
        stages.append(
            CompressedStage(
                part.module,
                index,
                config.stages,
                compute.device,
                input_args=given if first else hidden.clone().requires_grad_(),
                output_args=logits.to(compute.dtype) if last else hidden,
                input_grads=None if first else hidden,
                output_grads=None if last else hidden,
                peers=world.pipeline.peers,
                recipe=job.recipe,
                deadline=config.deadline,
                store=open_store(config.references),
                overlap=config.overlap,
                on_samples=part.on_samples,
            )
        )
    return stages


def build_schedule(job: Job, stages: list[CompressedStage], loss: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Return the schedule over the stages; ``loss`` is of a micro-batch's logits and targets."""
    n, name = job.config.microbatches, job.config.schedule
    if name == "interleaved1f1b":
        return ScheduleInterleaved1F1B(list(stages), n, loss_fn=loss)
    known = {"eager1f1b": ScheduleEager1F1B, "1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
    return known[name](stages[0], n, loss_fn=loss)


def parameters(stages: Sequence[CompressedStage]) -> dict[str, Tensor]:
    """Return what this rank trains by name, in the order of layers."""
    return {f"{s.stage_index}.{name}": p for s in stages for name, p in trained(s).items()}


def build_synchroniser(job: Job, world: World, stages: Sequence[CompressedStage]) -> Synchroniser:
    """Return what keeps this rank's parameters together with those of the other replicas."""
    recipe = job.replica_recipe
    ranks = [peer.rank for peer in world.partners.values()]
    network = over_mesh(world.rank, world.peers, ranks, job.config.deadline)
    policy = recipe.policy
    plan = None if policy is None else Adaptation(policy, job.steps)
    return synchroniser_of(recipe.schemes[EXCHANGE], parameters(stages), network, plan)


def exchanged(world: World) -> int:
    """Return the bytes that this rank has sent in exchanges, all headers included."""
    sent = [peer.meter.snapshot().sent for peer in world.partners.values()]
    return sum(labels[EXCHANGE].nbytes for labels in sent if EXCHANGE in labels)


def check_same_parameters(world: World, telemetry: Telemetry, stages: Sequence[CompressedStage]) -> None:
    """Raise ``InputError`` unless all replicas train the same parameters."""
    own = parameters(stages)
    digests = telemetry.agree(b"R", FlatParameters(own).digest, "what it trains")
    for rank, digest in enumerate(digests):
        if rank % world.pipeline.size == world.pipeline.rank and digest != digests[world.rank]:
            raise InputError(
                f"rank {rank} trains other parameters than the {len(own)} of rank {world.rank}; "
                "start all replicas with the same model and cut"
            )


def check_same_weights(
    world: World, telemetry: Telemetry, stages: Sequence[CompressedStage], synchroniser: Synchroniser
) -> None:
    """Raise ``InputError`` unless all replicas start from the same bits."""
    with synchroniser.shared():
        same = are_equal(world, telemetry, stages)
    if not same:
        raise InputError(
            "the replicas do not start from the same weights; start them all from the same model folder, "
            "since random ones may differ between machines"
        )


def measure_links(world: World) -> None:
    """Measure the idle links to the other replicas, before a plan is made by what they are."""
    for peer in world.partners.values():
        peer.measure()


def are_equal(world: World, telemetry: Telemetry, stages: Sequence[CompressedStage]) -> bool:
    """Return whether all replicas hold the same bits."""
    digest = hashlib.blake2b(digest_size=16)
    for p in parameters(stages).values():
        digest.update(p.detach().cpu().contiguous().view(-1).numpy().data)
    digests = telemetry.agree(b"H", digest.hexdigest(), "the digest of its parameters")
    size = world.pipeline.size
    return all(len(set(digests[place::size])) == 1 for place in range(size))


def decision(change: PlanChange) -> Decision:
    """Return the record's line for a change of the plan."""
    choice = change.choice
    return Decision(
        step=change.step,
        boundary=REPLICAS,
        direction=EXCHANGE,
        choice=describe(choice),
        bits=choice.bits_per_value(change.site.values, change.site.sides) / choice.local_steps,
        reason=choice.reason,
        rate_bytes_s=change.site.rate,
        rtt_s=None if change.site.delay is None else 2 * change.site.delay,
        ratio=choice.ratio,
        staleness=choice.staleness,
        local_steps=choice.local_steps,
        predicted_s=choice.predicted,
    )


def describe(choice: ReplicaChoice) -> str:
    """Say in short how replicas exchange."""
    what = f"{choice.bits:.2g} bits" if choice.bits else "as it is"
    if choice.ratio is not None:
        what = f"{choice.ratio:.2%} of the values"
    if choice.rank is not None:
        what = f"rank {choice.rank}"
    often = f"every {choice.local_steps} steps" if choice.local_steps > 1 else "each step"
    return f"{what}, {often}" + (f", {choice.staleness} late" if choice.staleness else "")
