"""From a job and a file of machines to proposals: what the planner needs, measured or looked up."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from thinwire.choosing.policy import gaussian_bits
from thinwire.runs.models.cuts import counted_costs, embedding_numel
from thinwire.runs.models.lora import require_peft
from thinwire.runs.models.source import model_config
from thinwire.types import InputError, require
from thinwire.uses.training.pipeline.choosing.plan import (
    Cut,
    Machine,
    Option,
    Proposal,
    Work,
    foretell,
    propose,
)
from thinwire.uses.training.pipeline.choosing.site import BACKWARD, FORWARD
from thinwire.uses.training.pipeline.recipes import PipelineRecipe, parse_recipe
from thinwire.uses.training.planning.machines_file import Entry, MachinesFile, Measured
from thinwire.uses.training.planning.speed import measure
from thinwire.uses.training.run.config import TrainConfig

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

    def measured(self) -> Measured:
        """Return what a micro-batch takes on this machine."""
        return self._here

    @cached_property
    def _here(self) -> Measured:
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

    def _machines(self, file: MachinesFile) -> list[Machine]:
        return [self._machine(entry) for entry in file.machines]

    def _machine(self, entry: Entry) -> Machine:
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
        return Machine(
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
