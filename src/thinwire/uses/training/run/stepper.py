"""One rank's share of optimiser steps and evaluation passes: its stages, the schedule and the optimiser."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.runs.data.loss import BatchLoss, learnt
from thinwire.runs.ranks.telemetry import Telemetry
from thinwire.runs.ranks.world import World
from thinwire.types import ThinwireError, require
from thinwire.uses.training.replicas.synchroniser import Synchroniser
from thinwire.uses.training.run.config import TrainConfig
from thinwire.uses.training.run.job import Job
from thinwire.uses.training.run.optimiser import make_optimiser
from thinwire.uses.training.run.replicating import build_synchroniser, exchanged
from thinwire.uses.training.run.setup import Part, build_schedule, build_stages, trained
from thinwire.uses.training.run.step_report import EXCHANGE, StepReport, report_of


class Stepper:
    """Pass batches through the pipeline; ``parts`` are this rank's modules.

    ``optimiser``: one that has the parts' parameters already, where several steppers share them.
    """

    def __init__(
        self,
        job: Job,
        world: World,
        parts: Mapping[int, Part],
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

        ``rest``: what a replica does behind it: nothing, ``drain`` or ``finish``, by name.
        """
        if self.synchroniser is not None:
            self.synchroniser.begin()
        block, own = self.job.train[ids], self._share(len(ids))
        if self.pipeline.rank == 0:
            self.stages[0].begin(ids[own], self.config.microbatches, upcoming[self._share(len(upcoming))])
        loss = self._through(self.schedule.step, block[own], block)
        start, self._waited = time.perf_counter(), 0.0
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
                total, count, right = total + loss * n, count + n, right + self.loss.right
        return total, count, right

    def _through(self, run: Any, block: Tensor, batch: Tensor | None = None) -> float | None:
        """Pass a replica's share of a batch through the pipeline; return the loss on the last rank.

        Losses are by share of the targets of the whole ``batch``, or of these alone.

        The logits are nobody's to see: all micro-batches' together would be the largest tensors of a step.
        """
        losses: list[Tensor] = []
        task = self.job.task
        given = (task.inputs(block),) if self.pipeline.rank == 0 else ()
        if self.pipeline.rank == self.pipeline.size - 1:
            wanted = task.targets(block)
            whole, parts = (wanted, 1) if batch is None else (task.targets(batch), self.world.replicas)
            self.loss.begin(whole, parts * self.config.microbatches)
            run(*given, target=wanted, losses=losses, return_outputs=False)
        else:
            run(*given, return_outputs=False)
        return sum(v.detach().item() for v in losses) / len(losses) if losses else None

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
            group["lr"] = learning_rate(self.config, step, self.job.steps)


def ran_away(config: TrainConfig, what: str, step: int, value: float) -> str:
    """Return the sentence for a number of ``step`` that is not finite."""
    return (
        f"the {what} of step {step} is {value}; lower --lr, now {config.learning_rate:g}, or raise --warmup"
    )


def learning_rate(config: TrainConfig, step: int, steps: int) -> float:
    """Return the learning rate of ``step``, counted from 1.

    >>> learning_rate(TrainConfig(lr=1.0, warmup=2), 1, 10)
    0.5
    """
    peak = config.learning_rate
    if step <= config.warmup:
        return peak * step / config.warmup
    done = (step - 1 - config.warmup) / max(1, steps - config.warmup)
    if config.lr_schedule == "linear":
        return peak * (1 - done)
    if config.lr_schedule == "cosine":
        return peak * (1 + math.cos(math.pi * done)) / 2
    return peak
