"""Every recipe of replicas over every link, to one loss: ``make bench-replicas``.

The target is the held-out loss that ``allreduce`` ends with after the job's steps, by seed.
Every other run goes on until its loss is there, for ``REACH`` times the steps at most. Over a slow link
``allreduce`` takes ``TIMED`` steps, and its time to the target is its steps times the mean of these: its rows
say ``product``. Networks are emulated. Each cell is a file of its own, kept for good.

``python -m bench.replicas [JOB] [LINK] [RECIPE]`` runs those cells alone whose names hold all these words.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.cells import keep
from bench.runs import trained
from thinwire.lab.records.runs import slug
from thinwire.lab.records.writer import read_json

CELLS = Path(__file__).parent / "results" / "replicas"
REACH = 4
TIMED = 8
JOBS: dict[str, dict[str, Any]] = {
    "gpt2-lab": {
        "model": "gpt2-lab",
        "data": "shakespeare",
        "steps": 30,
        "batch": 8,
        "seq": 64,
        "eval_every": 2,
    },
    "cnn-fashion": {
        "model": "cnn-fashion",
        "data": "fashion-mnist",
        "optimizer": "sgd",
        "steps": 120,
        "batch": 128,
        "eval_every": 10,
        "eval_samples": 1024,
    },
}
LINKS = {
    "unlimited": "none",
    "1.5mbit": "1.5mbit,100ms",
    "20mbit": "20mbit,30ms",
    "100mbit": "100mbit,100ms",
    "lte": "trace:lte",
}
MAIN = ("allreduce", "cocktail", "deco", "thinwire", "auto")  # three seeds; the others one
OTHERS = {
    **{name: name for name in ("allreduce-bf16", "topk", "dd-ef-sgd")},
    **{name: f"{name}:every=20" for name in ("diloco", "sparseloco", "streaming")},
}
RECIPES = {name: name for name in MAIN} | OTHERS
SEEDS = (0, 1, 2)


def cells() -> Iterator[tuple[str, str, str, int]]:
    """Yield job, link, recipe and seed of every cell: interleaved, so that what is compared runs together."""
    for seed in SEEDS:
        for job in JOBS:
            for link in LINKS:
                for recipe in RECIPES:
                    if seed == SEEDS[0] or recipe in MAIN:
                        yield job, link, recipe, seed


def file_of(job: str, link: str, recipe: str, seed: int) -> Path:
    return CELLS / f"{job}-{slug(link)}-{recipe}-{seed}.json"


def measure(job: str, link: str, recipe: str, seed: int) -> dict[str, Any]:
    """Run a cell and return what it came to."""
    slow = recipe.startswith("allreduce") and link not in ("unlimited", "lte")
    options = JOBS[job] | {"replicas": 2, "replica_recipe": RECIPES[recipe], "seed": seed}
    options |= {
        "link": LINKS[link],
        "emulate": link != "unlimited",
        "save_model": False,
        "tensorboard": False,
    }
    if slow:
        options |= {"steps": TIMED, "eval_every": 0, "eval_samples": 0}
    elif recipe != "allreduce":
        options |= {"until_loss": target(job, seed), "steps": REACH * JOBS[job]["steps"]}
    record, _ = trained(options)
    steps, spent = record.totals["steps"], record.totals["seconds"]
    found = {"steps": steps, "seconds": spent, "bytes": record.bytes["exchange"], "product": slow}
    return found | {
        "loss": record.loss.eval_final,
        "accuracy": record.loss.accuracy_final,
        "evaluations": [vars(e) for e in record.loss.evaluations],
        "decisions": [vars(d) for d in record.decisions],
        "valid": record.status == "done",
    }


def target(job: str, seed: int) -> float:
    """Return the loss to come to: that of ``allreduce`` over an unlimited link."""
    cell = run(job, "unlimited", "allreduce", seed)
    return float(cell["loss"])


def run(job: str, link: str, recipe: str, seed: int) -> dict[str, Any]:
    """Return a cell, measured now if it was not before."""
    file = file_of(job, link, recipe, seed)
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        keep(file, measure(job, link, recipe, seed))
    cell: dict[str, Any] = read_json(file)
    return cell


def main(words: list[str]) -> None:
    for job, link, recipe, seed in cells():
        if all(word in (job, link, recipe, f"seed={seed}") for word in words):
            cell = run(job, link, recipe, seed)
            shown = {key: cell[key] for key in ("steps", "seconds", "bytes", "loss", "accuracy")}
            print(job, link, recipe, seed, shown, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
