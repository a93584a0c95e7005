"""The small GPT-2 over its slow links, every recipe from the first step to the last, in turn, in rounds.

``python -m bench.rounds`` (a part of ``make bench-links``). Single runs on a shared machine differ by several
per cent, as much as some goals turn on. Within a round every recipe runs right after another, in an order
that moves on from round to round; who is quicker is asked within each round, and the median of the rounds
counts. C, the free step, is that of uncompressed fp32 over the unshaped network, once a round.

Each run is kept when finished, as ``bench/results/rounds/ROUND-LINK-RECIPE-CONGESTION.json``.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.links import AUTO, COMMON, JOBS, LINKS, RESULTS, retried
from thinwire.lab.config import TrainConfig
from thinwire.lab.launch import launch
from thinwire.lab.record import load_run, read_metrics, write_json
from thinwire.lab.runs import slug

CELLS = RESULTS / "rounds"
MODEL = "gpt2-lab"
FREE = ("unlimited", "fp32", "cubic")
OVER = ("10+30", "trace")
RECIPES = (AUTO, "thinwire", "direct:bits=4", "tahquant", "aqsgd:fw=3,bw=6", "aqsgd:fw=4,bw=8")
ROUNDS = 3
Way = tuple[str, str, str]  # link, recipe, congestion control
WAYS: list[Way] = [
    FREE,
    *((link, recipe, "cubic") for link in OVER for recipe in RECIPES),
    *((link, AUTO, "bbr") for link in OVER),
]
Row = dict[str, Any]
SPANS = ("step_one", "first_visit", "one_epoch", "epochs")


def cell_file(number: int, way: Way) -> Path:
    """Return where a run is kept."""
    link, recipe, control = way
    return CELLS / f"{number}-{link}-{slug(recipe)}-{control}.json"


def cells() -> Iterator[tuple[int, Way]]:
    """Yield round and way of every run, in the order in which they are made."""
    for number in range(1, ROUNDS + 1):
        first = (number - 1) * len(WAYS) // ROUNDS
        yield from ((number, way) for way in [*WAYS[first:], *WAYS[:first]])


def measure(number: int, way: Way) -> None:
    """Make one run and keep what counts of it; ``MeasurementError`` where the machine was too busy."""
    link, recipe, control = way
    with tempfile.TemporaryDirectory() as out:
        own = {"emulate": True, "link": LINKS[link], "congestion": control, "eval_samples": 32}
        config = TrainConfig(**(JOBS[MODEL] | COMMON | own | {"recipe": recipe, "out": out}))
        record, steps = load_run(launch(config)), read_metrics(out)
    found = {
        "started": record.started,
        "environment": record.environment,
        "emulator": {k: (record.link.emulator or {}).get(k) for k in ("congestion", "lateness", "valid")},
        "seconds": [s.seconds for s in steps],
        "bytes": [s.bytes_forward + s.bytes_backward for s in steps],
        "eval_final": record.loss.eval_final,
    }
    CELLS.mkdir(parents=True, exist_ok=True)
    write_json(cell_file(number, way), found)


def rounds(way: Way) -> dict[int, Row]:
    """Return the finished runs of a way by round; empty until all are there."""
    files = {number: cell_file(number, way) for number in range(1, ROUNDS + 1)}
    made = all(file.exists() for file in files.values())
    return {number: json.loads(file.read_text()) for number, file in files.items()} if made else {}


def spans(run: Row) -> dict[str, float]:
    """Return the seconds of a run's first step, of its first pass's median step, of that pass, and of all."""
    per_pass = JOBS[MODEL]["steps"] // JOBS[MODEL]["epochs"]
    seconds: Sequence[float] = run["seconds"]
    return {
        "step_one": seconds[0],
        "first_visit": statistics.median(seconds[:per_pass]),
        "one_epoch": sum(seconds[:per_pass]),
        "epochs": sum(seconds),
    }


def free_steps() -> dict[int, float]:
    """Return C of each round, the median free step; none before all rounds are done."""
    return {number: statistics.median(run["seconds"]) for number, run in rounds(FREE).items()}


def summary() -> list[Row]:
    """Return one row a way that is finished: its seconds round by round, and how much sooner ``auto`` was."""
    out = []
    for way in WAYS:
        made = rounds(way)
        if not made:
            continue
        runs = {number: spans(run) for number, run in made.items()}
        auto = {number: spans(run) for number, run in rounds((way[0], AUTO, "cubic")).items()}
        row: Row = dict(zip(("link", "recipe", "congestion"), way, strict=True))
        row["rounds"] = list(made)
        row |= {span: [run[span] for run in runs.values()] for span in SPANS}
        row["bytes"] = statistics.median(sum(run["bytes"]) for run in made.values())
        row["eval_final"] = [run["eval_final"] for run in made.values()]
        both = [(run, auto[number]) for number, run in runs.items() if number in auto]
        sooner = {k: [r[k] / a[k] for r, a in both] for k in SPANS} if both else {}
        out.append(row | {"sooner": {k: statistics.median(v) for k, v in sooner.items()}})
    return out


def shares() -> dict[tuple[str, str], float]:
    """Return what share of its round's free speed a recipe keeps over a link, the median of the rounds."""
    free, steps = free_steps(), JOBS[MODEL]["steps"]
    made = (r for r in summary() if free and r["link"] in OVER and r["congestion"] == "cubic")
    return {
        (r["link"], r["recipe"]): statistics.median(
            steps * free[number] / took for number, took in zip(r["rounds"], r["epochs"], strict=True)
        )
        for r in made
    }


def missing() -> list[str]:
    """Return the runs that are not made yet; none where nobody has begun."""
    if not CELLS.exists():
        return []
    return [f"round {n}: {' '.join(way)}" for n, way in cells() if not cell_file(n, way).exists()]


def main() -> None:
    """Make the runs that are missing."""
    for number, way in cells():
        if cell_file(number, way).exists():
            continue
        retried(f"round {number}: {' '.join(way)}", partial(measure, number, way))
    if left := missing():
        raise SystemExit(f"not measured, because this machine was too busy: {'; '.join(left)}")


if __name__ == "__main__":
    main()
