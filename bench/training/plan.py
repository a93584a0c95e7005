"""What ``thinwire plan`` says before a run, beside what the run then takes.

``python -m bench.training.plan`` (``make bench-plan``): two machines that are a core of this one each. For
each model, ``thinwire plan --measure --threads 1`` runs for both at once, as ranks compute at once; from its
output and the links as text, the planner foretells the step of each recipe with the cut and the schedule of
the runs. Then each recipe runs over each link, emulated below the kernel's TCP, all on the first pass over
the samples.

It goes on where it was stopped. ``bench/results/plan.json`` has the replay of each run from its own compute
and bytes too (``predict``): where that is right and the plan is not, compute or bits were foretold wrong;
else the model of the link.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from bench.study.cells import Kept, makers, run_study
from bench.training.links import ATTEMPTS
from bench.training.links import LINKS as ALL_LINKS
from bench.training.predict import FIRST, measured_seconds, predict_run
from thinwire.runs.machine.processor import environment
from thinwire.uses.kinds import load_runs
from thinwire.uses.training.pipeline.choosing.pipeline_plan import WORTH, Proposal
from thinwire.uses.training.planning.machines_file import MachinesFile, MachineSpeed, read_machines
from thinwire.uses.training.planning.planner import CANDIDATES, Planner
from thinwire.uses.training.run.options import TrainConfig
from thinwire.uses.training.run.training_job import prepare
from thinwire.uses.training.run.training_launch import launch

KEPT = Kept("plan")
THREADS = 1  # of a rank: a core each
LINKS = {name: ALL_LINKS[name] for name in ("unlimited", "100+50", "10+30", "1.4+30")}
JOBS: dict[str, dict[str, Any]] = {
    "gpt2-lab": {"model": "gpt2-lab", "batch": 8, "steps": 10},
    "smollm2-135m": {"model": "smollm2-135m", "batch": 4, "steps": 5},
}
NOT_RUN = (("smollm2-135m", "100+50"),)  # as good as unlimited to a step of seconds
SLOW = {("1.4+30", "fp32"): 4, ("1.4+30", "bf16"): 5}  # steps where one takes long
SCHEDULE = "eager1f1b"
COMMON = {"seq": 128, "microbatches": 4, "data": "shakespeare", "schedule": SCHEDULE, "threads": THREADS}
QUIET = {"tensorboard": False, "save_model": False, "quiet": True, "eval_samples": 0}
NAMES = ("a", "b")
LIMIT = 900.0  # seconds that a measurement may take
Row = dict[str, Any]


def job(model: str, **more: Any) -> TrainConfig:
    """Return the job of a model, as planned and as run."""
    return TrainConfig(**(JOBS[model] | COMMON | {"epochs": 1} | more))


def measure(cell: tuple[str, ...]) -> Row:
    """Measure a model alone, or one run of it."""
    return run(*cell) if len(cell) > 1 else measured(*cell)


def measured(model: str) -> Row:
    """Return what ``thinwire plan --measure`` prints for each of two machines, measured at once."""
    wanted = {k: v for k, v in (JOBS[model] | COMMON).items() if k not in ("steps", "schedule")}
    options = [word for k, v in wanted.items() for word in (f"--{k}", str(v))]
    command = [sys.executable, "-m", "thinwire", "plan", "--measure", "--json", *options]

    def said(_: str) -> Any:
        done = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", check=True, timeout=LIMIT)
        return json.loads(done.stdout)

    with ThreadPoolExecutor(len(NAMES)) as pool:
        return {"machines": list(pool.map(said, NAMES))}


def run(model: str, link: str, recipe: str) -> Row:
    """Return the seconds of a run's steps, what it sent, and its replay from its own numbers."""
    steps = SLOW.get((link, recipe), JOBS[model]["steps"])
    with tempfile.TemporaryDirectory() as out:
        launch(job(model, recipe=recipe, out=out, emulate=True, link=LINKS[link], steps=steps, **QUIET))
        (found,) = load_runs([out])
        return {
            "seconds": [s.seconds for s in found.metrics],
            "compute_s": [[rank["compute_s"] for rank in s.ranks or ()] for s in found.metrics],
            "bits": found.record.bits_per_value,
            "replayed": predict_run(found),
            "replay_of": measured_seconds(found),
            "lateness_s": found.record.link.lateness_s,
        }


