"""Does it pay to encode and decode beside the compute? Two ranks, with and without, in turns on one model.

``python -m bench.training.overlap`` adds a run to results/overlap.json: seconds a step, and the ratio of each
pair. Stopped, it goes on with the next cell.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import time
from typing import Any

import torch

from bench.study.cells import RESULTS, Cells, made_by
from bench.study.runs import timed
from thinwire.runs.machine.processor import cores, pick_threads
from thinwire.runs.ranks.rank_main import say
from thinwire.runs.ranks.telemetry import Telemetry
from thinwire.runs.ranks.world import World
from thinwire.runs.records.writer import read_json
from thinwire.uses.training.run.options import TrainConfig
from thinwire.uses.training.run.stepper import Stepper, build_parts, joined
from thinwire.uses.training.run.training_job import Job, prepare

RESULT = RESULTS / "overlap.json"
CELLS = [
    (recipe, link)
    for link in ("20mbit,10ms", "none")
    for recipe in ("direct:bits=4", "aqsgd:fw=4,bw=8", "thinwire")
]
PAIRS, VISITS = 12, 3  # pairs of turns, and steps on one batch in each: a first visit and later ones
NAMES = ("off", "on")


def taken(job: Job, world: World) -> list[list[float]]:
    """Return the seconds a step takes in each turn: off, on, on, off, off, on, ..."""
    telemetry, parts = Telemetry(world, job.config.deadline), build_parts(job, world)
    steppers: dict[str, Stepper] = {}
    for name in NAMES:
        own = dataclasses.replace(job, config=job.config.replace(overlap=name == "on"))
        optimiser = steppers["off"].optimiser if steppers else None
        steppers[name] = Stepper(own, world, parts, optimiser)
    batches, turns = list(job.batches), []
    for number in range(1 + PAIRS):
        pair = {}
        for name in NAMES if number % 2 else NAMES[::-1]:
            telemetry.agree(b"T", 0, "the start of a turn")
            start = time.perf_counter()
            for _ in range(VISITS):
                steppers[name].step(1, batches[number], batches[number][:0])
            pair[name] = (time.perf_counter() - start) / VISITS
        turns.append([pair[name] for name in NAMES])
    for stepper in steppers.values():
        stepper.close()
    return turns[1:]  # the first one warmed up


def rank(config: TrainConfig) -> None:
    """Time one rank of a cell; the first says what came of it."""
    torch.set_num_threads(pick_threads(config))
    job = prepare(config)
    with joined(job) as world:
        turns = taken(job, world)
        if not world.rank:
            say("timed", found=turns)


def cell(recipe: str, link: str) -> dict[str, Any]:
    """Time one recipe over one link."""
    load = os.getloadavg()[0]
    job = {"recipe": recipe, "model": "gpt2-lab", "steps": 1 + PAIRS, "link": link, "eval_samples": 0}
    turns, _ = timed("bench.training.overlap:rank", math.inf, job | {"deadline": 300.0})
    ratios = [on / off for off, on in turns]
    low, middle, high = statistics.quantiles(ratios, n=4)
    medians = dict(zip(NAMES, map(statistics.median, zip(*turns, strict=True)), strict=True))
    found = {"recipe": recipe, "link": link, "step_s": medians, "load_before": load}
    return found | {"ratio": {"median": middle, "quartiles": [low, high], "pairs": ratios}}


def main() -> None:
    """Time all cells."""
    cells, found = Cells(RESULT, {"pairs": PAIRS, "visits": VISITS}), []
    for recipe, link in CELLS:
        found.append(cells.of(f"{recipe} over {link}", lambda r=recipe, k=link: cell(r, k)))
        ratio = found[-1]["ratio"]
        print(f"{recipe} over {link}: {ratio['median']:.3f} {ratio['quartiles']}", flush=True)
    runs = read_json(RESULT)["runs"] if RESULT.exists() else []
    run = {"cells": found, "cores": cores(), "visits": VISITS, "made": made_by()}
    cells.finish({"model": "gpt2-lab", "runs": [*runs, run]})


if __name__ == "__main__":
    main()
