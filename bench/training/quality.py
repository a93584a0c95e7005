"""Does compression cost quality? Every recipe on SmolLM2-135M: three epochs, three seeds.

``make bench-quality``, about an hour and a half on two quiet cores. Given the name of a recipe, it runs its
cells and no more, so that two processes can share the work: losses do not depend on the clock, and one run
fills the other's pipeline bubbles. Every recipe gets the same search: three learning rates on the first seed,
the best of which (lowest held-out loss) runs on the other seeds. Each run is held against fp32's on the
processor that it was on. The link is not shaped. A frozen model goes through the same check as a control,
which it must fail.
"""

from __future__ import annotations

import shutil
import statistics
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from bench.study.cells import RESULTS, Kept, run_study
from bench.study.runs import trained
from bench.study.tables import Draw, Row, columns, yes
from bench.training.unbiased import FLOOR
from thinwire.runs.machine.processor import environment
from thinwire.uses.training.pipeline.recipes import parse_recipe

KEPT = Kept("quality")
RECIPES = (
    "fp32",
    "thinwire",
    "thinwire:gdelta=1,bw=2.4,dither=0",
    FLOOR,
    "tahquant",
    "aqsgd",
    "direct:bits=4",
    "aqsgd-code",
    "step-delta",
    "bf16",
)
RATES = (1e-5, 2e-5, 5e-5)
SEEDS = (0, 1, 2)
JOB: dict[str, Any] = {
    "model": "smollm2-135m",
    "data": "shakespeare",
    "steps": 24,
    "epochs": 3,
    "batch": 4,
    "microbatches": 4,
    "seq": 128,
    "eval_samples": 32,
}
# Of fp32's losses: held-out within 0.5 % and within 5 % of what fp32 gained; a training slice within 1.5 %.
HELDOUT, GAIN, SLICE = 0.005, 0.05, 0.015


class Cell(NamedTuple):
    recipe: str
    rate: float
    seed: int
    cpu: str = ""  # where fp32 ran again, because other recipes ran there


def cells() -> Iterator[Cell]:
    """Yield every recipe's search, its best rate on the other seeds, and fp32 where other recipes ran too."""
    for recipe in RECIPES:
        yield from (Cell(recipe, rate, SEEDS[0]) for rate in RATES)
        yield from of_recipe(recipe)[1:]
    names = dict.fromkeys(cpu(r) for recipe in RECIPES for r in records(of_recipe(recipe)))
    for name in list(names)[1:]:
        yield from (cell._replace(cpu=name) for cell in of_recipe(RECIPES[0]))


def of_recipe(recipe: str) -> list[Cell]:
    """Return a recipe's cells by seed, at its best learning rate; none before its search is done."""
    tried = {rate: KEPT.get(Cell(recipe, rate, SEEDS[0])) for rate in RATES}
    if not all(tried.values()):
        return []
    best = min(tried, key=lambda rate: tried[rate]["loss"]["eval_final"])
    return [Cell(recipe, best, seed) for seed in SEEDS]


def records(cells: Iterable[Cell]) -> list[dict[str, Any]]:
    """Return the records of those cells that are finished."""
    return [found for cell in cells if (found := KEPT.get(cell))]


def measure(cell: Cell) -> dict[str, Any]:
    """Run one cell and return its record. Errors: ``SystemExit`` on another processor than the cell's."""
    if cell.cpu and environment("auto", 1)["machine"]["cpu"] != cell.cpu:
        raise SystemExit(f"no runs of fp32 on {cell.cpu}, where other recipes ran; run this bench there")
    job = JOB | {"recipe": cell.recipe, "lr": cell.rate, "seed": cell.seed}
    return trained(job, "runs/quality")[0].to_dict()


def stale(cell: Cell, found: dict[str, Any]) -> bool:
    """Return whether the recipe is another one now."""
    return bool(found["recipe"]["spec"] != parse_recipe(cell.recipe).spec)


def cpu(record: dict[str, Any]) -> str:
    """Return the processor a run was on."""
    return str(record["environment"]["machine"]["cpu"])


def bits(record: dict[str, Any]) -> float:
    """Return bits a value, forward plus backward, metadata and headers included."""
    both = record["bits_per_value"]
    return float(both["forward"] + both["backward"])


def check(losses: dict[str, float], fp32: dict[str, float]) -> dict[str, Any]:
    """Hold mean losses against fp32's: three bounds, each as measured and whether it is met."""
    heldout = losses["eval_final"] / fp32["eval_final"] - 1
    gain = (losses["eval_final"] - fp32["eval_final"]) / (fp32["eval_first"] - fp32["eval_final"])
    part = losses["train_eval_final"] / fp32["train_eval_final"] - 1
    met = heldout <= HELDOUT and gain <= GAIN and part <= SLICE
    return {"heldout": heldout, "of_gain": gain, "train_slice": part, "met": met}