def cells() -> Iterator[tuple[str, ...]]:
    """Yield model, link and recipe of each run, and before them the model alone, which is to be measured."""
    for model in JOBS:
        yield (model,)
        for link in links(model):
            for recipe in CANDIDATES:
                yield model, link, recipe


def links(model: str) -> list[str]:
    """Return the links that a model runs over."""
    return [link for link in LINKS if (model, link) not in NOT_RUN]


def machines(found: Row, link: str, folder: str) -> MachinesFile:
    """Return two measured machines and the line between them, through the file that a user would write."""
    entries = []
    for name, values in zip(NAMES, found["machines"], strict=True):
        entries.append(MachineSpeed(**{k: v for k, v in values.items() if k != "name"}).toml(name))
    between = f'[[link]]\nfrom = "{NAMES[0]}"\nto = "{NAMES[1]}"\nline = "{LINKS[link]}"\n'
    file = Path(folder) / "machines.toml"
    file.write_text("\n".join([*entries, between]), "utf-8")
    return read_machines(file)


def foretold(model: str, found: Row) -> dict[str, list[Proposal]]:
    """Return the plans over each link, the proposed one first."""
    config = job(model)
    planner, cut = Planner(config), tuple(len(part) for part in prepare(config).cut)
    with tempfile.TemporaryDirectory() as folder:
        return {
            link: planner.foretell(machines(found, link, folder), cut, config.schedule)
            for link in links(model)
        }


def row(model: str, link: str, plan: Proposal, cell: Row) -> Row:
    """Return a run beside its plan."""
    steps = cell["seconds"][FIRST:]
    return {
        "model": model,
        "link": link,
        "recipe": plan.recipe,
        "predicted": plan.seconds,
        "measured": median(steps),
        "steps": [min(steps), max(steps)],
        "replayed": cell["replayed"] / cell["replay_of"],
        "bits_foretold": [leg.bits for leg in plan.legs],
        "bits": [cell["bits"][way] for way in ("forward", "backward")],
    }


def choice(rows: list[Row], proposed: str) -> Row:
    """Return whether the recipe that is proposed was as fast as any among a link's runs."""
    seconds = {r["recipe"]: r["measured"] for r in rows}
    fastest = min(seconds, key=lambda name: seconds[name])
    place = {"model": rows[0]["model"], "link": rows[0]["link"], "proposed": proposed, "fastest": fastest}
    behind = seconds[proposed] / seconds[fastest] - 1
    return place | {"behind": behind, "good": behind <= WORTH}


def summary() -> Row:
    """Return all finished runs beside their plans, and the proposals of the links that are finished."""
    rows: list[Row] = []
    choices: list[Row] = []
    known = {model: found for model in JOBS if (found := KEPT.get(model))}
    for model, found in known.items():
        for link, plans in foretold(model, found).items():
            pairs = [(p, KEPT.get(model, link, p.recipe)) for p in plans]
            here = [row(model, link, p, cell) for p, cell in pairs if cell]
            rows += sorted(here, key=lambda r: CANDIDATES.index(r["recipe"]))
            if len(here) == len(CANDIDATES):
                choices.append(choice(here, plans[0].recipe))
    return {
        "environment": environment("auto", THREADS),
        "links": LINKS,
        "jobs": JOBS,
        "measured": known,
        "rows": rows,
        "choices": choices,
        "made_by": makers(kept for cell in cells() if (kept := KEPT.get(cell))),
    }


if __name__ == "__main__":
    run_study("plan", sys.argv[1:], cells, measure, summary, ATTEMPTS)
