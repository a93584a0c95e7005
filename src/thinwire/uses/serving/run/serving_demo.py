"""The same prompts continued in several ways, one after another, a record each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from thinwire.runs.machine import devices
from thinwire.runs.machine.interrupts import stopped_by_signals
from thinwire.runs.machine.processor import cores, environment, pick_threads
from thinwire.runs.ranks.launcher import launcher_of, link_of
from thinwire.runs.ranks.supervise import Workers
from thinwire.runs.records.run_record import PeakMemory, RecipeText
from thinwire.runs.records.writer import RunWriter
from thinwire.uses.serving.recipes import parse_serving
from thinwire.uses.serving.run.options import MeasuredConfig
from thinwire.uses.serving.run.record import ServingRecord, TextMetrics
from thinwire.uses.serving.run.stage_program import prepared
from thinwire.uses.serving.run.text_recorder import STREAM

PROGRAM = "thinwire.uses.serving.run.measured_program:run_rank"
PATIENCE = 900.0  # seconds for all texts of one way


@dataclass(frozen=True)
class ServingWay:
    """A way to serve: by how many stages, what crosses, and whether tokens are drafted."""

    name: str
    stages: int
    recipe: str
    drafts: bool


WAYS = (
    ServingWay("one", 1, "exact", False),
    ServingWay("bf16", 2, "bf16", False),
    ServingWay("coded", 2, "thinwire", False),
    ServingWay("coded-drafts", 2, "thinwire", True),
)


def run_ways(
    config: MeasuredConfig, ways: Sequence[ServingWay], tell: Callable[[str], object]
) -> list[ServingRecord]:
    """Continue the prompts in each way, in turn; leave a record each in a folder of its name."""
    most = max(way.stages for way in ways)
    prepared(config.replace(stages=most))
    threads = config.threads or max(1, cores() // most)  # one machine has no more cores than a stage's
    made = list[ServingRecord]()
    likely: list[list[int]] = []
    for way in ways:
        tell(f"{way.name} ...")
        own = config.replace(
            stages=way.stages,
            threads=threads,
            recipe=way.recipe,
            drafts=config.drafts if way.drafts else "none",
            emulate=config.emulate and way.stages > 1,
            link=config.link if way.stages > 1 else "none",
            out=str(Path(config.out) / way.name),
        )
        found, memory, network = _measured(own)
        likely = likely or found["likely"]
        made.append(_record(own, way, found, memory, likely))
        made[-1].config["link"] = config.link  # one machine has none, and would be no other over it
        if network:
            made[-1].link.keep_time(network)
        _write(own, made[-1], found)
    return made


def _measured(config: MeasuredConfig) -> tuple[dict[str, Any], list[int], dict[str, Any]]:
    """Run the stages; return what the first one said, the memory of each, and what the network was."""
    memory = [0] * config.ranks
    with stopped_by_signals(), launcher_of(config) as place:
        with Workers(place, PROGRAM) as ranks:
            for _ in range(config.ranks):
                ranks.start(config)
            found = ranks.until("measured", 0, PATIENCE)
            while not all(memory):
                rank, said = ranks.hear(PATIENCE)
                if said["kind"] == "memory":
                    memory[rank] = said["nbytes"]
            ranks.wait()
        return found, memory, place.describe()


def _record(
    config: MeasuredConfig, way: ServingWay, found: dict[str, Any], memory: list[int], likely: list[list[int]]
) -> ServingRecord:
    there = environment(config.dtype, pick_threads(config), torch.device(devices.own(config.device)))
    lines = [TextMetrics(**line) for line in found["texts"]]
    record = ServingRecord(
        recipe=RecipeText(way.name, parse_serving(config.recipe).spec),
        config=config.to_dict(),
        environment=there | {"devices": [found["facts"]]},
        link=link_of(config),
        memory=PeakMemory(memory),
        equal_tokens=equal_share(found["likely"], likely),
        shown=found["shown"],
    )
    record.sum_up(lines)
    record.totals["tokens"] = float(sum(line.tokens for line in lines))
    return record


def equal_share(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> float:
    """Return the share of tokens, of several texts, up to the first that differs.

    >>> equal_share([[1, 2, 3, 4]], [[1, 2, 0, 4]])
    0.5
    """
    same = 0
    for own, other in zip(found, expected, strict=True):
        differ = (i for i, (a, b) in enumerate(zip(own, other, strict=False)) if a != b)
        same += next(differ, min(len(own), len(other)))
    return same / max(1, sum(map(len, expected)))


def _write(config: MeasuredConfig, record: ServingRecord, found: dict[str, Any]) -> None:
    writer = RunWriter(Path(config.out), record)
    for line in found["texts"]:
        writer.add(TextMetrics(**line))
    if config.stages > 1:  # of all texts: those under way at the same time share messages
        record.sent(STREAM, found["nbytes"], found["values"])
    writer.close("done")
