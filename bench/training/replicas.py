"""Every recipe of replicas over every link, to one loss: ``make bench-replicas``.

The target is the held-out loss that ``allreduce`` ends with after the job's steps, by seed.
Every other run goes on until its loss is there, for ``REACH`` times the steps at most.

Kinds of cells:

- ``whole``: a run to the target over the link. All recipes over an unlimited link; over the others those
  that are adaptive, and the best of the rest;
- ``timed``: the first steps over the link. Losses of a fixed recipe do not depend on the link, so its time
  to the target there is a *product*: the steps that it took over the unlimited link, times these steps' mean.

Networks are emulated. Each cell is a file of its own, kept for good. ``python -m bench.training.replicas
[JOB] [LINK] [RECIPE] [KIND]``: the cells that have these words.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from math import inf
from statistics import median
from typing import Any, NamedTuple

from bench.study.cells import Kept, run_study
from bench.study.runs import replicated
from thinwire.uses.training.run.learning_rates import warmup_steps

KEPT = Kept("replicas")
REACH = 4
TIMED, TIMED_DENSE = 40, 8  # steps of a timed cell; of one that sends whole gradients
TIMED_TRACE = 12  # of one that sends whole gradients over a trace
JOBS: dict[str, dict[str, Any]] = {
    "gpt2-lab": {
        "model": "gpt2-lab",
        "data": "shakespeare",
        "steps": 30,
        "batch": 8,
        "seq": 64,
        "eval_every": 5,
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
UNLIMITED = "unlimited"
LINKS = {
    UNLIMITED: "none",
    "100mbit": "100mbit,100ms",
    "20mbit": "20mbit,30ms",
    "lte": "trace:lte",
    "1.5mbit": "1.5mbit,100ms",
    "0.25mbit": "0.25mbit,50ms",  # over which the messages of ``cocktail`` do not hide, for the small CNN
}
# Links that few recipes are run over, by the job that is.
NARROW: dict[str, dict[str, tuple[str, ...]]] = {
    "gpt2-lab": {"1.5mbit": ("cocktail", "sparseloco", "factors", "auto")},
    "cnn-fashion": {"0.25mbit": ("cocktail", "deco", "auto")},
}
ADAPTIVE = ("deco", "auto")
FIXED = {
    **{name: name for name in ("allreduce", "cocktail", "thinwire", "factors")},
    **{name: name for name in ("allreduce-bf16", "topk", "dd-ef-sgd")},
    **{name: f"{name}:every=20" for name in ("diloco", "sparseloco", "pulseloco", "streaming")},
}
RECIPES = FIXED | {name: name for name in ADAPTIVE}
SEVERAL = ("allreduce", "cocktail", "deco", "thinwire", "factors", "auto")  # of 3 seeds; others of 1
SEEDS = (0, 1, 2)


class Cell(NamedTuple):
    kind: str
    job: str
    link: str
    recipe: str
    seed: int = 0


def cells() -> Iterator[Cell]:
    """Yield all cells; what is compared runs in turns."""
    for job in JOBS:
        for seed in SEEDS:
            for recipe in RECIPES:
                if seed == SEEDS[0] or recipe in SEVERAL:
                    yield Cell("whole", job, UNLIMITED, recipe, seed)
        for link in wide()[1:]:
            for recipe in FIXED:
                yield Cell("timed", job, link, recipe)
            for seed in SEEDS:
                for recipe in (*ADAPTIVE, best_fixed(job, link)):
                    yield Cell("whole", job, link, recipe, seed)
        for link, recipes in NARROW[job].items():
            for seed in SEEDS:
                for recipe in recipes:
                    yield Cell("whole", job, link, recipe, seed)


def wide() -> list[str]:
    """Return the links that all recipes are run over, the unlimited one first."""
    return [link for link in LINKS if not any(link in narrow for narrow in NARROW.values())]


def best_fixed(job: str, link: str) -> str:
    """Return the fixed recipe that is soonest at the target by its product, any if none is known."""
    found = {recipe: seconds(job, link, recipe) for recipe in FIXED}
    known = {recipe: s for recipe, s in found.items() if s is not None}
    return min(known, key=known.__getitem__, default="thinwire")


def measure(cell: Cell) -> dict[str, Any]:
    """Run a cell and return what it came to."""
    options = JOBS[cell.job] | {"seed": cell.seed, "emulate": cell.link != UNLIMITED}
    if cell.kind == "timed":
        dense = TIMED_TRACE if cell.link == "lte" else TIMED_DENSE
        steps = dense if cell.recipe.startswith("allreduce") else TIMED
        options |= {"steps": steps, "eval_samples": JOBS[cell.job]["batch"]}
    elif cell.recipe != "allreduce":
        options |= {"until_loss": target(cell.job, cell.seed), "steps": REACH * JOBS[cell.job]["steps"]}
    record, _ = replicated(RECIPES[cell.recipe], LINKS[cell.link], options)
    return {
        "steps": record.totals["steps"],
        "seconds": record.totals["seconds"],
        "bytes": record.bytes["exchange"],
        "loss": record.loss.eval_final,
        "accuracy": record.loss.accuracy_final,
        "evaluations": [vars(e) for e in record.loss.evaluations],
        "decisions": [vars(d) for d in record.decisions],
        "valid": record.status == "done",
        "warmup": warmup_steps(record.config),
    }


def stale(cell: Cell, found: dict[str, Any]) -> bool:
    """Return whether a cell was made before replicas warmed up, and rested at evaluations."""
    return "warmup" not in found


def target(job: str, seed: int) -> float:
    """Return the loss to come to: that of ``allreduce`` over an unlimited link."""
    found = KEPT.get(cell := Cell("whole", job, UNLIMITED, "allreduce", seed))
    if found is None:
        KEPT.keep(cell, found := measure(cell))
    return float(found["loss"])


def whole(job: str, link: str, recipe: str) -> list[tuple[dict[str, Any], bool]]:
    """Return the whole runs that there are, and whether each came to its seed's target."""
    found = []
    for seed in SEEDS:
        cell, aim = (
            KEPT.get(Cell("whole", job, k, r, seed)) for k, r in ((link, recipe), (UNLIMITED, "allreduce"))
        )
        if cell is not None:
            found.append((cell, bool(aim and cell["loss"] is not None and cell["loss"] <= aim["loss"])))
    return found


