"""The founding student paper, redone: GPT-2 small's shape, WikiText-2, fp32 against the INT8 step delta.

Run ``python -m bench.training.student`` (``make bench-student``) with THINWIRE_DATA set; about fifteen
minutes. The weights are random at the start, because GPT-2's are in no package index. Each variant is one run
of 200 steps in two processes over a link of 100 Mbit/s and 5 ms; step times come from short runs behind them,
the variants taking turns, because a shared machine changes its speed within minutes. Finished runs are kept.
Writes ``bench/results/student.json``.
"""

from __future__ import annotations

import sys
from statistics import median
from typing import Any

from bench.study.cells import Kept, run_study
from bench.study.runs import trained
from bench.study.tables import Draw, columns

KEPT = Kept("student")
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
}
ROUNDS, TIMED_STEPS, WARM_STEPS = 2, 12, 3


def measure(cell: tuple[str]) -> dict[str, Any]:
    """Return the record of one variant; or, for ``times``, the median seconds of a step of each.

    Those are one for each round in which the variants took turns.
    """
    if cell[0] != "times":
        return trained(JOB | {"recipe": cell[0]}, "runs/student")[0].to_dict()
    found: dict[str, list[float]] = {recipe: [] for recipe in RECIPES}
    for turn in range(ROUNDS):
        for recipe in RECIPES:
            print(f"timing {recipe}, round {turn + 1} ...", file=sys.stderr, flush=True)
            brief = {"steps": TIMED_STEPS, "warmup": 0, "eval_samples": 0, "recipe": recipe}
            _, steps = trained(JOB | brief)
            found[recipe].append(median(m.seconds for m in steps[WARM_STEPS:]))
    return found


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


def summary() -> dict[str, Any]:
    """Return the comparison."""
    records, timed = [r for recipe in RECIPES if (r := KEPT.get(recipe))], KEPT.get("times") or {}
    rows = [row(r, timed[r["recipe"]["name"]]) for r in records if timed]
    notes = sorted({n for r in records for n in r["notes"]})
    environment = records[0]["environment"] if records else {}
    return {"job": JOB, "environment": environment, "notes": notes, "rows": rows}


table = columns(  # the paper's comparison, as measured here
    lambda found: (r | {"base": found["rows"][0]} for r in found["rows"]),
    ("recipe", "`{recipe}`"), ("sent", "{bytes:.1fM} MB"),
    ("fewer bytes than fp32", lambda r: f"{100 * (1 - r['bytes'] / r['raw_bytes']):.1f} %"),
    ("than bf16", lambda r: f"{100 * (1 - 2 * r['bytes'] / r['raw_bytes']):.1f} %"),
    ("median step", "{median_step_s:.3f} s"),
    ("faster", lambda r: f"{r['base']['median_step_s'] / r['median_step_s']:.2f}×"),
    ("train loss, last 10 steps", "{train_loss_last10:.4f}"),
    ("held-out loss", "{eval_first:.3f} → {eval_final:.4f}"),
)  # fmt: skip
TABLES: dict[str, Draw] = {"student": table}


if __name__ == "__main__":
    run_study("student", sys.argv[1:], lambda: [(name,) for name in (*RECIPES, "times")], measure, summary)
