"""What the runs made in rounds say: seconds, how much sooner ``auto`` was, and how it stands to its goals."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.training import rounds
from bench.training.bounds import bound, is_same
from bench.training.links import AUTO
from bench.training.rounds import BEHIND, DEEP, ELSEWHERE, FAST, FREE, MODEL, SLOW, STUDIES, Study

SPANS = ("step_one", "first_visit", "one_epoch", "epochs")
Row = dict[str, Any]


def spans(study: Study, run: Row) -> dict[str, float]:
    """Return the seconds of a run's first step, of its first pass's median step, of that pass, and of all."""
    seconds: Sequence[float] = run["seconds"]
    first = seconds[: study.per_pass]
    return {
        "step_one": seconds[0],
        "first_visit": statistics.median(first),
        "one_epoch": sum(first),
        "epochs": sum(seconds),
    }


def _stretched(study: Study, run: Row) -> dict[str, float]:
    """Return the same of a brief run: as if all of the job's steps had taken what its median step took."""
    step = statistics.median(run["seconds"])
    many = {"one_epoch": study.per_pass * step, "epochs": study.steps * step}
    return {"step_one": run["seconds"][0], "first_visit": step} | many


def free_steps(study: Study) -> dict[int, float]:
    """Return C of each round, the median free step; none before all rounds are done."""
    return {number: statistics.median(run["seconds"]) for number, run in rounds.rounds(study, FREE).items()}


def summary(study: Study) -> list[Row]:
    """Return one row a way that is finished: its seconds round by round, and how much sooner ``auto`` was."""
    made = ((way, rounds.rounds(study, way)) for way in study.ways)
    return [_row(study, way, runs) for way, runs in made if runs]


def _row(study: Study, way: rounds.Way, made: dict[int, Row]) -> Row:
    brief = study.is_brief(way)
    timed = _stretched if brief else spans
    runs = {number: timed(study, run) for number, run in made.items()}
    auto = {n: spans(study, run) for n, run in rounds.rounds(study, (way[0], AUTO, "cubic")).items()}
    both = [(run, auto[number]) for number, run in runs.items() if number in auto]
    sooner = {k: statistics.median(run[k] / other[k] for run, other in both) for k in SPANS} if both else {}
    row: Row = {"study": study.name} | dict(zip(("link", "recipe", "congestion"), way, strict=True))
    row |= {"rounds": list(made)} | {span: [run[span] for run in runs.values()] for span in SPANS}
    a_step = statistics.median(statistics.fmean(run["bytes"]) for run in made.values())
    losses = None if brief else [run["eval_final"] for run in made.values()]
    return row | {"bytes": study.steps * a_step, "eval_final": losses, "sooner": sooner}


def _bounds(study: Study, row: Row) -> dict[int, float]:
    """Return the bound of each round; none over a link that has no one rate."""
    job, nbytes, free = study.job, row["bytes"] / study.steps, free_steps(study)
    found = {number: bound(row["link"], c, nbytes, job["microbatches"]) for number, c in free.items()}
    return {number: best for number, best in found.items() if best is not None}


def _kept(study: Study, row: Row, bounds: Mapping[int, float] | None = None) -> dict[str, float]:
    """Return what a row keeps of its rounds' free speed, or of their ``bounds``: medians, span by span."""
    free = {number: c / (bounds or {}).get(number, 1.0) for number, c in free_steps(study).items()}
    steps = {"step_one": 1, "first_visit": 1, "one_epoch": study.per_pass, "epochs": study.steps}
    return {
        k: statistics.median(n * free[i] / took for i, took in zip(row["rounds"], row[k], strict=True))
        for k, n in steps.items()
    }


def shares() -> dict[tuple[str, str], float]:
    """Return what share of the free speed a recipe keeps over a link, where the model's own job ran."""
    found = {}
    for study in (SLOW, FAST):
        rows = summary(study) if free_steps(study) else []
        here = (r for r in rows if r["congestion"] == "cubic" and r["link"] in study.links)
        found |= {(r["link"], r["recipe"]): _kept(study, r)["epochs"] for r in here}
    return found


def goal(study: Study, link: str) -> Row:
    """Return ``auto`` held against its bound and the study's other recipes; nothing before all are there."""
    rows = {r["recipe"]: r for r in summary(study) if (r["link"], r["congestion"]) == (link, "cubic")}
    free = rounds.rounds(study, FREE)
    if not free or not set(study.recipes) <= set(rows):  # a rival left out might be the quickest
        return {}
    base = statistics.median(run["eval_final"] for run in free.values())
    own = rows[AUTO]
    kept, bounds = _kept(study, own), _bounds(study, own)
    reach = _kept(study, own, bounds) if bounds else None
    reached = {name: _reached(row["eval_final"], base) for name, row in rows.items()}
    return {
        "share": kept["epochs"],
        "share_first": kept["first_visit"],
        "share_step_one": kept["step_one"],
        "bound": statistics.median(bounds.values()) if bounds else None,
        "of_bound": reach and reach["epochs"],
        "of_bound_first": reach and reach["first_visit"],
        "of_bound_step_one": reach and reach["step_one"],
        "faster_than": {
            name: {
                "epochs": rows[name]["sooner"]["epochs"] if reached[AUTO] and reached[name] else None,
                "one_epoch": rows[name]["sooner"]["one_epoch"],
                "other_reached": reached[name],
            }
            for name in study.recipes
            if name != AUTO
        },
        "same_loss": reached[AUTO],
        "rounds": len(own["rounds"]),
    }


def _reached(losses: Iterable[float] | None, base: float) -> bool:
    return losses is not None and all(is_same(loss, base) for loss in losses)


def of_link(model: str, link: str) -> Row:
    """Return the goal of a cell of the matrix from the study that has its link; nothing where none has."""
    own = [study for study in (SLOW, FAST) if link in study.links and model == MODEL]
    return goal(own[0], link) if own else {}


def deep_goals() -> list[Row]:
    """Return the goals over the links of a job with many micro-batches, which is no cell of the matrix."""
    out = []
    for link in DEEP.links:
        found = goal(DEEP, link)
        if found:
            (fp32,) = [r for r in summary(DEEP) if (r["link"], r["recipe"]) == (link, "fp32")]
            place = {"model": f"{MODEL}, {DEEP.job['microbatches']} micro-batches", "link": link}
            out.append(place | {"fp32_keeps": _kept(DEEP, fp32)["first_visit"]} | found)
    return out


def elsewhere_goals() -> list[Row]:
    """Return how ``auto`` stands to the others across the traces by which nothing in it was chosen."""
    out = []
    for link in ELSEWHERE.links:
        found, behind = (goal(study, link) for study in (ELSEWHERE, BEHIND))
        if found:
            others = found["faster_than"] | behind.get("faster_than", {})
            out.append({"model": MODEL, "link": link, "fp32_keeps": None} | found | {"faster_than": others})
    return out


def all_rows() -> list[Row]:
    """Return the rows of every study."""
    return [row for study in STUDIES.values() for row in summary(study)]
