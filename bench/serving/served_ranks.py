"""One stage of the study of serving: all ways to serve take turns at the same prompts, text by text.

A way's ring is made anew for each text, of the same layers, so that ways differ in nothing else, and
what else the machine does meanwhile meets all of them. The whole model, for ``one``, is on the first
machine beside its stage, and has as many threads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from statistics import fmean
from typing import Any

import torch

from thinwire.runs.emulator import shaping_control
from thinwire.runs.machine import devices
from thinwire.runs.machine.processor import keep_freed, pick_threads
from thinwire.runs.models.model_source import ModelSource
from thinwire.runs.ranks.joining import joined
from thinwire.runs.ranks.rank_main import say
from thinwire.runs.ranks.telemetry import Telemetry
from thinwire.runs.ranks.world import World
from thinwire.uses.serving.recipes import PROMPT, TOKEN, parse_serving
from thinwire.uses.serving.run.measured_program import WARM, prompts_of
from thinwire.uses.serving.run.options import MeasuredConfig
from thinwire.uses.serving.run.serving_demo import WAYS, ServingWay
from thinwire.uses.serving.run.stage_program import FirstStage, prepared, run_ring, work_of
from thinwire.uses.serving.run.stage_ring import StageRing
from thinwire.uses.serving.run.text_recorder import line_of
from thinwire.uses.serving.stage_work import StageSeconds, StageWork
from thinwire.uses.serving.text_engine import TextEngine
from thinwire.uses.serving.text_requests import TextRequest
from thinwire.uses.serving.token_picking import Picking

GREEDY = 16  # tokens that are compared
ALONE = 2  # texts one after another, beside those that are asked for at once
ROUNDS = 2  # of texts at once
Measure = Callable[[TextEngine, Callable[[], int]], dict[str, Any]]  # of an engine, and the bytes so far


def rank(config: MeasuredConfig) -> None:
    """Run one stage; the first one says what it found, by way."""
    keep_freed()
    torch.set_num_threads(pick_threads(config))
    device = devices.own(config.device)
    source = prepared(config, trial=False)
    with joined(config, "these stages", "--stages") as world:
        turns = Turns(config, source, world, device)
        Telemetry(world, config.deadline).agree(b"R", "", "that it has loaded the model")
        found = turns.alone() if config.at_once == 1 else turns.at_once()
    if not world.rank:
        say("timed", found=found)


class Turns:
    """The stage of one rank, and what the first one finds of each way."""

    def __init__(
        self, config: MeasuredConfig, source: ModelSource, world: World, device: torch.device
    ) -> None:
        self._config, self._source, self._world = config, source, world
        self._stage = work_of(config, source, world.rank, device)
        self._whole = None if world.rank else work_of(config.replace(stages=1), source, 0, device)
        self._prompts = prompts_of(config, source)
        self._found: dict[str, list[dict[str, Any]]] = {way.name: [] for way in WAYS}

    def alone(self) -> dict[str, list[dict[str, Any]]]:
        """Continue each prompt twice: by the likeliest tokens, and by drawn ones, which are timed."""
        for k in range(len(self._prompts)):
            for way in _in_turn(k):
                self._turn(way, partial(self._text, k))
        return self._found

    def at_once(self) -> dict[str, list[dict[str, Any]]]:
        """Continue some prompts one after another, then all together; say what each round gave."""
        for k in range(ROUNDS):
            for way in _in_turn(k):
                self._turn(way, self._round)
        return self._found

    def _turn(self, way: ServingWay, measure: Measure) -> None:
        """Serve in one way; all ranks do so in the same order."""
        config, world = self._config, self._world
        if not world.rank:
            shaping_control.rewind()  # a trace's fades meet all ways
        if way.stages == 1:
            if self._whole is not None:
                with TextEngine(self._whole, chunk=config.chunk, reuse=config.reuse) as engine:
                    self._found[way.name].append(measure(engine, lambda: 0))
            return
        own = config.replace(recipe=way.recipe, drafts=config.drafts if way.drafts else "none")

        ring = StageRing(own, world, self._source.digest)

        def first(stage: FirstStage) -> None:
            self._found[way.name].append(measure(stage.engine, stage.sent))

        run_ring(own, self._source, _with_recipe(self._stage, way.recipe), ring, first)

    def _text(self, k: int, engine: TextEngine, sent: Callable[[], int]) -> dict[str, Any]:
        """Return what a prompt took that is continued by drawn tokens, and what its likeliest ones are."""
        likely = self._warm(engine).submit(TextRequest(self._prompts[k], GREEDY)).wait()
        before = sent()
        text = engine.submit(self._request(k))
        text.wait()
        return asdict(line_of(k + 1, text)) | {"nbytes": sent() - before, "likely": likely}

    def _round(self, engine: TextEngine, _sent: Callable[[], int]) -> dict[str, Any]:
        """Return the tokens a second of some prompts one after another, and of all together."""
        self._warm(engine)
        one = [self._together(engine, [k]) for k in range(ALONE)]
        return {"one": fmean(one), "many": self._together(engine, range(len(self._prompts)))}

    def _together(self, engine: TextEngine, which: Sequence[int]) -> float:
        """Return the tokens a second of prompts that are asked for together, from then to the last token."""
        texts = [engine.submit(self._request(k)) for k in which]
        made = sum(len(text.wait()) for text in texts)
        return made / (max(t.times.last for t in texts) - min(t.times.came for t in texts))

    def _warm(self, engine: TextEngine) -> TextEngine:
        """Return the engine after a text that is not timed."""
        engine.submit(TextRequest(self._prompts[0][:WARM], WARM)).wait()
        return engine

    def _request(self, k: int) -> TextRequest:
        config = self._config
        return TextRequest(self._prompts[k], config.tokens, Picking(config.temperature, seed=config.seed + k))


def _in_turn(k: int) -> Iterator[ServingWay]:
    """Yield all ways, another one first each time."""
    at = k % len(WAYS)
    yield from (*WAYS[at:], *WAYS[:at])


def _with_recipe(work: StageWork, recipe: str) -> StageWork:
    """Return the same layers with another recipe."""
    schemes = parse_serving(recipe).schemes
    return dataclasses.replace(work, prompt=schemes[PROMPT], token=schemes[TOKEN], spent=StageSeconds())
