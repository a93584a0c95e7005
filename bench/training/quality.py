"""Does compression cost quality? Every recipe on SmolLM2-135M: three epochs, three seeds.

Run ``python -m bench.training.quality`` (``make bench-quality``); about an hour and a half on two quiet
cores. Given names of recipes, it runs their cells and no more, so that two processes can share the work:
losses do not depend on the clock, and one run fills the other's pipeline bubbles. A cell is one run: recipe,
learning rate, seed. Finished cells are kept, so it goes on where it was stopped. Every recipe gets the same
search: three learning rates on the first seed, the best of which (lowest held-out loss) runs on the other
seeds. Each run is held against fp32's on the processor that it was on. The link is not shaped. A frozen model
goes through the same check as a control, which it must fail. Records: ``bench/results/quality/``; the
verdict: ``bench/results/quality.json``; the tables come from there (``python -m bench.study.pages``).
"""

from __future__ import annotations

import shutil
import statistics
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from bench.study.cells import RESULTS, Kept, words_of
from bench.study.runs import trained
from bench.study.tables import Draw, Row, columns, yes
from bench.training.unbiased import FLOOR
from thinwire.runs.machine.processor import environment
from thinwire.runs.records.writer import write_json
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
    "save_model": False,
    "tensorboard": False,
}
# Of fp32's losses: held-out within 0.5 % and within 5 % of what fp32 gained; a training slice within 1.5 %.
HELDOUT, GAIN, SLICE = 0.005, 0.05, 0.015


class Cell(NamedTuple):
    recipe: str
    rate: float
    seed: int
    cpu: str = ""  # where fp32 ran again, because other recipes ran there


def record_of(cell: Cell) -> dict[str, Any]:
    """Return the run record of one cell, running it unless it is there, of the recipe as it is now."""
    found: dict[str, Any] | None = KEPT.get(cell)
    if found is None or found["recipe"]["spec"] != parse_recipe(cell.recipe).spec:
        print(*words_of(cell), "...", file=sys.stderr, flush=True)
        job = JOB | {"recipe": cell.recipe, "lr": cell.rate, "seed": cell.seed}
        KEPT.keep(cell, found := trained(job, "runs/quality")[0].to_dict())
    return found


def search(recipe: str) -> tuple[float, list[dict[str, Any]]]:
    """Return the recipe's best learning rate and its records by seed."""
    tried = {rate: record_of(Cell(recipe, rate, SEEDS[0])) for rate in RATES}
    best = min(tried, key=lambda rate: tried[rate]["loss"]["eval_final"])
    return best, [record_of(Cell(recipe, best, seed)) for seed in SEEDS]


def cpu(record: dict[str, Any]) -> str:
    """Return the processor a run was on."""
    return str(record["environment"]["machine"]["cpu"])


def baseline(name: str, found: tuple[float, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return fp32's runs by seed on the processor ``name``; ``found`` are those that its search left.

    Processors round differently, and their losses differ by as much as half a percent: a recipe is held
    against fp32 on its own. Errors: ``SystemExit`` where a run is missing and this is another machine.
    """
    rate, records = found
    if name == cpu(records[0]):
        return records
    cells = [Cell("fp32", rate, seed, name) for seed in SEEDS]
    if not all(map(KEPT.get, cells)) and environment("auto", 1)["machine"]["cpu"] != name:
        raise SystemExit(f"no runs of fp32 on {name}, where other recipes ran; run this bench there")
    return [record_of(cell) for cell in cells]


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


def row(
    recipe: str, rate: float, records: list[dict[str, Any]], fp32: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the verdict on the runs of one recipe, one a seed, against fp32's of the same processor."""
    by_seed = [check(mean_losses([r]), mean_losses([f])) for r, f in zip(records, fp32, strict=True)]
    return {
        "recipe": recipe,
        "spec": records[0]["recipe"]["spec"],
        "cpu": ", ".join(dict.fromkeys(map(cpu, records))),
        "learning_rate": rate,
        "bits": statistics.fmean(bits(r) for r in records),
        "bits_forward": statistics.fmean(r["bits_per_value"]["forward"] for r in records),
        "bits_backward": statistics.fmean(r["bits_per_value"]["backward"] for r in records),
        "losses": mean_losses(records),
        "eval_final_by_seed": [r["loss"]["eval_final"] for r in records],
        "check": check(mean_losses(records), mean_losses(fp32)),
        "check_by_seed": by_seed,
    }


def summary(found: dict[str, tuple[float, list[dict[str, Any]]]]) -> dict[str, Any]:
    """Return the verdict on every recipe and on the frozen control."""
    cpus = dict.fromkeys(cpu(r) for _, records in found.values() for r in records)
    base = {name: baseline(name, found["fp32"]) for name in cpus}
    rows = [row("fp32", found["fp32"][0], runs, runs) for runs in base.values()]
    for recipe, (rate, records) in found.items():
        if recipe != "fp32":
            own = [base[cpu(record)][seed] for seed, record in zip(SEEDS, records, strict=True)]
            rows.append(row(recipe, rate, records, own))
    fp32 = mean_losses(found["fp32"][1])
    frozen = {"eval_final": fp32["eval_first"], "train_eval_final": fp32["train_eval_first"]}
    job = {k: v for k, v in JOB.items() if k not in ("save_model", "tensorboard")}
    return {
        "job": job | {"rates": RATES, "seeds": SEEDS},
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
    ("recipe", "{name}"),
    ("processor", "{cpu}"),
    ("learning rate", lambda r: r["learning_rate"] and f"{r['learning_rate']:g}"),
    ("bits fw + bw", lambda r: f"{r['bits']:.2f}" if r["bits"] else "0"),
    ("held-out", lambda r: r["eval_final"] and f"{r['eval_final']:.4f}"),
    ("against fp32", "{heldout:+.2fc} %"),
    ("of fp32's gain", "{of_gain:+.2fc} %"),
    ("train slice", lambda r: r["train_eval_final"] and f"{r['train_eval_final']:.4f}"),
    ("against fp32", "{train_slice:+.2fc} %"),
    ("within bounds", lambda r: yes(r["met"])),
)
TABLES: dict[str, Draw] = {"quality": table}


def main(recipes: list[str]) -> None:
    """Run what is missing of ``recipes``; with none given, of all, and write the verdict."""
    if shutil.disk_usage(RESULTS).free < 1e9:
        raise SystemExit("less than 1 GB of disk is free; the runs need scratch space")
    found = {recipe: search(recipe) for recipe in recipes or RECIPES}
    if not recipes:
        write_json(RESULTS / "quality.json", summary(found))


if __name__ == "__main__":
    main(sys.argv[1:])
