"""The small GPT-2 over links, every recipe from the first step to the last, in turn, in rounds.

``python -m bench.training.rounds`` (a part of ``make bench-links``); given names of studies, links or
recipes, the cells that have them all. Single runs on a shared machine differ by several per cent, as much as
some questions turn on. Within a round every recipe runs right after another, in an order that moves on from
round to round; who is quicker is asked within each round, and the median of the rounds counts. C, the free
step, is that of uncompressed fp32 over the unshaped network, once a round and study.

Below: what the rounds say: seconds, how much sooner ``auto`` was, and how it stands to its goals.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bench.study.cells import Kept, missing, run_study
from bench.study.runs import trained
from bench.training.links import ATTEMPTS, AUTO, COMMON, JOBS, PLACES
from bench.training.predict import bound, is_same

KEPT = Kept("rounds")
SPANS = ("step_one", "first_visit", "one_epoch", "epochs")
MODEL = "gpt2-lab"
Way = tuple[str, str, str]  # link, recipe, congestion control
FREE: Way = ("unlimited", "fp32", "cubic")
ROUNDS = 3
AQSGD = ("aqsgd:fw=3,bw=6", "aqsgd:fw=4,bw=8")
Row = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """Runs that are compared with one another: each recipe over each link, and the free run.

    ``brief``: recipes of which no more than the speed is asked, and the steps that they make. ``rounds``: how
    many there are.
    """

    name: str
    links: tuple[str, ...]
    recipes: tuple[str, ...]
    more: tuple[Way, ...] = ()
    own: Row = field(default_factory=dict)  # options that differ from the model's job
    brief: dict[str, int] = field(default_factory=dict)
    rounds: int = ROUNDS

    @property
    def job(self) -> Row:
        return COMMON | JOBS[MODEL] | self.own

    @property
    def ways(self) -> list[Way]:
        """Every run of a round, the free one first."""
        each = ((link, recipe, "cubic") for link in self.links for recipe in self.recipes)
        return [FREE, *each, *self.more]

    @property
    def steps(self) -> int:
        return int(self.job["steps"])

    @property
    def per_pass(self) -> int:
        return self.steps // int(self.job["epochs"])

    def is_brief(self, way: Way) -> bool:
        """Return whether a run makes only some of the steps."""
        return way != FREE and way[1] in self.brief


# What the goals are about; where no recipe should lose time; a cell in which nearly all can be hidden (many
# micro-batches over a short way, so that filling and draining the pipeline take little of a step); and the
# traces by which nothing in auto was chosen.
SLOW = Study(
    "slow",
    ("10+30", "trace"),
    (AUTO, "thinwire", "direct:bits=4", "tahquant", *AQSGD),
    tuple((link, AUTO, "bbr") for link in ("10+30", "trace")),
)
FAST = Study(
    "fast",
    ("unlimited", "1gbit", "200+50", "100+50", "campus-busy"),
    (AUTO, "thinwire", "direct:bits=4", "bf16"),
)
DEEP = Study(
    "deep",
    ("8+5",),
    (AUTO, "thinwire", "tahquant", *AQSGD, "fp32"),
    own={"batch": 64, "microbatches": 32, "steps": 24},
    brief={"fp32": 6},
)
ELSEWHERE = Study(
    "elsewhere",
    ("home-uplink", "satellite"),
    (AUTO, "thinwire", "direct:bits=4", "tahquant"),
)
# The other recipes of the matrix, which are so far behind on such a link that one round tells.
BEHIND = Study("behind", ("satellite",), (AUTO, *AQSGD, "bf16", "fp32"), rounds=1)
STUDIES = {study.name: study for study in (SLOW, FAST, DEEP, ELSEWHERE, BEHIND)}


class Cell(NamedTuple):
    study: str
    round: int
    link: str
    recipe: str
    congestion: str


def cells() -> Iterator[Cell]:
    """Yield every run, in the order in which they are made."""
    for study in STUDIES.values():
        for number in range(1, study.rounds + 1):
            first = (number - 1) * len(study.ways) // study.rounds
            yield from (Cell(study.name, number, *w) for w in [*study.ways[first:], *study.ways[:first]])


def measure(cell: Cell) -> dict[str, Any]:
    """Make one run and return what counts of it; ``MeasurementError`` where the machine was too busy."""
    study, way = STUDIES[cell.study], cell[2:]
    brief = {"steps": study.brief[cell.recipe]} if study.is_brief(way) else {}
    own = {"emulate": True, "link": PLACES[cell.link], "congestion": cell.congestion, "eval_samples": 32}
    record, steps = trained(study.job | own | brief | {"recipe": cell.recipe})
    return {
        "started": record.started,
        "environment": record.environment,
        "emulator": {k: (record.link.emulator or {}).get(k) for k in ("congestion", "lateness", "valid")},
        "seconds": [s.seconds for s in steps],
        "bytes": [sum(s.bytes.values()) for s in steps],
        "eval_final": record.loss.eval_final,
    }


def rounds(study: Study, way: Way) -> dict[int, Row]:
    """Return the finished runs of a way by round; empty until all are there."""
    found = {number: KEPT.get(Cell(study.name, number, *way)) for number in range(1, study.rounds + 1)}
    return found if all(found.values()) else {}


def unmade() -> list[str]:
    """Return the runs that are not made yet; none of a study that nobody has begun."""
    begun = {name.partition(" ")[0] for name in KEPT.all()}
    return missing("rounds", (cell for cell in cells() if cell.study in begun))


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
    return {number: statistics.median(run["seconds"]) for number, run in rounds(study, FREE).items()}


def rows_of(study: Study) -> list[Row]:
    """Return one row a way that is finished: its seconds round by round, and how much sooner ``auto`` was."""
    made = ((way, rounds(study, way)) for way in study.ways)
    return [_row(study, way, runs) for way, runs in made if runs]


def _row(study: Study, way: Way, made: dict[int, Row]) -> Row:
    brief = study.is_brief(way)
    timed = _stretched if brief else spans
    runs = {number: timed(study, run) for number, run in made.items()}
    auto = {n: spans(study, run) for n, run in rounds(study, (way[0], AUTO, "cubic")).items()}
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
        rows = rows_of(study) if free_steps(study) else []
        here = (r for r in rows if r["congestion"] == "cubic" and r["link"] in study.links)
        found |= {(r["link"], r["recipe"]): _kept(study, r)["epochs"] for r in here}
    return found


def goal(study: Study, link: str) -> Row:
    """Return ``auto`` held against its bound and the study's other recipes; nothing before all are there."""
    rows = {r["recipe"]: r for r in rows_of(study) if (r["link"], r["congestion"]) == (link, "cubic")}
    free = rounds(study, FREE)
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
            (fp32,) = [r for r in rows_of(DEEP) if (r["link"], r["recipe"]) == (link, "fp32")]
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
    return [row for study in STUDIES.values() for row in rows_of(study)]


if __name__ == "__main__":
    from bench.training.links_summary import summary

    run_study("rounds", sys.argv[1:], cells, measure, summary, ATTEMPTS, "links")
