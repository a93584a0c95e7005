"""The small GPT-2 over links, every recipe from the first step to the last, in turn, in rounds.

``python -m bench.training.rounds`` (a part of ``make bench-links``); given names of studies, those alone.
Single runs on a shared machine differ by several per cent, as much as some questions turn on. Within a round
every recipe runs right after another, in an order that moves on from round to round; who is quicker is asked
within each round, and the median of the rounds counts. C, the free step, is that of uncompressed fp32 over
the unshaped network, once a round and study.

Each run is kept when finished, as ``bench/results/rounds/STUDY/ROUND-LINK-RECIPE-CONGESTION.json``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.study.cells import keep
from bench.study.runs import trained
from bench.training.links import AUTO, COMMON, JOBS, LINKS, RESULTS, make_missing
from thinwire.runs.records.runs import slug

CELLS = RESULTS / "rounds"
MODEL = "gpt2-lab"
TRACES = ("campus-busy", "home-uplink", "satellite")
PLACES = LINKS | {"8+5": "8mbit,5ms"} | {name: f"trace:{name}" for name in TRACES}
Way = tuple[str, str, str]  # link, recipe, congestion control
FREE: Way = ("unlimited", "fp32", "cubic")
ROUNDS = 3
AQSGD = ("aqsgd:fw=3,bw=6", "aqsgd:fw=4,bw=8")
Row = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """Runs that are compared with one another: each recipe over each link, and the free run.

    ``brief``: recipes of which no more than the speed is asked, and the steps that they make. ``rounds``: how
    many there are.
    """

    name: str
    links: tuple[str, ...]
    recipes: tuple[str, ...]
    more: tuple[Way, ...] = ()
    own: Row = field(default_factory=dict)  # options that differ from the model's job
    brief: dict[str, int] = field(default_factory=dict)
    rounds: int = ROUNDS

    @property
    def job(self) -> Row:
        return COMMON | JOBS[MODEL] | self.own

    @property
    def ways(self) -> list[Way]:
        """Every run of a round, the free one first."""
        each = ((link, recipe, "cubic") for link in self.links for recipe in self.recipes)
        return [FREE, *each, *self.more]

    @property
    def steps(self) -> int:
        return int(self.job["steps"])

    @property
    def per_pass(self) -> int:
        return self.steps // int(self.job["epochs"])

    def is_brief(self, way: Way) -> bool:
        """Return whether a run makes only some of the steps."""
        return way != FREE and way[1] in self.brief


# What the goals are about; where no recipe should lose time; a cell in which nearly all can be hidden (many
# micro-batches over a short way, so that filling and draining the pipeline take little of a step); and the
# traces by which nothing in auto was chosen.
SLOW = Study(
    "slow",
    ("10+30", "trace"),
    (AUTO, "thinwire", "direct:bits=4", "tahquant", *AQSGD),
    tuple((link, AUTO, "bbr") for link in ("10+30", "trace")),
)
FAST = Study(
    "fast",
    ("unlimited", "1gbit", "200+50", "100+50", "campus-busy"),
    (AUTO, "thinwire", "direct:bits=4", "bf16"),
)
DEEP = Study(
    "deep",
    ("8+5",),
    (AUTO, "thinwire", "tahquant", *AQSGD, "fp32"),
    own={"batch": 64, "microbatches": 32, "steps": 24},
    brief={"fp32": 6},
)
ELSEWHERE = Study(
    "elsewhere",
    ("home-uplink", "satellite"),
    (AUTO, "thinwire", "direct:bits=4", "tahquant"),
)
# The other recipes of the matrix, which are so far behind on such a link that one round tells.
BEHIND = Study("behind", ("satellite",), (AUTO, *AQSGD, "bf16", "fp32"), rounds=1)
STUDIES = {study.name: study for study in (SLOW, FAST, DEEP, ELSEWHERE, BEHIND)}


def cell_file(study: Study, number: int, way: Way) -> Path:
    """Return where a run is kept."""
    link, recipe, control = way
    return CELLS / study.name / f"{number}-{link}-{slug(recipe)}-{control}.json"


def cells() -> Iterator[tuple[Study, int, Way]]:
    """Yield study, round and way of every run, in the order in which they are made."""
    for study in STUDIES.values():
        for number in range(1, study.rounds + 1):
            first = (number - 1) * len(study.ways) // study.rounds
            yield from ((study, number, way) for way in [*study.ways[first:], *study.ways[:first]])


def measure(study: Study, number: int, way: Way) -> None:
    """Make one run and keep what counts of it; ``MeasurementError`` where the machine was too busy."""
    link, recipe, control = way
    brief = {"steps": study.brief[recipe]} if study.is_brief(way) else {}
    own = {"emulate": True, "link": PLACES[link], "congestion": control, "eval_samples": 32}
    record, steps = trained(study.job | own | brief | {"recipe": recipe})
    found = {
        "started": record.started,
        "environment": record.environment,
        "emulator": {k: (record.link.emulator or {}).get(k) for k in ("congestion", "lateness", "valid")},
        "seconds": [s.seconds for s in steps],
        "bytes": [sum(s.bytes.values()) for s in steps],
        "eval_final": record.loss.eval_final,
    }
    keep(cell_file(study, number, way), found)


def rounds(study: Study, way: Way) -> dict[int, Row]:
    """Return the finished runs of a way by round; empty until all are there."""
    files = {number: cell_file(study, number, way) for number in range(1, study.rounds + 1)}
    made = all(file.exists() for file in files.values())
    return {number: json.loads(file.read_text()) for number, file in files.items()} if made else {}


def missing() -> list[str]:
    """Return the runs that are not made yet; none of a study that nobody has begun."""
    begun = {name for name in STUDIES if (CELLS / name).exists()}
    left = ((s, n, way) for s, n, way in cells() if s.name in begun and not cell_file(s, n, way).exists())
    return [f"{s.name}, round {n}: {' '.join(way)}" for s, n, way in left]


def main(wanted: list[str]) -> None:
    """Make the runs that are missing, of the studies that ``wanted`` names; of all, if it names none."""
    if unknown := set(wanted) - set(STUDIES):
        raise SystemExit(f"no study {', '.join(sorted(unknown))}; there are {', '.join(STUDIES)}")
    make_missing(
        (f"{s.name}, round {n}: {' '.join(way)}", cell_file(s, n, way), partial(measure, s, n, way))
        for s, n, way in cells()
        if not wanted or s.name in wanted
    )


if __name__ == "__main__":
    main(sys.argv[1:])
