"""The founding student paper, redone: GPT-2 small's shape, WikiText-2, fp32 against the INT8 step delta.

Run ``python -m bench.training.student`` (``make bench-student``) with THINWIRE_DATA set; about fifteen
minutes. The weights are random at the start, because GPT-2's are in no package index. Each variant is one run
of 200 steps in two processes over a link of 100 Mbit/s and 5 ms; step times come from short runs behind them,
the variants taking turns, because a shared machine changes its speed within minutes. Finished runs are kept.
Writes ``bench/results/student/`` and, from them, ``bench/results/student.json``.
"""

from __future__ import annotations

import json
import sys
from statistics import median
from typing import Any

from bench.study.cells import RESULTS, keep
from bench.study.runs import trained
from thinwire.runs.records.runs import slug
from thinwire.runs.records.writer import write_json

RECIPES = ("fp32", "step-delta", "direct:bits=8")
JOB: dict[str, Any] = {
    "model": "gpt2",
    "init": "random",
    "data": "wikitext-2",
    "steps": 200,
    "batch": 2,
    "microbatches": 2,
    "seq": 64,
    "lr": 3e-4,
    "warmup": 20,
    "link": "100mbit,5ms",
    "eval_samples": 32,
    "save_model": False,
    "tensorboard": False,
}


ROUNDS, TIMED_STEPS, WARM_STEPS = 2, 12, 3


def run(recipe: str) -> dict[str, Any]:
    """Return the record of one variant, running it unless it is there."""
    file = RESULTS / "student" / f"{slug(recipe)}.json"
    if not file.exists():
        print(f"{recipe} ...", file=sys.stderr, flush=True)
        keep(file, trained(JOB | {"recipe": recipe}, "runs/student")[0].to_dict())
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def times() -> dict[str, list[float]]:
    """Return the median seconds of a step of each variant, one for each round in which they took turns."""
    file = RESULTS / "student" / "step-times.json"
    if not file.exists():
        found: dict[str, list[float]] = {recipe: [] for recipe in RECIPES}
        for turn in range(ROUNDS):
            for recipe in RECIPES:
                print(f"timing {recipe}, round {turn + 1} ...", file=sys.stderr, flush=True)
                brief = {"steps": TIMED_STEPS, "warmup": 0, "eval_samples": 0, "recipe": recipe}
                _, steps = trained(JOB | brief)
                found[recipe].append(median(m.seconds for m in steps[WARM_STEPS:]))
        keep(file, found)
    timed: dict[str, list[float]] = json.loads(file.read_text())
    return timed


def row(record: dict[str, Any], seconds: list[float]) -> dict[str, Any]:
    """Return what the paper's tables compare, as measured."""
    sent, loss = record["bytes"], record["loss"]
    return {
        "recipe": record["recipe"]["name"],
        "bytes": sent["forward"] + sent["backward"],
        "raw_bytes": sent["raw_forward"] + sent["raw_backward"],
        "median_step_s": median(seconds),
        "step_s_by_round": seconds,
        "train_loss_last10": sum(loss["train"][-10:]) / 10,
        "eval_first": loss["eval_first"],
        "eval_final": loss["eval_final"],
    }


def main() -> None:
    """Run what is missing and write the comparison."""
    records = [run(recipe) for recipe in RECIPES]
    timed = times()
    rows = [row(r, timed[r["recipe"]["name"]]) for r in records]
    notes = sorted({n for r in records for n in r["notes"]})
    environment = records[0]["environment"]
    write_json(
        RESULTS / "student.json", {"job": JOB, "environment": environment, "notes": notes, "rows": rows}
    )


if __name__ == "__main__":
    main()
