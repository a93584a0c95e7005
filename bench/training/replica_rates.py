"""The learning rate of each recipe of replicas, by the same small search for all: ``make bench-rates``.

The rate with the least held-out loss at the end wins; ``REPLICA_RATES`` of the trainer holds the winners.
Losses of fixed recipes do not depend on the link, so theirs is unlimited. Policies are searched at that of
the demo, since what they choose depends on it.
"""

from __future__ import annotations

import sys
from typing import Any

from bench.study.cells import RESULTS, Cells, made_by
from bench.study.runs import trained

RESULT = RESULTS / "replica_rates.json"
LINK = "40mbit,50ms"
ADAPTIVE = ("deco", "auto")
JOBS: dict[str, dict[str, Any]] = {
    "gpt2-lab": {"data": "shakespeare", "steps": 60, "batch": 8, "seq": 64},
    "cnn-fashion": {
        "data": "fashion-mnist",
        "optimizer": "sgd",
        "steps": 120,
        "batch": 128,
        "eval_samples": 1024,
    },
}
RATES = {"gpt2-lab": (5e-4, 1e-3, 2e-3, 4e-3), "cnn-fashion": (0.1, 0.2, 0.4, 0.8)}
RECIPES = {
    **{name: name for name in ("allreduce", "cocktail", "deco", "auto", "thinwire", "topk", "dd-ef-sgd")},
    **{name: f"{name}:every=20" for name in ("diloco", "sparseloco", "streaming")},
    "allreduce-bf16": "allreduce-bf16",
}


def measure(model: str, recipe: str, rate: float) -> dict[str, Any]:
    """Return the losses of one run."""
    options = JOBS[model] | {"model": model, "replicas": 2, "replica_recipe": RECIPES[recipe], "lr": rate}
    options |= {"link": LINK if recipe in ADAPTIVE else "none", "save_model": False, "tensorboard": False}
    record, _ = trained(options)
    loss = record.loss
    return {"final": loss.eval_final, "accuracy": loss.accuracy_final, "seconds": record.totals["seconds"]}


def main(models: list[str]) -> None:
    cells = Cells(RESULT, {"jobs": JOBS, "recipes": RECIPES})
    rows = []
    for model in models or list(JOBS):
        for recipe in RECIPES:
            for rate in RATES[model]:
                found = cells.of(
                    f"{model} {recipe} {rate}", lambda m=model, r=recipe, x=rate: measure(m, r, x)
                )
                rows.append({"model": model, "recipe": recipe, "rate": rate, **found})
                print(rows[-1], flush=True)
    cells.finish({"rows": rows, "made": made_by()})


if __name__ == "__main__":
    main(sys.argv[1:])
