"""The matrix of ``links``: what each recipe makes of each link, from the finished cells.

All times of a session are against C, the median step of uncompressed turns with the shape off in the same
session; those of end-to-end runs are against the median step of uncompressed fp32, run end to end over the
unshaped network. So two runs are compared by the shares of C that they keep. The loss fixed beforehand is
fp32's held-out loss after three passes, within 0.5 %: the time to it is that of three passes, and exists only
where a recipe ends there. Bytes are those of whole runs: of the training, where a cell is a product. Goals
are held against runs from end to end: those made in ``rounds`` where there are some, else ``VERIFIED``.
"""

from __future__ import annotations

import statistics
from datetime import datetime
from typing import Any

from bench.study.cells import makers, missing
from bench.training import rounds
from bench.training.links import AUTO, COMMON, FIXED, JOBS, KEPT, LIFTED, LINKS, VERIFIED, cells, sent
from bench.training.predict import bound, is_same, line_seconds, measured_seconds, of_bound, predict_run
from thinwire.links.profile import Profile
from thinwire.runs.records.finished_runs import Run
from thinwire.runs.records.run_record import build
from thinwire.uses.training.run.record import StepMetrics, TrainRecord

SLOW = 0.15  # fp32 keeps at most so much of its speed: the cells the goals are about
OF_BOUND, OF_FREE = 0.95, 0.90  # of the bound; of the free step where the bound is OF_BOUND or more
SOONER = (  # how many times sooner than whom, over three passes or over one
    ("AQ-SGD", ("aqsgd:fw=4,bw=8", "aqsgd:fw=3,bw=6"), "epochs", 1.5),
    ("TAH-Quant", ("tahquant",), "epochs", 1.15),
    ("AQ-SGD", ("aqsgd:fw=4,bw=8", "aqsgd:fw=3,bw=6"), "one_epoch", 4.0),
)
SPANS = {"epochs": "to the loss", "one_epoch": "one pass"}
UNSEEN = "trace"  # the link on which auto should beat every fixed recipe
CLOSE = 0.03  # who is ahead by less than this may be behind the next time
Row = dict[str, Any]


def median(steps: list[Row], recipe: str, first: bool) -> Row:
    """Return the median step of a recipe in a session: first visits, or the later ones."""
    mine = [s for s in steps if s["recipe"] == recipe and (s["visit"] == 0) == first]
    return {k: statistics.median(s[k] for s in mine) for k in ("seconds", "bytes", "wire_bytes")}


def session(model: str, link: str) -> Row | None:
    """Return one session's figures: C and each recipe's first and later visits."""
    found = KEPT.get("timing", model, link)
    if found is None:
        return None
    steps = found["steps"]
    free = statistics.median(s["seconds"] for s in steps if s["recipe"] == LIFTED)
    rows = {r: {"first": median(steps, r, True), "again": median(steps, r, False)} for r in FIXED}
    network = found["network"]
    return {"c": free, "recipes": rows, "congestion": network["congestion"], "lateness": network["lateness"]}


def fixed_row(model: str, link: str, recipe: str, found: Row) -> Row | None:
    """Return one cell of the matrix that is a product of a session and a training; None without the latter.

    Bytes and losses are the training's: in a session a revisit follows the first visit by a step, so the
    change since then, and with it a delta, is smaller than in a run.
    """
    training = KEPT.get("training", model, "none", recipe)
    if training is None:
        return None
    c, visits = found["c"], found["recipes"][recipe]
    first, again = visits["first"]["seconds"], visits["again"]["seconds"]
    job = JOBS[model]
    per_pass, passes = job["steps"] // job["epochs"], job["epochs"]
    row = {"model": model, "link": link, "recipe": recipe, "how": "product", "share_first": c / first}
    row |= {"tokens_s": job["batch"] * job["seq"] * per_pass * passes, "seconds_one_epoch": per_pass * first}
    return _completed(row, c, per_pass * (first + (passes - 1) * again), per_pass * passes, training)


