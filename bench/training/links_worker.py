"""One rank of a timing session of ``links``: every recipe in turns over one link, one model in memory.

Its order comes as JSON in ``THINWIRE_BENCH``. A visit is timed on rank 0, from one step's end to the next's;
``LIFTED`` runs uncompressed with the shape off, in the same turns, which makes the session's own yardstick.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.runs.emulator.lift import lifted
from thinwire.runs.machine.heap import keep_freed
from thinwire.runs.machine.processor import pick_threads
from thinwire.runs.ranks.linkwatch import LinkWatch
from thinwire.runs.ranks.telemetry import Telemetry
from thinwire.runs.ranks.world import World
from thinwire.runs.records.writer import write_json
from thinwire.uses.training.pipeline.recipes import parse_recipe
from thinwire.uses.training.run.config import TrainConfig
from thinwire.uses.training.run.job import Job, prepare
from thinwire.uses.training.run.setup import build_parts, joined
from thinwire.uses.training.run.step_report import StepReport
from thinwire.uses.training.run.stepper import Stepper

LIFTED = "fp32, shape off"
AGAIN = 2  # visits of a batch after its first


class Session:
    """The steppers of one rank, sharing modules and optimiser."""

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


def main() -> None:
    """Run the session of this rank; rank 0 writes the steps."""
    order = json.loads(os.environ["THINWIRE_BENCH"])
    config = TrainConfig.from_dict(order["job"])
    keep_freed()
    torch.set_num_threads(pick_threads(config))
    job = prepare(config)
    with joined(job) as world:
        session = Session(job, world, order["recipes"])
        session.warm_up()
        rows = [row for number in range(order["turns"]) for row in session.turn(number)]
        if world.rank == 0:
            write_json(Path(order["out"]), rows)
    os._exit(0)  # torch's gloo threads can abort an ordinary interpreter exit


if __name__ == "__main__":
    main()
