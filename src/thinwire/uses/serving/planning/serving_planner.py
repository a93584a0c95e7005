"""From a model, machines and a link to what serving will take: by stages, alone, and with experts apart."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from thinwire.dtypes import dtype_of
from thinwire.runs.machine.devices import CPU
from thinwire.runs.models.families import family_of, meta_model
from thinwire.runs.models.model_source import ModelSource
from thinwire.types import InputError, require
from thinwire.uses.serving.choosing.expert_ways import ExpertShape, exchange_seconds, read_seconds
from thinwire.uses.serving.choosing.ring_forecast import (
    LEAST,
    AskedOf,
    RingForecast,
    RingLink,
    RingStage,
    forecast,
)
from thinwire.uses.serving.choosing.stage_layers import ModelBytes, StageShare, share_layers
from thinwire.uses.serving.planning.machine_timing import RECIPES, MachineTiming
from thinwire.uses.serving.planning.plan_options import PlannedConfig

WORTH = 0.04  # of the fastest text: what a more exact recipe may cost more
READ = 256 << 20  # bytes of a model's files that tell how fast a disk is
BLOCK = 4 << 20
LOADED = 4  # bytes of a weight while a stage is loaded, in the host's memory


@dataclass(frozen=True)
class PlannedWay:
    """A way to serve and what a text takes; ``cut``: layers of each machine; ``derived``: by arithmetic."""

    way: str
    recipe: str | None
    cut: tuple[int, ...]
    first_token_s: float
    tokens_per_second: float
    all_per_second: float
    nbytes: float = 0.0
    drafts: int = 0
    derived: bool = False

    def seconds(self, tokens: int) -> float:
        """Return what a text of so many tokens takes."""
        return self.first_token_s + (tokens - 1) / self.tokens_per_second


@dataclass(frozen=True)
class ServingPlan:
    """All ways: by stages (the proposed one first), by one machine alone, and those of experts, derived.

    ``needs``: bytes of memory of each stage; ``alone``: the name of the machine of ``one``.
    """

    stages: tuple[PlannedWay, ...]
    one: PlannedWay | None
    alone: str | None
    experts: tuple[PlannedWay, ...]
    needs: tuple[float, ...]
    tokens: int

    @property
    def one_is_faster(self) -> bool:
        """Whether a machine that holds the model has a text sooner than the proposed stages."""
        return self.one is not None and self.one.seconds(self.tokens) <= self.stages[0].seconds(self.tokens)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self) | {"one_is_faster": self.one_is_faster}


class ServingPlanner:
    """The plan for a model on machines in the order of stages, over one link between neighbours."""

    def __init__(self, config: PlannedConfig, source: ModelSource, machines: Sequence[MachineTiming]) -> None:
        self.config, self.machines = config, machines
        self._source, self._model = source, source.config
        shape = config.shape
        self.link = RingLink(shape.rate, shape.delay, config.congestion != "bbr")
        self.asked = AskedOf(config.prompt_tokens, config.tokens, config.at_once, config.chunk)

    def plan(self) -> ServingPlan:
        """Return all ways. Errors: ``InputError`` where the machines do not hold the model."""
        cut = self.cut()
        found = [self._ring(recipe, cut, right) for right in self._rights() for recipe in RECIPES]
        one = self._alone()
        where = None if one is None else f"machine {one[0] + 1}"
        needs = tuple(
            self.needs(m).needed(n, k == 0, k == len(cut) - 1)
            for k, (m, n) in enumerate(zip(self.machines, cut, strict=True))
        )
        ways = tuple(self._ranked(found))
        return ServingPlan(ways, one and one[1], where, self._experts(ways[0]), needs, self.config.tokens)

    def cut(self) -> tuple[int, ...]:
        """Return the layers of each machine: as asked, else by speed and memory."""
        chunk, last = self.config.chunk, len(self.machines) - 1
        shares = [
            StageShare(
                m.passes.layer(chunk),
                m.passes.rest(chunk) + (m.passes.head(1) if k == last else 0.0),
                self.needs(m).room(m.memory, self._layers, k == 0, k == last),
            )
            for k, m in enumerate(self.machines)
        ]
        return tuple(share_layers(shares, self._layers))

    def needs(self, machine: MachineTiming) -> ModelBytes:
        """Return what the model needs of a machine's memory, in the dtype that it computes in."""
        size = dtype_of(machine.dtype).itemsize
        family, model = family_of(self._model), self._meta
        base = family.base_of(model)
        first, after = (
            sum(map(_numel, family.parts(base, names).values())) for names in (family.before, family.after)
        )
        head = sum(_numel(getattr(model, name)) for name in family.heads(model))
        tied = _numel(getattr(base, family.before[0])) if self._model.tie_word_embeddings else 0
        layer = max(map(_numel, family.layers_of(model)))
        return ModelBytes(
            layer * size,
            self.config.cache * machine.cached,
            first * size,
            (after + head) * size,
            tied * size,
            LOADED / size if machine.device == CPU else 1.0,
        )

    @cached_property
    def _meta(self) -> Any:
        return meta_model(self._model)

    @property
    def _layers(self) -> int:
        return int(self._model.num_hidden_layers)

    def _rights(self) -> list[float | None]:
        return [None, self.config.right_drafts] if self.config.right_drafts else [None]

    def _ring(self, recipe: str, cut: Sequence[int], right: float | None) -> PlannedWay:
        stages = [RingStage(m.passes, m.coding[recipe], n) for m, n in zip(self.machines, cut, strict=True)]
        found = forecast(stages, self.link, self.asked, right)
        return _way("stages", recipe, cut, found)

    def _alone(self) -> tuple[int, PlannedWay] | None:
        """Return the machine that is soonest of those that hold the whole model, and what it takes."""
        found = []
        for k, m in enumerate(self.machines):
            if self.needs(m).needed(self._layers, True, True) <= m.memory:
                stage = RingStage(m.passes, m.coding[RECIPES[0]], self._layers)
                alone = forecast([stage], RingLink(), self.asked)
                found.append((k, _way("one machine", None, (self._layers,), alone)))
        return min(found, key=lambda f: f[1].seconds(self.asked.tokens), default=None)

    def _ranked(self, found: Sequence[PlannedWay]) -> list[PlannedWay]:
        """Return the most exact of those about as fast as the fastest, then the others."""
        fastest = min(way.seconds(self.asked.tokens) for way in found)
        good = [w for w in found if w.seconds(self.asked.tokens) <= fastest * (1 + WORTH)]
        chosen = min(good, key=lambda w: (RECIPES.index(w.recipe or RECIPES[0]), w.drafts))
        return [chosen, *(w for w in found if w is not chosen)]

    # -- mixtures of experts, by arithmetic ----------------------------------------------------------------

    @cached_property
    def experts(self) -> ExpertShape | None:
        """The model's experts, None where it has none."""
        family = family_of(self._model)
        active = getattr(self._model, "num_experts_per_tok", None)
        # Experts are stacked, as [E, out, in]; a layer without them has no such parameter.
        stacks = [[p for p in layer.parameters() if p.dim() == 3] for layer in family.layers_of(self._meta)]
        stacks = [parts for parts in stacks if parts]
        if not active or not stacks:
            return None
        size = dtype_of(self.machines[0].dtype).itemsize
        experts = max(len(p) for p in stacks[0])
        nbytes = sum(p.numel() for parts in stacks for p in parts) / len(stacks) / experts * size
        return ExpertShape(len(stacks), experts, int(active), nbytes, self._model.hidden_size * size)

    def _experts(self, best: PlannedWay) -> tuple[PlannedWay, ...]:
        """Return experts over machines, and one machine that reads them from its disk."""
        shape = self.experts
        if shape is None:
            return ()
        spread = self._spread(shape)
        rate = self.config.disk * 1e9 if self.config.disk else disk_rate(self._source.weights)
        return (spread,) if rate is None else (spread, self._read(shape, rate))

    def _spread(self, shape: ExpertShape) -> PlannedWay:
        """Return what tokens wait for alone: compute comes on top."""
        asked, many = self.asked, len(self.machines)
        first, each = (
            exchange_seconds(shape, many, n, self.link.rate, self.link.delay)
            for n in (asked.prompt * asked.at_once, asked.at_once)
        )
        rate = 1 / max(each, LEAST)
        return PlannedWay("experts over machines", None, (), first, rate, rate * asked.at_once, derived=True)

    def _read(self, shape: ExpertShape, rate: float) -> PlannedWay:
        """Return what the fastest machine takes for all layers, with what it reads from a disk."""
        machine = min(self.machines, key=lambda m: m.passes.layer(1))
        stage = RingStage(machine.passes, machine.coding[RECIPES[0]], self._layers)
        alone = forecast([stage], RingLink(), self.asked)
        every = shape.layers * shape.experts * shape.nbytes
        dense = self.needs(machine).held(self._layers, True, True) - every
        held = min(1.0, max(0.0, (machine.memory - dense) / every))
        chunks = -(-self.asked.prompt * self.asked.at_once // self.asked.chunk)
        first = alone.first_token_s + chunks * read_seconds(shape, self.asked.chunk, held, rate)
        many = self.asked.at_once
        per = 1 / (1 / alone.tokens_per_second + read_seconds(shape, many, held, rate))
        return PlannedWay(
            "one machine, experts from disk", None, (self._layers,), first, per, per * many, derived=True
        )


def _way(name: str, recipe: str | None, cut: Sequence[int], found: RingForecast) -> PlannedWay:
    return PlannedWay(
        name,
        recipe,
        tuple(cut),
        found.first_token_s,
        found.tokens_per_second,
        found.all_per_second,
        found.nbytes,
        found.drafts,
    )


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def disk_rate(folder: Path | None) -> float | None:
    """Return the bytes a second at which a model's largest file is read, as it is on the disk; None without.

    What the kernel keeps of the file is given up first, where it may be.
    """
    files = sorted(folder.glob("*.safetensors"), key=lambda f: f.stat().st_size) if folder else []
    if not files:
        return None
    many = 0
    with files[-1].open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        while many < READ and (block := file.read(BLOCK)):
            many += len(block)
        seconds = time.perf_counter() - began
    require(many > 0, InputError, f"{files[-1]} is empty; fetch the model again")
    return many / max(seconds, 1e-9)
