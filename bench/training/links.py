"""What each recipe makes of each link: SmolLM2-135M and gpt2-lab across kernel TCP in network namespaces.

``python -m bench.training.links`` (``make bench-links``); given names of links, models, recipes or kinds, the
cells that have them all. Three kinds of cells, each kept when finished, so it goes on where it was stopped:

- timing: one session a model and link, in which all recipes whose losses do not depend on the link take
  turns on one model in memory: a batch's first visit, then two more, after one of another batch that does
  not count. Uncompressed steps with the shape off are among the turns: their time is C, the yardstick of the
  session. TCP connects anew after them.
- training: one unshaped run a model and recipe, for losses and bytes.
- whole: end-to-end runs over the emulated link: ``auto`` everywhere, every recipe on the trace, and some
  cells of the matrix that check the product of the other two kinds.

``links_summary`` makes ``bench/results/links.json`` of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.study.cells import Kept, run_study
from bench.study.runs import timed, trained
from thinwire.runs.emulator.shaping_control import lifted
from thinwire.runs.machine.processor import keep_freed, pick_threads
from thinwire.runs.ranks.linkwatch import LinkWatch
from thinwire.runs.ranks.rank_main import say
from thinwire.runs.ranks.telemetry import Telemetry
from thinwire.runs.ranks.world import World
from thinwire.uses.training.pipeline.recipes import parse_recipe
from thinwire.uses.training.run.options import TrainConfig
from thinwire.uses.training.run.stepper import Stepper, StepReport, build_parts, joined
from thinwire.uses.training.run.training_job import Job, prepare

KEPT = Kept("links")
LINKS = {
    "unlimited": "none",
    "1gbit": "1gbit",
    "200+50": "200mbit,50ms",
    "100+50": "100mbit,50ms",
    "10+30": "10mbit,30ms",
    "1.4+30": "1.4mbit,30ms",
    "trace": "trace:lte",
}
TRACES = ("campus-busy", "home-uplink", "satellite")  # of rounds alone
PLACES = LINKS | {"8+5": "8mbit,5ms"} | {name: f"trace:{name}" for name in TRACES}
CHANGE = "drop"  # 500 Mbit/s, 20, and 500 again: does auto follow?
FIXED = ("fp32", "bf16", "direct:bits=4", "aqsgd:fw=4,bw=8", "aqsgd:fw=3,bw=6", "tahquant", "thinwire")
AUTO = "auto"
JOBS: dict[str, dict[str, Any]] = {
    "gpt2-lab": {"model": "gpt2-lab", "batch": 8, "seq": 128, "steps": 90, "epochs": 3},
    "smollm2-135m": {"model": "smollm2-135m", "batch": 4, "seq": 128, "steps": 24, "epochs": 3},
}
COMMON = {"data": "shakespeare", "microbatches": 4}
TURNS = 2
# End-to-end runs of recipes whose matrix cells are products of a timing and a training.
VERIFIED = (
    ("gpt2-lab", "unlimited", "fp32"),
    ("smollm2-135m", "unlimited", "fp32"),
    ("gpt2-lab", "10+30", "fp32"),
    ("gpt2-lab", "10+30", "aqsgd:fw=4,bw=8"),
    ("gpt2-lab", "1.4+30", "tahquant"),
    ("gpt2-lab", "1.4+30", "thinwire"),
    ("smollm2-135m", "1.4+30", "aqsgd:fw=4,bw=8"),
    ("smollm2-135m", "1.4+30", "thinwire"),
)
SESSION = 1800.0  # seconds that a timing session may take
ATTEMPTS = 3  # at a measurement that came out late
LIFTED = "fp32, shape off"
AGAIN = 2  # visits of a batch after its first
Cell = tuple[str, str, str, str]  # kind, model, link and recipe


def cells() -> Iterator[Cell]:
    """Yield every cell, the quick ones first."""
    for model in JOBS:
        for link in LINKS:
            if link != "trace":
                yield "timing", model, link, ""
        yield "whole", model, "unlimited", "fp32"
        for link in LINKS:
            yield "whole", model, link, AUTO
        if model == "gpt2-lab":
            yield "whole", model, CHANGE, AUTO
        for recipe in FIXED:
            yield "training", model, "none", recipe
        for recipe in FIXED:
            yield "whole", model, "trace", recipe
    for model, link, recipe in VERIFIED:
        if link != "unlimited":
            yield "whole", model, link, recipe


def measure(cell: Cell) -> dict[str, Any]:
    """Run one cell. Errors: ``MeasurementError`` where the machine was too busy for it."""
    kind, model, link, recipe = cell
    if kind == "timing":
        return timing(model, link)
    emulated = {"emulate": True, "link": LINKS.get(link, f"trace:{link}"), "eval_samples": 32}
    if kind == "training":
        emulated = {"eval_samples": 32, "eval_every": JOBS[model]["steps"] // 6}
    elif link == CHANGE:
        emulated |= {"steps": 330, "eval_samples": 0}
    record, lines = trained(JOBS[model] | COMMON | {"recipe": recipe} | emulated, "runs/links")
    steps = [vars(m) | {"links": [vars(k) for k in m.links or ()]} for m in lines]
    return {"record": record.to_dict(), "steps": steps}


def timing(model: str, link: str) -> dict[str, Any]:
    """Run the timing session of a model and link."""
    job = JOBS[model] | COMMON | {"steps": 8, "epochs": 1, "eval_samples": 0}
    emulated = {"emulate": True, "link": LINKS[link]}
    steps, network = timed("bench.training.links:rank", SESSION, job | emulated)
    return {"job": job, "network": network, "steps": steps}


def rank(config: TrainConfig) -> None:
    """Run one rank of a timing session; the first says the steps."""
    keep_freed()
    torch.set_num_threads(pick_threads(config))
    job = prepare(config)
    with joined(job) as world:
        session = Session(job, world, list(FIXED))
        session.warm_up()
        rows = [row for number in range(TURNS) for row in session.turn(number)]
        if not world.rank:
            say("timed", found=rows)


class Session:
    """The steppers of one rank, sharing modules and optimiser: every recipe in turns, one model in memory.

    A visit is timed on rank 0, from one step's end to the next's; ``LIFTED`` runs uncompressed with the shape
    off, in the same turns, which makes the session's own yardstick.
    """

    def __init__(self, job: Job, world: World, recipes: list[str]) -> None:
        self.world, self.telemetry = world, Telemetry(world, job.config.deadline)
        self.links = LinkWatch(world)
        parts = build_parts(job, world)
        self.steppers: dict[str, Stepper] = {}
        optimiser = None
        for name in [*recipes, LIFTED]:
            recipe = parse_recipe("fp32" if name == LIFTED else name)
            stepper = Stepper(dataclasses.replace(job, recipe=recipe), world, parts, optimiser)
            self.steppers[name], optimiser = stepper, stepper.optimiser
        self.batches = list(job.batches)

    def warm_up(self) -> None:
        """Let every recipe take a step that does not count: modules, codecs and links get ready."""
        with lifted():
            for stepper in self.steppers.values():
                self._steps(stepper, self.batches[-1], 1)
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Let TCP forget the link without its shape."""
        self.telemetry.agree(b"T", 0, "the end of a turn")
        self.telemetry.redial()

    def turn(self, number: int) -> list[dict[str, Any]]:
        """Let every recipe visit a batch that is new to it, then the same batch again; return its steps.

        Before these it visits another new batch, which does not count.
        """
        rows = []
        for name, stepper in self.steppers.items():
            off = name == LIFTED
            with lifted() if off else contextlib.nullcontext():
                self.telemetry.agree(b"T", 0, "the start of a turn")
                if not off:  # TCP's window is then as the recipe's own first visits leave it
                    self._steps(stepper, self.batches[-2 - number], 1)
                found = self._steps(stepper, self.batches[number], 1 + AGAIN)
            rows += [{"recipe": name, "visit": visit} | step for visit, step in enumerate(found)]
            if off:
                self._begin_anew()
        return rows

    def _steps(self, stepper: Stepper, ids: Tensor, n: int) -> list[dict[str, Any]]:
        """Take ``n`` steps on the same batch; on rank 0 return them. Others' reports are read at the end."""
        own, seconds = [], []
        for _ in range(n):
            self.links.start_step()
            start = time.perf_counter()
            report = stepper.step(1, ids, ids[:0])
            seconds.append(time.perf_counter() - start)
            report.links = self.links.end_step()
            report.send(self.telemetry)
            own.append(report)
        if self.world.rank:
            return []
        reports = [report.of_all(self.telemetry) for report in own]
        return [{"seconds": s} | _summed(r) for s, r in zip(seconds, reports, strict=True)]


def _summed(reports: list[StepReport]) -> dict[str, Any]:
    links = [link for r in reports for link in r.links]
    return {
        "bytes": sum(sum(r.bytes.values()) for r in reports),
        "values": sum(sum(r.values.values()) for r in reports),
        "wire_bytes": sum(link["wire_bytes"] or 0 for link in links),
        "retransmitted_bytes": sum(link["retransmitted_bytes"] or 0 for link in links),
        "ranks": [
            {n: getattr(r, n) for n in ("compute_s", "encode_s", "decode_s", "wait_s")} for r in reports
        ],
    }


def sent(found: dict[str, Any]) -> int:
    """Return the bytes of all steps of a run, both directions, evaluations left out."""
    return sum(sum(s["bytes"].values()) for s in found["steps"])


if __name__ == "__main__":
    from bench.training.links_summary import summary

    run_study("links", sys.argv[1:], cells, measure, summary, ATTEMPTS)
