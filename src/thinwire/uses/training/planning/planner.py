"""From a job and a file of machines to proposals: what the planner needs, measured or looked up."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from thinwire.choosing.policy import gaussian_bits
from thinwire.runs.machine import devices
from thinwire.runs.machine.compute import Compute, computing_threads
from thinwire.runs.machine.processor import keep_freed, pick_threads
from thinwire.runs.models.cuts import (
    counted_costs,
    embedding_numel,
    embedding_seconds,
    measured_costs,
    median_seconds,
)
from thinwire.runs.models.lora import add_adapters, require_peft
from thinwire.runs.models.model_source import model_config
from thinwire.types import InputError, require
from thinwire.uses.training.pipeline.choosing.pipeline_plan import (
    Cut,
    Option,
    Proposal,
    StageMachine,
    Work,
    foretell,
    propose,
)
from thinwire.uses.training.pipeline.choosing.pipeline_policy import BACKWARD, FORWARD
from thinwire.uses.training.pipeline.recipes import PipelineRecipe, parse_recipe
from thinwire.uses.training.planning.machines_file import MachineEntry, MachinesFile, MachineSpeed
from thinwire.uses.training.run.options import TrainConfig

CANDIDATES = ("fp32", "bf16", "auto", "thinwire")  # the most exact first


class Planner:
    """The plan of one job: its model, its work, and what this machine takes for it."""

    def __init__(self, config: TrainConfig) -> None:
        if config.lora:
            require_peft()
        self.config = config
        self._model: Any = model_config(config.model, config.init)
        self._rows = config.batch // config.microbatches
        values = self._rows * config.seq * self._model.hidden_size
        self.work = Work(self._model.num_hidden_layers, config.microbatches, values)

    def measured(self) -> MachineSpeed:
        """Return what a micro-batch takes on this machine."""
        return self._here

    @cached_property
    def _here(self) -> MachineSpeed:
        return measure(self.config, self._model)

    def propose(self, file: MachinesFile, schedules: Sequence[str]) -> list[Proposal]:
        """Return the best plan for each candidate recipe, the proposed one first."""
        return propose(self._machines(file), file.ways, self.work, _options(), schedules)

    def foretell(self, file: MachinesFile, cut: Cut, schedule: str) -> list[Proposal]:
        """Return the step of each candidate recipe, the proposed one first, where all else is settled.

        The machines are in the order of the file, with ``cut`` layers each.
        """
        return foretell(self._machines(file), file.ways, self.work, _options(), cut, schedule)

    def without_one(self, file: MachinesFile, schedules: Sequence[str]) -> dict[str, Proposal]:
        """Return the proposed plan that leaves a machine out, by that machine; none where two are there."""
        machines = self._machines(file)
        if len(machines) < 3:
            return {}
        others = {m.name: [o for o in machines if o is not m] for m in machines}
        return {
            name: propose(kept, file.ways, self.work, _options(), schedules)[0]
            for name, kept in others.items()
        }

    def _machines(self, file: MachinesFile) -> list[StageMachine]:
        return [self._machine(entry) for entry in file.machines]

    def _machine(self, entry: MachineEntry) -> StageMachine:
        found, speed = entry.measured or self._here, entry.speed or 1.0
        require(
            found.model == self.config.model,
            InputError,
            f"machine {entry.name!r} was measured with {found.model}, the plan is for {self.config.model}; "
            "measure it again",
        )
        require(
            found.lora == self.config.lora,
            InputError,
            f"machine {entry.name!r} was measured with --lora {found.lora}, the plan is for --lora "
            f"{self.config.lora}; measure it again",
        )
        factor = self._rows * self.config.seq / found.tokens / speed
        update = found.update / speed
        head, embedding = self._matrices
        return StageMachine(
            entry.name,
            found.layer * factor,
            found.head * factor,
            update,
            found.embed / speed,  # by the size of the matrix, whatever the tokens
            head_update=update * head,
            embed_update=update * embedding,
        )

    @cached_property
    def _matrices(self) -> tuple[float, float]:
        """Return the trained parameters of head and embedding, in layers: by these go optimiser steps."""
        if self.config.lora:
            return 0.0, 0.0
        costs = counted_costs(self._model)
        return costs.head / costs.layers[0], embedding_numel(self._model) / costs.layers[0]


def _options() -> list[Option]:
    return [option(parse_recipe(name)) for name in CANDIDATES]


def option(recipe: PipelineRecipe) -> Option:
    """Return a recipe as the planner sees it: the bits of a first visit, the dearer ones.

    >>> option(parse_recipe("direct:bits=8")).forward
    8.5
    """
    first = {way: s.keyframe if s.memory.mirrored else s.codec for way, s in recipe.schemes.items()}
    bits = {way: gaussian_bits(codec) for way, codec in first.items()}
    return Option(recipe.name, bits[FORWARD], bits[BACKWARD], recipe.policy)


def measure(job: TrainConfig, config: Any) -> MachineSpeed:
    """Time a micro-batch of ``job`` through layer, head and embedding, and a layer's optimiser step.

    On the device and threads, in the precision and with the adapters that ``job`` would train with; medians.
    ``config``: the model's own. Adapters leave the embedding frozen, which makes it free.
    """
    keep_freed()
    rows, compute = job.batch // job.microbatches, Compute.of(devices.own(job.device), job.dtype)
    with computing_threads(pick_threads(job)):
        costs = measured_costs(config, rows, job.seq, lora=job.lora, compute=compute)
        embed = 0.0 if job.lora else embedding_seconds(config, rows, job.seq, compute)
        update = _update_seconds(config, job.lora, compute)
    tokens = rows * job.seq
    layer, device = costs.layers[0], compute.device.type
    return MachineSpeed(job.model, tokens, layer, costs.head, update, embed, job.lora, job.threads, device)


def _update_seconds(config: Any, lora: int, compute: Compute) -> float:
    """Return the seconds of AdamW and of clipping to a norm over what is trained of one layer."""
    from thinwire.runs.models.split import probe

    stage = probe(config, range(1), last=False)
    if lora:
        add_adapters(stage, lora, seed=0)
    parameters = [p for p in stage.to(compute.device).parameters() if p.requires_grad]
    grads = [torch.zeros_like(p) for p in parameters]
    optimiser = torch.optim.AdamW(parameters, fused=True)
    for p, g in zip(parameters, grads, strict=True):
        p.grad = g

    def update() -> None:
        torch.nn.utils.get_total_norm(grads)
        torch._foreach_mul_(grads, 1.0)
        optimiser.step()

    return median_seconds(update, compute)
