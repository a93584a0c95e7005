"""What ``thinwire plan-serving`` says before texts are served, beside what they then take.

``python -m bench.serving.plan_check`` (``make bench-plan-serving``): SmolLM2-135M in two stages, prompts of
1,024 tokens that go on by 32, over links emulated below the kernel's TCP. The two "machines" are a core of
this one each. Right before each run ``plan-serving --measure --threads 1`` runs twice: for one machine alone,
which foretells tokens a second, where one stage works at a time; and for both at once, which foretells the
first token, where both work. Two real machines would have one measurement each.

It goes on where it was stopped. ``python -m bench.serving.plan_check [LINK] [RECIPE] [round=N]``: the cells
that have these words. Needs root, for namespaces.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.study.cells import Kept, makers, run_study
from bench.study.tables import Draw, columns
from thinwire.runs.models.model_source import ModelSource
from thinwire.runs.terminal.activity import load_average
from thinwire.uses.kinds import load_runs
from thinwire.uses.serving.planning.machine_timing import MachineTiming, read_timing
from thinwire.uses.serving.planning.plan_options import PlannedConfig
from thinwire.uses.serving.planning.serving_planner import PlannedWay, ServingPlanner
from thinwire.uses.serving.run.options import MeasuredConfig
from thinwire.uses.serving.run.serving_demo import ServingWay, run_ways
from thinwire.uses.serving.run.stage_program import prepared

KEPT = Kept("plan_serving")
LINKS = {"100+2.5": "100mbit,2.5ms", "20+20": "20mbit,20ms", "10+75": "10mbit,75ms"}
RECIPES = ("bf16", "thinwire")
ROUNDS, ATTEMPTS = 3, 3
LIMIT = 900.0  # seconds that a measurement may take
Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What is served in a cell."""

    model: str = "smollm2-135m"
    data: str = "shakespeare"
    prompt: int = 1024
    tokens: int = 32
    texts: int = 3
    chunk: int = 128


JOB = Job()


class Cell(NamedTuple):
    link: str
    recipe: str
    round: int


def cells() -> Iterator[Cell]:
    """Yield all cells: a round after the other."""
    for number in range(ROUNDS):
        for link in LINKS:
            for recipe in RECIPES:
                yield Cell(link, recipe, number)


def measure(cell: Cell) -> Row:
    """Measure the machines, foretell, and serve."""
    return beside(JOB, LINKS[cell.link], cell.recipe)


def beside(job: Job, link: str, recipe: str) -> Row:
    """Return what is foretold of a job over a link, what it then took, and the load before."""
    load = load_average()
    config = PlannedConfig(
        model=job.model,
        link=link,
        emulate=True,
        threads=1,
        prompt_tokens=job.prompt,
        tokens=job.tokens,
        chunk=job.chunk,
    )
    source = prepared(config.replace(stages=2))
    (alone,), both = measured(config, 1), measured(config, 2)
    busy = foretold(config, source, both, recipe)
    idle = foretold(config, source, [alone, alone], recipe)
    found = served(job, link, recipe, busy.cut)
    plan = {"first_token_s": busy.first_token_s, "tokens_per_second": idle.tokens_per_second}
    return {
        "planned": plan | {"nbytes": busy.nbytes},
        "measured": found,
        "cut": list(busy.cut),
        "load": load,
        "machines": [m.to_dict() for m in (alone, *both)],
    }


def measured(config: PlannedConfig, many: int) -> list[MachineTiming]:
    """Return what ``--measure`` prints for so many machines, measured at once."""
    words = ["--model", config.model, "--prompt-tokens", config.prompt_tokens, "--tokens", config.tokens]
    words += ["--chunk", config.chunk, "--threads", 1]
    command = [sys.executable, "-m", "thinwire", "plan-serving", "--measure", *map(str, words)]

    def said(_: int) -> str:
        done = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", check=True, timeout=LIMIT)
        return done.stdout

    with ThreadPoolExecutor(many) as pool, tempfile.TemporaryDirectory() as folder:
        file, found = Path(folder) / "machine.json", list[MachineTiming]()
        for text in pool.map(said, range(many)):  # read as a user's are, from a file
            file.write_text(text, "utf-8")
            found.append(read_timing(str(file), config))
        return found


def foretold(
    config: PlannedConfig, source: ModelSource, machines: list[MachineTiming], recipe: str
) -> PlannedWay:
    """Return what stages on these machines will take with a recipe."""
    plan = ServingPlanner(config, source, machines).plan()
    return next(way for way in plan.stages if way.recipe == recipe)


def served(job: Job, link: str, recipe: str, cut: tuple[int, ...]) -> Row:
    """Return what texts took, by two stages with these layers: medians, and bytes of one text."""
    with tempfile.TemporaryDirectory() as out:
        config = MeasuredConfig(
            model=job.model,
            data=job.data,
            texts=job.texts,
            prompt_tokens=job.prompt,
            tokens=job.tokens,
            chunk=job.chunk,
            cut=",".join(map(str, cut)),
            link=link,
            emulate=True,
            threads=1,
            out=out,
        )
        (record,) = run_ways(config, [ServingWay(recipe, 2, recipe, False)], print_nothing)
        (run,) = load_runs([Path(out) / recipe])
    return {
        "first_token_s": record.first_token_s,
        "tokens_per_second": record.tokens_per_second,
        "nbytes": record.bytes["stages"] / job.texts,
        "texts": [[line.first_token_s, line.tokens_per_second] for line in run.metrics],
        "lateness_s": record.link.lateness_s,
    }


def print_nothing(_: str) -> None:
    """Say nothing."""


def summary() -> Row:
    """Return the medians of all finished rounds, and planned over measured."""
    rows = []
    for link in LINKS:
        for recipe in RECIPES:
            found = [kept for n in range(ROUNDS) if (kept := KEPT.get(Cell(link, recipe, n)))]
            if found:
                rows.append({"link": LINKS[link], "recipe": recipe, "rounds": len(found)} | over(found))
    shares = [row[f"{name}_share"] for row in rows for name in ("first_token_s", "tokens_per_second")]
    kept = [found for cell in cells() if (found := KEPT.get(cell))]
    return {"rows": rows, "within": [min(shares), max(shares)] if shares else [], "made_by": makers(kept)}


def over(found: list[Row]) -> Row:
    """Return medians over rounds, and what was foretold as a share of what was measured in the same round."""
    row: Row = {}
    for name in ("first_token_s", "tokens_per_second", "nbytes"):
        row[name] = median(f["measured"][name] for f in found)
        row[f"{name}_planned"] = median(f["planned"][name] for f in found)
        row[f"{name}_share"] = median(f["planned"][name] / f["measured"][name] for f in found)
    return row


plan_serving = columns(
    "rows",
    ("recipe", "`{recipe}`"),
    ("link", "{link}"),
    ("first token", "{first_token_s:.2f} s"),
    ("planned", "{first_token_s_planned:.2f} s"),
    ("of it", "{first_token_s_share:.0fc} %"),
    ("tokens a second", "{tokens_per_second:.2f}"),
    ("planned", "{tokens_per_second_planned:.2f}"),
    ("of it", "{tokens_per_second_share:.0fc} %"),
    ("MB a text", "{nbytes:.2fM}"),
    ("planned", "{nbytes_planned:.2fM}"),
)
TABLES: dict[str, Draw] = {"plan_serving": plan_serving}

if __name__ == "__main__":
    run_study("plan_serving", sys.argv[1:], cells, measure, summary, ATTEMPTS)
