"""The traces that nothing in ``auto`` was chosen by: whole runs of the small GPT-2, one a recipe."""

from __future__ import annotations

from typing import Any

from bench.links import AUTO, ELSEWHERE, JOBS, RIVALS, read, sent

MODEL = "gpt2-lab"
Row = dict[str, Any]


def elsewhere() -> list[Row]:
    """Return one row a finished run: its seconds, and how many times sooner ``auto`` was over all passes."""
    out = []
    for trace in ELSEWHERE:
        made = {recipe: row for recipe in (AUTO, *RIVALS) if (row := _row(trace, recipe))}
        for row in made.values() if AUTO in made else ():
            out.append(row | {"sooner": row["epochs"] / made[AUTO]["epochs"]})
    return out


def _row(trace: str, recipe: str) -> Row | None:
    found = read("whole", MODEL, trace, recipe)
    if found is None:
        return None
    seconds = [s["seconds"] for s in found["steps"]]
    return {
        "link": trace,
        "recipe": recipe,
        "bytes": sent(found),
        "one_epoch": sum(seconds[: JOBS[MODEL]["steps"] // JOBS[MODEL]["epochs"]]),
        "epochs": sum(seconds),
        "eval_final": found["record"]["loss"]["eval_final"],
    }
