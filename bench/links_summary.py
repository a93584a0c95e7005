"""The table of ``bench.links``: what each recipe makes of each link, from the finished cells.

``python -m bench.links_summary`` writes ``bench/results/links.json``. All times of a session are against C,
the median step of uncompressed turns with the shape off in the same session; those of end-to-end runs are
against the median step of uncompressed fp32, run end to end over the unshaped network. So two runs are
compared by the shares of C that they keep. The loss fixed beforehand is fp32's held-out loss after three
passes, within 0.5 %: the time to it is that of three passes, and exists only where a recipe ends there.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

from bench.links import AUTO, CELLS, COMMON, FIXED, JOBS, LINKS, RESULTS, VERIFIED, cell_file, cells
from bench.links_worker import LIFTED
from thinwire.lab.emulator.profile import Profile
from thinwire.lab.predict import measured_seconds, predict_run
from thinwire.lab.record import RunRecord, StepMetrics, write_json
from thinwire.lab.record_schema import build
from thinwire.lab.runs import Run
from thinwire.links.shape import MTU, SEGMENT

SAME = 0.005  # a held-out loss within 0.5 % of fp32's counts as the same
SLOW = 0.15  # fp32 keeps at most so much of its speed: the cells the goals are about
Row = dict[str, Any]


def read(*cell: str) -> Any:
    """Return a finished cell, or None."""
    file = cell_file(*cell)
    return json.loads(file.read_text()) if file.exists() else None


def median(steps: list[Row], recipe: str, first: bool) -> Row:
    """Return the median step of a recipe in a session: first visits, or the later ones."""
    mine = [s for s in steps if s["recipe"] == recipe and (s["visit"] == 0) == first]
    return {k: statistics.median(s[k] for s in mine) for k in ("seconds", "bytes", "wire_bytes")}


def session(model: str, link: str) -> Row | None:
    """Return one session's figures: C and each recipe's first and later visits."""
    found = read("timing", model, link)
    if found is None:
        return None
    steps = found["steps"]
    free = statistics.median(s["seconds"] for s in steps if s["recipe"] == LIFTED)
    rows = {r: {"first": median(steps, r, True), "again": median(steps, r, False)} for r in FIXED}
    network = found["network"]
    return {"c": free, "recipes": rows, "congestion": network["congestion"], "lateness": network["lateness"]}


def line_seconds(link: str, nbytes: float) -> float | None:
    """Return how long ``nbytes`` of payload take on the link's line; None where it has no one rate."""
    rate = Profile.parse(LINKS[link]).up
    return nbytes / (rate * SEGMENT / MTU) if rate else None


def bound(link: str, c: float, nbytes: float) -> float | None:
    """Return C / (C + 2 (d + x / M)): what is left where all but the ends of a step is hidden.

    ``nbytes``: of a step, both directions; x is the line's time for half of them.
    """
    x = line_seconds(link, nbytes / 2)
    if x is None:
        return None
    delay = Profile.parse(LINKS[link]).delay or 0.0
    return float(c / (c + 2 * (delay + x / COMMON["microbatches"])))


def fixed_row(model: str, link: str, recipe: str, found: Row) -> Row:
    """Return one cell of the matrix that is a product of a session and a training."""
    c, visits = found["c"], found["recipes"][recipe]
    first, again = visits["first"]["seconds"], visits["again"]["seconds"]
    job = JOBS[model]
    steps, passes = job["steps"] // job["epochs"], job["epochs"]
    tokens = job["batch"] * job["seq"]
    seconds = steps * (first + (passes - 1) * again)
    nbytes = steps * (visits["first"]["bytes"] + (passes - 1) * visits["again"]["bytes"])
    row = {
        "model": model,
        "link": link,
        "recipe": recipe,
        "how": "product",
        "tokens_s": tokens * steps * passes / seconds,
        "share_first": c / first,
        "share": c * steps * passes / seconds,
        "seconds_one_epoch": steps * first,
        "seconds": seconds,
        "bytes": nbytes,
    }
    return row | _ends(link, c, nbytes / (steps * passes)) | _loss(model, recipe)


def whole_row(model: str, link: str, recipe: str, c: float) -> Row | None:
    """Return one cell that was run from the first step to the last."""
    found = read("whole", model, link, recipe)
    if found is None:
        return None
    record, steps = found["record"], found["steps"]
    job, seconds = JOBS[model], [s["seconds"] for s in steps]
    nbytes = sum(s["bytes_forward"] + s["bytes_backward"] for s in steps)
    per_pass = job["steps"] // job["epochs"]
    row = {
        "model": model,
        "link": link,
        "recipe": recipe,
        "how": "whole",
        "tokens_s": record["totals"]["tokens"] / sum(seconds),
        "share_first": c / statistics.median(seconds[:per_pass]),
        "share": c * len(seconds) / sum(seconds),
        "seconds_one_epoch": sum(seconds[:per_pass]),
        "seconds": sum(seconds),
        "bytes": nbytes,
        "eval_final": record["loss"]["eval_final"],
        "decisions": len(record["decisions"]),
        "status": record["status"],
    }
    return row | _ends(link, c, nbytes / len(seconds)) | _same(model, record["loss"]["eval_final"])