def seconds(job: str, link: str, recipe: str) -> float | None:
    """Return the median seconds of training to the target; None where a run did not come to it."""
    if runs := whole(job, link, recipe):
        reached = [float(cell["seconds"]) for cell, there in runs if there]
        return median(reached) if len(reached) > len(runs) / 2 else None
    timed = KEPT.get(Cell("timed", job, link, recipe))
    # To the target over an unlimited link; a run that missed it takes for ever.
    steps = [float(cell["steps"]) if there else inf for cell, there in whole(job, UNLIMITED, recipe)]
    if timed is None or not steps or median(steps) == inf:
        return None
    return median(steps) * float(timed["seconds"]) / timed["steps"]


def summary() -> dict[str, Any]:
    """Return seconds to the target, bytes a step, and how they were found, by job, link and recipe."""
    rows = []
    for job in JOBS:
        for link, recipes in (dict.fromkeys(wide(), tuple(RECIPES)) | NARROW[job]).items():
            for recipe in recipes:
                runs = [cell for cell, _ in whole(job, link, recipe)]
                timed = KEPT.get(Cell("timed", job, link, recipe))
                if not runs and (timed is None or not whole(job, UNLIMITED, recipe)):
                    continue
                one = runs[0] if runs else timed or {}
                rows.append(
                    {
                        "job": job,
                        "link": link,
                        "recipe": recipe,
                        "runs": len(runs),
                        "seconds": seconds(job, link, recipe),
                        "step": one["seconds"] / one["steps"],
                        "bytes": one["bytes"] / one["steps"],
                    }
                )
    return {"jobs": JOBS, "links": LINKS, "reach": REACH, "rows": rows}


if __name__ == "__main__":
    run_study("replicas", sys.argv[1:], cells, measure, summary, stale=stale)
