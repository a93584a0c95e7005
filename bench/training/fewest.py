"""Loss against bytes of long runs: ``make bench-fewest``.

Four replicas of the small GPT-2 train for 500 steps with AdamW on a text that no recipe was tuned on, over an
unlimited link. Of each recipe: the bits for each parameter and step that a rank sends to one other, and the
held-out loss beside that of ``allreduce``. ``python -m bench.training.fewest [RECIPE]``: the cells that have
this word.
"""

from __future__ import annotations

import gzip
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.study.cells import Kept, run_study
from bench.study.runs import trained
from thinwire.runs.data.debian import unpacked_package
from thinwire.runs.machine.cache import cache_folder, scratch_for

KEPT = Kept("fewest")
PACKAGE = "jargon-text"  # Debian's, of the Jargon File: 1.4 MB of English in the public domain
SEEDS = (0, 1, 2)
REPLICAS = 4
JOB: dict[str, Any] = {
    "model": "gpt2-lab",
    "steps": 500,
    "batch": 8,
    "seq": 64,
    "eval_every": 100,
    "eval_samples": 128,
    "replicas": REPLICAS,
}
RECIPES = {
    **{name: name for name in ("allreduce", "factors", "thinwire", "sparseloco", "pulseloco")},
    "factors-5": "factors:rank=4,every=5",
    "factors-30": "factors:rank=16,every=30",
}


class Cell(NamedTuple):
    recipe: str
    seed: int


def cells() -> Iterator[Cell]:
    """Yield all cells, the recipes of a seed one after another."""
    return (Cell(recipe, seed) for seed in SEEDS for recipe in RECIPES)


def text() -> Path:
    """Return the text's file, fetched once from Debian's package without installing it."""
    file = cache_folder() / f"{PACKAGE}.txt"
    if not file.exists():
        with scratch_for(file) as scratch:
            packed = next(unpacked_package(PACKAGE, scratch).rglob("jargon.txt.gz"))
            file.write_bytes(gzip.decompress(packed.read_bytes()))
    return file


def measure(cell: Cell) -> dict[str, Any]:
    """Train once."""
    own = {"replica_recipe": RECIPES[cell.recipe], "seed": cell.seed, "data": str(text())}
    record, _ = trained(JOB | own)
    return {
        "bytes": record.bytes["exchange"],
        "raw": record.bytes["raw_exchange"],  # of sums of fp32 gradients: 2 (N - 1) / N of the model each
        "seconds": record.totals["seconds"],
        "evaluations": [vars(e) for e in record.loss.evaluations],
        "loss": record.loss.eval_final,
        "valid": record.status == "done",
    }


def bits_sent(found: dict[str, Any]) -> float:
    """Return the bits for a parameter and step that a rank sends to one other: it sends these to each."""
    values = found["raw"] / 8 / (REPLICAS - 1)  # of the model, times the steps
    return 8 * float(found["bytes"]) / values / REPLICAS / (REPLICAS - 1)


def summary() -> dict[str, Any]:
    """Return a row a recipe: medians over the seeds; losses beside ``allreduce`` of the same seed."""
    rows = []
    for recipe in RECIPES:
        there = [(KEPT.get(Cell(recipe, s)), KEPT.get(Cell("allreduce", s))) for s in SEEDS]
        found = [(own, base) for own, base in there if own and base]
        if found:
            rows.append(
                {
                    "recipe": RECIPES[recipe],
                    "seeds": len(found),
                    "loss": median(own["loss"] for own, _ in found),
                    "above": [own["loss"] / base["loss"] - 1 for own, base in found],
                    "fewer": median(own["raw"] / own["bytes"] for own, _ in found),
                    "bits_sent": median(map(bits_sent, (own for own, _ in found))),
                }
            )
    return {"job": JOB, "rows": rows}


if __name__ == "__main__":
    run_study("fewest", sys.argv[1:], cells, measure, summary)