def whole_row(model: str, link: str, recipe: str) -> Row | None:
    """Return one cell that was run from the first step to the last."""
    found = KEPT.get("whole", model, link, recipe)
    c = free_step(model, found["record"]["started"]) if found else None
    if found is None or c is None:
        return None
    record, seconds = found["record"], [s["seconds"] for s in found["steps"]]
    first = seconds[: JOBS[model]["steps"] // JOBS[model]["epochs"]]
    row = {"model": model, "link": link, "recipe": recipe, "how": "whole"}
    row |= {"share_step_one": c / seconds[0], "share_first": c / statistics.median(first)}
    row |= {"tokens_s": record["totals"]["tokens"], "seconds_one_epoch": sum(first)}
    row |= {"decisions": len(record["decisions"]), "status": record["status"]}
    return _completed(row, c, sum(seconds), len(seconds), found)


def _completed(row: Row, c: float, seconds: float, steps: int, run: Row) -> Row:
    """Return a row with what both kinds have; its ``tokens_s`` are tokens so far, ``run`` what it sent."""
    nbytes, final = sent(run), run["record"]["loss"]["eval_final"]
    line = line_seconds(row["link"], nbytes / steps)
    base = KEPT.get("training", row["model"], "none", "fp32")
    return row | {
        "tokens_s": row["tokens_s"] / seconds,
        "share": c * steps / seconds,
        "seconds": seconds,
        "bytes": nbytes,
        "eval_final": final,
        "c": c,
        "bound": bound(row["link"], c, nbytes / steps, COMMON["microbatches"]),
        "communication_to_compute": None if line is None else line / c,
        "same_loss": is_same(final, base["record"]["loss"]["eval_final"]) if base else None,
    }


def free_runs(model: str) -> list[Any]:
    """Return the end-to-end runs of fp32 over the unshaped network."""
    return [found for name, found in KEPT.all().items() if name.startswith(f"whole {model} unlimited fp32")]


def free_step(model: str, started: str) -> float | None:
    """Return C of an end-to-end run: the median step of fp32 over the unshaped network, nearest in time.

    This machine's speed drifts by some per cent within an hour, so C is measured more than once.
    """
    runs = free_runs(model)
    if not runs:
        return None
    at = datetime.fromisoformat(started)
    nearest = min(runs, key=lambda r: abs(datetime.fromisoformat(r["record"]["started"]) - at))
    return statistics.median(s["seconds"] for s in nearest["steps"])


def matrix() -> list[Row]:
    """Return every cell there is, in the order of the matrix, and its share in rounds where it has one."""
    rows: list[Row] = []
    for model in JOBS:
        for link in LINKS:
            found = session(model, link)
            if found:
                rows += filter(None, (fixed_row(model, link, recipe, found) for recipe in FIXED))
            else:
                rows += filter(None, (whole_row(model, link, recipe) for recipe in FIXED))
            rows += filter(None, [whole_row(model, link, AUTO)])
    made = rounds.shares()
    for row in rows:
        if row["model"] == rounds.MODEL and (row["link"], row["recipe"]) in made:
            row["share_in_rounds"] = made[row["link"], row["recipe"]]
    return rows


def end_to_end() -> dict[tuple[str, str, str], Row]:
    """Return the end-to-end runs of cells that are products in the matrix, by model, link and recipe."""
    found = {}
    for model, link, recipe in VERIFIED:
        row = whole_row(model, link, recipe)
        if row:
            found[model, link, recipe] = row
    return found


def verified(rows: list[Row]) -> list[Row]:
    """Return the cells run end to end beside their product: the shares of C in both."""
    products = {(r["model"], r["link"], r["recipe"]): r for r in rows if r["how"] == "product"}
    out = []
    for cell, whole in end_to_end().items():
        if cell in products:
            product, place = products[cell], dict(zip(("model", "link", "recipe"), cell, strict=True))
            pair = {"product": product["share"], "whole": whole["share"], "c": [product["c"], whole["c"]]}
            out.append(place | pair)
    return out


def predictions() -> list[Row]:
    """Return each end-to-end run over a link of one rate: its step as replayed, over its step as measured."""
    out = []
    for kind, model, link, recipe in cells():
        found = KEPT.get(kind, model, link, recipe) if kind == "whole" else None
        if found and Profile.parse(LINKS.get(link, f"trace:{link}")).trace is None:
            where = f"a step of {model} over {link}"
            steps = [build(StepMetrics, s, where) for s in found["steps"]]
            run = Run(recipe, TrainRecord.from_dict(found["record"]), steps)
            pair = {"measured": measured_seconds(run), "predicted": predict_run(run)}
            out.append({"model": model, "link": link, "recipe": recipe} | pair)
    return out


def goals(rows: list[Row]) -> list[Row]:
    """Hold ``auto`` against the bound and the fixed recipes.

    A recipe's end-to-end run in the cell counts where there is one, else the cell of the matrix; where runs
    were made in rounds, those alone.
    """
    runs, out = end_to_end(), []
    for auto in (r for r in rows if r["recipe"] == AUTO):
        place = {"model": auto["model"], "link": auto["link"]}
        here = {r["recipe"]: r for r in rows if place.items() <= r.items()}
        beside = {name: runs.get((*place.values(), name), row) for name, row in here.items()}
        if "fp32" not in beside:
            continue
        fp32 = beside["fp32"]["share"]
        versus = {name: _versus(beside[name], auto) for name in FIXED if name in beside}
        shares = {name: auto[name] for name in ("share", "share_first", "share_step_one", "bound")}
        names = {"of_bound": "share", "of_bound_first": "share_first", "of_bound_step_one": "share_step_one"}
        shares |= {of: of_bound(shares[name], shares["bound"]) for of, name in names.items()}
        more = {"single": versus, "faster_than": versus, "same_loss": auto["same_loss"]}
        out.append(place | {"fp32_keeps": fp32} | shares | more | rounds.of_link(**place))
    return [*out, *rounds.elsewhere_goals(), *rounds.deep_goals()]


def verdicts(goals: list[Row]) -> list[Row]:
    """Return each goal in each cell that it is about: what it wants, what was found, whether it is met."""
    out: list[Row] = []
    for goal in goals:
        held: list[tuple[str, float, float | None]] = []
        if goal["fp32_keeps"] is not None and goal["fp32_keeps"] <= SLOW:
            held += _held_to_the_bound(goal) if goal["bound"] else []
            held += [
                (f"sooner than {who} `{name}`, {SPANS[span]}", wanted, goal["faster_than"][name][span])
                for who, names, span, wanted in SOONER
                for name in names
                if name in goal["faster_than"]
            ]
        if goal["link"] in (UNSEEN, *rounds.ELSEWHERE.links):
            every = goal.get("single", {}) | goal["faster_than"]
            others = [(v["epochs"], name) for name, v in every.items() if v["epochs"]]
            least, name = min(others, default=(None, "none"))
            who = "every fixed recipe" if set(FIXED) <= set(every) else "all others in the rounds"
            held.append((f"sooner than {who}, the quickest of them `{name}`", 1.0, least))
        place = {"model": goal["model"], "link": goal["link"]}
        for text, wanted, found in held:
            out.append(place | {"goal": text, "wanted": wanted, "found": found, "met": _met(wanted, found)})
    return out


def _met(wanted: float, found: float | None) -> bool | None:
    """Say whether a goal is met; None where being ahead at all is the goal, and the lead is too small."""
    if found is None or found < wanted:
        return False
    return None if wanted == 1.0 and found < 1 + CLOSE else True


def _held_to_the_bound(goal: Row) -> list[tuple[str, float, float | None]]:
    """Return the goals of a cell that has a bound: texts, what is wanted, what was found."""
    parts = (("", ""), (", first pass", "_first"), (", first step", "_step_one"))
    held = [(f"share of the bound{text}", OF_BOUND, goal[f"of_bound{part}"]) for text, part in parts]
    if goal["bound"] >= OF_BOUND:
        held += [(f"share of the free step{text}", OF_FREE, goal[f"share{part}"]) for text, part in parts]
    return held


def _versus(other: Row, auto: Row) -> Row:
    """Return how much sooner ``auto`` is done: with three passes only where both reach fp32's loss."""
    reached = auto["same_loss"] and other["same_loss"]
    return {
        "epochs": auto["share"] / other["share"] if reached else None,
        "one_epoch": auto["share_first"] / other["share_first"],
        "other_reached": other["same_loss"],
    }


def relay_share() -> list[float]:
    """Return the least and the largest share of a core that the relay took in a cell."""
    found = []
    for cell in cells():
        kept = KEPT.get(cell)
        network = kept and (kept.get("network") or kept["record"]["link"]["emulator"])
        found += [network["cpu_share"]] if network else []
    return [min(found), max(found)] if found else []


def summary() -> Row:
    """Return what the finished cells say."""
    rows = matrix()
    held = goals(rows)
    first = next((found for name, found in KEPT.all().items() if name.startswith("training")), None)
    return {
        "environment": first["record"]["environment"] if first else {},
        "made_by": makers(kept for cell in cells() if (kept := KEPT.get(cell))),
        "links": LINKS,
        "jobs": JOBS,
        "rows": rows,
        "verified": verified(rows),
        "predictions": predictions(),
        "goals": held,
        "verdicts": verdicts(held),
        "rounds": rounds.all_rows(),
        "relay_share": relay_share(),
        "missing": missing("links", cells()) + rounds.unmade(),
    }