def mean_losses(records: list[dict[str, Any]]) -> dict[str, float]:
    """Return the mean of each evaluation loss over the seeds."""
    names = ("eval_first", "eval_final", "train_eval_first", "train_eval_final")
    return {n: statistics.fmean(r["loss"][n] for r in records) for n in names}


def row(recipe: str, records: list[dict[str, Any]], fp32: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the verdict on the runs of one recipe, one a seed, against fp32's of the same processor."""
    by_seed = [check(mean_losses([r]), mean_losses([f])) for r, f in zip(records, fp32, strict=True)]
    return {
        "recipe": recipe,
        "spec": records[0]["recipe"]["spec"],
        "cpu": ", ".join(dict.fromkeys(map(cpu, records))),
        "learning_rate": of_recipe(recipe)[0].rate,
        "bits": statistics.fmean(bits(r) for r in records),
        "bits_forward": statistics.fmean(r["bits_per_value"]["forward"] for r in records),
        "bits_backward": statistics.fmean(r["bits_per_value"]["backward"] for r in records),
        "losses": mean_losses(records),
        "eval_final_by_seed": [r["loss"]["eval_final"] for r in records],
        "check": check(mean_losses(records), mean_losses(fp32)),
        "check_by_seed": by_seed,
    }


def summary() -> dict[str, Any]:
    """Return the verdict on every recipe that is finished, and on the frozen control.

    Processors round differently, and their losses differ by as much as half a percent: a recipe is held
    against fp32 on its own.
    """
    found = {recipe: records(of_recipe(recipe)) for recipe in RECIPES}
    if not found["fp32"]:
        raise SystemExit("all is held against fp32; run python -m bench.training.quality fp32 first")
    base = {cpu(found["fp32"][0]): found["fp32"]}
    for name in dict.fromkeys(cpu(r) for runs in found.values() for r in runs):
        base.setdefault(name, records(cell._replace(cpu=name) for cell in of_recipe("fp32")))
    rows = [row("fp32", runs, runs) for runs in base.values()]
    for recipe, runs in found.items():
        if recipe != "fp32" and len(runs) == len(SEEDS):
            rows.append(
                row(recipe, runs, [base[cpu(run)][seed] for seed, run in zip(SEEDS, runs, strict=True)])
            )
    fp32 = mean_losses(found["fp32"])
    frozen = {"eval_final": fp32["eval_first"], "train_eval_final": fp32["train_eval_first"]}
    return {
        "job": JOB | {"rates": RATES, "seeds": SEEDS},
        "environments": [runs[0]["environment"] for runs in base.values()],
        "bounds": {"heldout": HELDOUT, "of_gain": GAIN, "train_slice": SLICE},
        "frozen": check(frozen, fp32),
        "recipes": rows,
    }


def _with_control(found: Row) -> Iterator[Row]:
    """Yield the rows, and that of the frozen model."""
    for r in found["recipes"]:
        cpu = r["cpu"].split("(")[0].split()[0]
        yield r | r["check"] | r["losses"] | {"name": f"`{r['recipe']}`", "cpu": cpu}
    blank = dict.fromkeys(("cpu", "learning_rate", "eval_final", "train_eval_final"), "")
    yield blank | found["frozen"] | {"name": "frozen model (control)", "bits": 0}


table = columns(  # every recipe against fp32: bits, losses, the three bounds
    _with_control,
    ("recipe", "{name}"), ("processor", "{cpu}"),
    ("learning rate", lambda r: r["learning_rate"] and f"{r['learning_rate']:g}"),
    ("bits fw + bw", lambda r: f"{r['bits']:.2f}" if r["bits"] else "0"),
    ("held-out", lambda r: r["eval_final"] and f"{r['eval_final']:.4f}"),
    ("against fp32", "{heldout:+.2fc} %"), ("of fp32's gain", "{of_gain:+.2fc} %"),
    ("train slice", lambda r: r["train_eval_final"] and f"{r['train_eval_final']:.4f}"),
    ("against fp32", "{train_slice:+.2fc} %"), ("within bounds", lambda r: yes(r["met"])),
)  # fmt: skip
TABLES: dict[str, Draw] = {"quality": table}


if __name__ == "__main__":
    if shutil.disk_usage(RESULTS).free < 1e9:
        raise SystemExit("less than 1 GB of disk is free; the runs need scratch space")
    run_study("quality", sys.argv[1:], cells, measure, summary, stale=stale)
