"""One rank's share of optimiser steps and evaluation passes: its stages, the schedule and the optimiser."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.lab.data.loss import BatchLoss, learnt
from thinwire.lab.data.packing import inputs, targets
from thinwire.lab.ranks.telemetry import StepReport, Telemetry, report_of
from thinwire.lab.ranks.world import World
from thinwire.lab.train.config import TrainConfig
from thinwire.lab.train.job import Job
from thinwire.lab.train.setup import Part, build_schedule, build_stages
from thinwire.types import ThinwireError, require


class Stepper:
    """Pass batches through the pipeline; ``parts`` are this rank's modules.

    ``optimiser``: one that has the parts' parameters already, where several steppers share them.
    """

    def __init__(
        self,
        job: Job,
        world: World,
        telemetry: Telemetry,
        parts: Mapping[int, Part],
        optimiser: torch.optim.Optimizer | None = None,
    ) -> None:
        self.job, self.config, self.world, self.telemetry = job, job.config, world, telemetry
        self.stages = build_stages(job, world, parts)
        self.loss = BatchLoss()
        self.schedule = build_schedule(job, self.stages, self.loss)
        self.parameters = [p for s in self.stages for p in s.submod.parameters() if p.requires_grad]
        self.optimiser = optimiser or torch.optim.AdamW(
            self.parameters, self.config.learning_rate, weight_decay=self.config.weight_decay, fused=True
        )

    def step(self, step: int, ids: Tensor, upcoming: Tensor) -> StepReport:
        """Do step number ``step`` on the samples ``ids``; ``upcoming`` are those of the step after it."""
        block = self.job.train[ids]
        if self.world.rank == 0:
            self.stages[0].begin(ids, self.config.microbatches, upcoming)
        loss = self._through(self.schedule.step, block)
        start = time.perf_counter()
        waited = self._clip(step)
        self._set_lr(step)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        report = report_of(self.world.rank, step, loss, self.stages)
        report.compute_s += time.perf_counter() - start - waited
        report.wait_s += waited
        return report

    def close(self) -> None:
        """End the stages' threads and free their references."""
        for stage in self.stages:
            stage.close()

    def mean_loss(self, blocks: Tensor) -> float | None:
        """Return the loss over ``blocks`` by uncompressed passes, on the last rank."""
        batches = blocks.split(self.config.batch)
        losses = [self._through(self.schedule.eval, b) for b in batches]
        known = [(v, learnt(targets(b))) for v, b in zip(losses, batches, strict=True) if v is not None]
        return sum(v * n for v, n in known) / sum(n for _, n in known) if known else None

    def _through(self, run: Any, block: Tensor) -> float | None:
        """Pass one batch [B, L + 1] through the pipeline; return the loss on the last rank.

        The logits are nobody's to see: all micro-batches' together would be the largest tensors of a step.
        """
        losses: list[Tensor] = []
        given = (inputs(block),) if self.world.rank == 0 else ()
        if self.world.rank == self.world.size - 1:
            wanted = targets(block)
            self.loss.begin(wanted, self.config.microbatches)
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
        norm = math.sqrt(self.telemetry.squared_norm(own * own))
        waited = time.perf_counter() - start
        require(math.isfinite(norm), ThinwireError, ran_away(self.config, "gradient norm", step, norm))
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