def _ends(link: str, c: float, nbytes: float) -> Row:
    line = line_seconds(link, nbytes)
    return {
        "c": c,
        "bound": bound(link, c, nbytes),
        "communication_to_compute": None if line is None else line / c,
    }


def _loss(model: str, recipe: str) -> Row:
    found = read("training", model, "none", recipe)
    if found is None:
        return {"eval_final": None, "same_loss": None}
    final = found["record"]["loss"]["eval_final"]
    return {"eval_final": final} | _same(model, final)


def _same(model: str, final: float) -> Row:
    base = read("training", model, "none", "fp32")
    if base is None:
        return {"same_loss": None}
    return {"same_loss": final <= base["record"]["loss"]["eval_final"] * (1 + SAME)}


def free_step(model: str) -> float | None:
    """Return C of end-to-end runs: the median step of fp32 over the unshaped network."""
    found = read("whole", model, "unlimited", "fp32")
    return statistics.median(s["seconds"] for s in found["steps"]) if found else None


def matrix() -> list[Row]:
    """Return every cell there is, in the order of the matrix."""
    rows: list[Row] = []
    for model in JOBS:
        c = free_step(model)
        for link in LINKS:
            found = session(model, link)
            if found:
                rows += [fixed_row(model, link, recipe, found) for recipe in FIXED]
            elif c:
                rows += filter(None, (whole_row(model, link, recipe, c) for recipe in FIXED))
            rows += filter(None, [whole_row(model, link, AUTO, c) if c else None])
    return rows


def verified(rows: list[Row]) -> list[Row]:
    """Return the cells run end to end beside their product: the shares of C in both."""
    out = []
    for model, link, recipe in VERIFIED:
        product = next(
            (r for r in rows if (r["model"], r["link"], r["recipe"]) == (model, link, recipe)), None
        )
        c = free_step(model)
        whole = whole_row(model, link, recipe, c) if product and c else None
        if product and whole:
            pair = {"product": product["share"], "whole": whole["share"], "c": [product["c"], c]}
            out.append({"model": model, "link": link, "recipe": recipe} | pair)
    return out


def predictions() -> list[Row]:
    """Return each end-to-end run over a link of one rate: its step as replayed, over its step as measured."""
    out = []
    for kind, model, link, recipe in cells():
        found = read(kind, model, link, recipe) if kind == "whole" else None
        if found and Profile.parse(LINKS.get(link, f"trace:{link}")).trace is None:
            steps = [build(StepMetrics, s, f"a step of {model} over {link}") for s in found["steps"]]
            run = Run(recipe, RunRecord.from_dict(found["record"]), steps)
            pair = {"measured": measured_seconds(run), "predicted": predict_run(run)}
            out.append({"model": model, "link": link, "recipe": recipe} | pair)
    return out


def goals(rows: list[Row]) -> list[Row]:
    """Hold ``auto`` against the bound, AQ-SGD and TAH-Quant where fp32 keeps at most ``SLOW``."""
    out = []
    for auto in (r for r in rows if r["recipe"] == AUTO):
        beside = {r["recipe"]: r for r in rows if (r["model"], r["link"]) == (auto["model"], auto["link"])}
        if "fp32" not in beside:
            continue
        slow = beside["fp32"]["share"] <= SLOW
        versus = {name: _versus(beside[name], auto) for name in FIXED if name in beside}
        of_bound = auto["share"] / auto["bound"] if auto["bound"] else None
        place = {"model": auto["model"], "link": auto["link"], "slow": slow}
        shares = {"share": auto["share"], "share_first": auto["share_first"], "of_bound": of_bound}
        out.append(place | shares | {"faster_than": versus, "same_loss": auto["same_loss"]})
    return out


def _versus(other: Row, auto: Row) -> Row:
    """Return how much sooner ``auto`` is done: with three passes only where both reach fp32's loss."""
    reached = auto["same_loss"] and other["same_loss"]
    return {
        "epochs": auto["share"] / other["share"] if reached else None,
        "one_epoch": auto["share_first"] / other["share_first"],
        "other_reached": other["same_loss"],
    }


def main() -> None:
    """Write the summary of the cells that are finished."""
    rows = matrix()
    environment = next(
        (json.loads(f.read_text())["record"]["environment"] for f in sorted(CELLS.glob("training-*"))), {}
    )
    summary = {
        "environment": environment,
        "links": LINKS,
        "jobs": JOBS,
        "rows": rows,
        "verified": verified(rows),
        "predictions": predictions(),
        "goals": goals(rows),
        "missing": [" ".join(filter(None, cell)) for cell in cells() if not cell_file(*cell).exists()],
    }
    write_json(RESULTS / "links.json", summary)


if __name__ == "__main__":
    main()
