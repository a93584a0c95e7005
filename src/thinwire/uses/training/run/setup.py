"""Build what one rank needs: process group, links, its stages, the schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from thinwire.channels.disk import open_store
from thinwire.runs.machine.processor import pick_dtype
from thinwire.runs.models.cnn import CNN, build_cnn
from thinwire.runs.models.dropout import seed_dropout
from thinwire.runs.models.lora import add_adapters
from thinwire.runs.models.split import build_stage, tie
from thinwire.runs.ranks import joining
from thinwire.runs.ranks.world import World
from thinwire.uses.training.pipeline.stage import CompressedStage, ScheduleEager1F1B
from thinwire.uses.training.run.job import Job


def joined(job: Job) -> AbstractContextManager[World]:
    """Be one of the ranks of a training run in the block."""
    config = job.config
    return joining.joined(config, config.layout, "--stages or --replicas", config.replicas)


class Autocast(nn.Module):
    """Run a stage's forward pass in bf16 autocast; its hidden states stay float32."""

    def __init__(self, stage: nn.Module, enabled: bool) -> None:
        super().__init__()
        self.stage, self.enabled = stage, enabled

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.enabled):
            out: Tensor = self.stage(x)
        return out


@dataclass(frozen=True)
class Part:
    """One stage's module, and who is to be told the samples that pass through it."""

    module: nn.Module
    on_samples: Callable[[Sequence[int]], None]


def build_parts(job: Job, world: World) -> dict[int, Part]:
    """Return this rank's part of the model by stage: every ``size``-th stage, its tensors alone in memory."""
    config, parts, pipeline = job.config, {}, world.pipeline
    for index in range(pipeline.rank, config.stages, pipeline.size):
        parts[index] = _build_part(job, index)
    return parts


def _build_part(job: Job, index: int) -> Part:
    config, bf16 = job.config, pick_dtype(job.config.dtype)[0] == "bf16"
    if config.model == CNN:
        return Part(Autocast(build_cnn(job.source.config, config.seed), bf16), lambda _ids: None)
    stage = build_stage(job.source, job.cut, index, config.seed)
    if config.stages == 1 and job.source.config.tie_word_embeddings:  # both ends of the matrix are here
        tie(stage)
    if config.lora:
        add_adapters(stage, config.lora, config.seed, config.dropout)
    return Part(Autocast(stage, bf16), seed_dropout(stage, config.seed).set)


def trained(stage: CompressedStage) -> dict[str, Tensor]:
    """Return what a stage trains, by name in the order of layers."""
    return {name: p for name, p in stage.submod.named_parameters() if p.requires_grad}


def build_stages(job: Job, world: World, parts: Mapping[int, Part]) -> list[CompressedStage]:
    """Return the stages that send between the ``parts`` by the job's recipe."""
    config = job.config
    bf16 = pick_dtype(config.dtype)[0] == "bf16"
    task, rows = job.task, config.rows
    hidden = torch.empty(rows, *task.hidden, device="meta")
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
                torch.device("cpu"),
                input_args=given if first else hidden.clone().requires_grad_(),
                output_args=logits.to(torch.bfloat16 if bf16 else torch.float32) if last else hidden,
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
