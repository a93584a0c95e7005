"""Which gradients does training from random weights bear? Recipes on gpt2-lab, four seeds, held against fp32.

Run ``python -m bench.training.unbiased`` (``make bench-unbiased``), about twelve minutes on two quiet cores.
One seed says little: all losses spike early, at this learning rate, and where they land differs by half a
percent. So each recipe is held against fp32 of the same seed, and the mean is given with its standard error.
The link is not shaped. Writes ``bench/results/unbiased.json``; stopped, it goes on after its last finished
run.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch

from bench.study.cells import RESULTS, Cells
from bench.study.runs import trained
from bench.study.tables import Draw, columns
from thinwire.runs.machine.processor import environment
from thinwire.uses.training.pipeline.recipes import parse_recipe

RESULT = RESULTS / "unbiased.json"
BASE, FLOOR = "fp32", "thinwire:first=1.9,fw=2.6,bw=1.9"
RECIPES = (
    BASE,
    "thinwire:dither=0,bw=3.4",
    "thinwire:dither=0,bw=2.9",
    "thinwire:dither=0,bw=2.4",
    "thinwire",
    "thinwire:bw=1.9",
    "thinwire:bw=1.4",
    FLOOR,
    "thinwire:first=1.4,fw=2.1,bw=1.4",
)
SEEDS = range(4)
JOB: dict[str, Any] = {
    "model": "gpt2-lab",
    "data": "shakespeare",
    "steps": 90,
    "epochs": 3,
    "batch": 8,
    "microbatches": 4,
    "seq": 128,
    "eval_samples": 32,
}
LOSSES = {"heldout": "eval_final", "train_slice": "train_eval_final"}


def run(recipe: str, seed: int) -> dict[str, float]:
    """Return the final losses of one run, and the bits a value it sent each way."""
    record = trained(JOB | {"recipe": recipe, "seed": seed})[0].to_dict()
    losses = {name: record["loss"][key] for name, key in LOSSES.items()}
    return losses | {way: record["bits_per_value"][way] for way in ("forward", "backward")}


def row(recipe: str, found: list[dict[str, float]], base: list[dict[str, float]]) -> dict[str, Any]:
    """Return mean bits, and what the losses are above those of ``base``, as a share: mean, standard error."""
    kept: dict[str, Any] = {"recipe": recipe, "spec": parse_recipe(recipe).spec}
    for way in ("forward", "backward"):
        kept[f"bits_{way}"] = statistics.fmean(f[way] for f in found)
    for name in LOSSES:
        above = [f[name] / b[name] - 1 for f, b in zip(found, base, strict=True)]
        kept[name] = statistics.fmean(above)
        kept[f"{name}_error"] = statistics.stdev(above) / len(above) ** 0.5
        kept[f"{name}_by_seed"] = [f[name] for f in found]
    return kept


table = columns(  # what coarser gradients cost, with a bias and without: above fp32 of the same seed
    "recipes", ("recipe", "`{recipe}`"), ("bits forward", "{bits_forward:.2f}"),
    ("backward", "{bits_backward:.2f}"),
    ("held-out against fp32", "{heldout:+.2fc} ± {heldout_error:.2fc} %"),
    ("train slice", "{train_slice:+.2fc} ± {train_slice_error:.2fc} %"),
)  # fmt: skip
TABLES: dict[str, Draw] = {"unbiased": table}


def main() -> None:
    """Run what is missing, and write the table."""
    specs = [parse_recipe(recipe).spec for recipe in RECIPES]
    cells = Cells(RESULT, {"job": JOB, "specs": specs})
    found: dict[str, list[dict[str, float]]] = {recipe: [] for recipe in RECIPES}
    for seed in SEEDS:
        for recipe in RECIPES:
            found[recipe].append(cells.of(f"{recipe}, seed {seed}", partial(run, recipe, seed)))
    cells.finish(
        {
            "job": JOB | {"seeds": list(SEEDS)},
            "environment": environment("bf16", torch.get_num_threads()),
            "recipes": [row(recipe, found[recipe], found[BASE]) for recipe in RECIPES],
        }
    )


if __name__ == "__main__":
    main()
