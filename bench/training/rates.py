"""What is behind the trainer's defaults for replicas: ``python -m bench.training.rates NAME [MODEL ...]``.

- ``recipes`` (``make bench-rates``): the learning rate of each recipe, by the same small search for all. The
  rate with the least held-out loss at the end wins; ``REPLICA_RATES`` of the trainer holds the winners. Fixed
  recipes' losses do not depend on the link, so theirs is unlimited. Policies are searched at that of the
  demo, since what they choose depends on it.
- ``delays`` (``make bench-safe-rates``): the largest learning rate that a delay of gradients bears, by
  optimiser. Two replicas send the largest hundredth of each gradient and apply it some steps later. A rate is
  safe where the held-out loss at the end is within ``NEAR`` of the best of its row. ``REPLICA_SAFE`` of the
  trainer has the largest of each row, and a run beyond it is warned.
- ``times`` (``make bench-replica-times``): the time model of late gradients against measured steps. A small
  CNN sends a tenth of each gradient over emulated links. The model gets the compute and coding that the run
  measured, the bytes of its messages, and the link as asked for.
"""

from __future__ import annotations

import sys
from functools import partial
from statistics import median
from typing import Any

from bench.study.cells import RESULTS, Cells, made_by
from bench.study.runs import replicated
from thinwire.links.shape import LinkShape
from thinwire.runs.records.writer import read_json
from thinwire.types import ThinwireError
from thinwire.uses.training.replicas.choosing.time_model import delayed_step
from thinwire.uses.training.run.learning_rates import WARMUP

LINK = "40mbit,50ms"
ADAPTIVE = ("deco", "auto")  # searched last: what they choose depends on how busy the machine is
CNN: dict[str, Any] = {"data": "fashion-mnist", "steps": 120, "batch": 128, "eval_samples": 1024}
TEXT: dict[str, Any] = {"data": "shakespeare", "batch": 8, "seq": 64}
JOBS = {"gpt2-lab": TEXT | {"steps": 60}, "cnn-fashion": CNN | {"optimizer": "sgd"}}
RATES = {"gpt2-lab": (5e-4, 1e-3, 2e-3, 4e-3), "cnn-fashion": (0.1, 0.2, 0.4, 0.8)}
FIXED = {
    **{name: name for name in ("allreduce", "cocktail", "thinwire", "factors", "topk", "dd-ef-sgd")},
    **{name: f"{name}:every=20" for name in ("diloco", "sparseloco", "pulseloco", "streaming")},
    "allreduce-bf16": "allreduce-bf16",
}
RECIPES = FIXED | {name: name for name in ADAPTIVE}
NEAR = 0.1  # of the least loss of a row
# By model and optimiser: the job, its rates, and the delays; momentum under more is refused by the trainer.
ROWS: dict[tuple[str, str], tuple[dict[str, Any], tuple[float, ...], tuple[int, ...]]] = {
    ("cnn-fashion", "sgd"): (CNN, (0.05, 0.1, 0.2, 0.4, 0.8), (0, 1, 2, 4)),
    ("cnn-fashion", "sgd:momentum=0.9"): (CNN, (0.00625, 0.0125, 0.025, 0.05, 0.1), (0, 1)),
    ("gpt2-lab", "adamw"): (TEXT | {"steps": 40}, (2.5e-4, 5e-4, 1e-3, 2e-3), (0, 1, 2, 4)),
}
LINKS, DELAYS, ROUNDS = ("20mbit,30ms", "5mbit,50ms", "100mbit,100ms"), (0, 1, 2, 4), 3
STEPS, FILL = 60, 10  # steps of a timed run, and those at its start that do not count
TIMED = {"model": "cnn-fashion", "data": "fashion-mnist", "optimizer": "sgd", "steps": STEPS, "batch": 128}


def searched(model: str, recipe: str, rate: float) -> dict[str, Any]:
    """Return the losses of one run."""
    link = LINK if recipe in ADAPTIVE else "none"
    record, _ = replicated(RECIPES[recipe], link, JOBS[model] | {"model": model, "lr": rate})
    loss = record.loss
    return {"final": loss.eval_final, "accuracy": loss.accuracy_final, "seconds": record.totals["seconds"]}


def recipes(models: list[str]) -> None:
    """Search the rates of all recipes; those of models that are not asked for stay."""
    file, models = RESULTS / "replica_rates.json", models or list(JOBS)
    cells = Cells(file, {"jobs": JOBS, "recipes": RECIPES, "warmup": WARMUP})
    rows = [row for row in read_json(file)["rows"] if row["model"] not in models]
    for model in models:
        for recipe in RECIPES:
            for rate in RATES[model]:
                found = cells.of(f"{model} {recipe} {rate}", partial(searched, model, recipe, rate))
                rows.append({"model": model, "recipe": recipe, "rate": rate, **found})
                print(rows[-1], flush=True)
    cells.finish({"rows": rows, "made": made_by()})


def delayed(model: str, optimizer: str, late: int, rate: float) -> float | None:
    """Return the held-out loss at the end; None for a run whose numbers ran away."""
    options = ROWS[model, optimizer][0] | {"model": model, "optimizer": optimizer, "lr": rate}
    try:
        record, _ = replicated(f"dd-ef-sgd:ratio=0.01,staleness={late}", "none", options)
    except ThinwireError as e:
        if any(words in str(e) for words in ("not finite", "is nan", "is inf")):
            return None
        raise
    return record.loss.eval_final


def safe(losses: dict[float, float | None]) -> float | None:
    """Return the largest rate whose loss is near the least one, and above which no smaller one failed.

    >>> safe({0.1: 1.0, 0.2: 1.05, 0.4: 2.3, 0.8: None})
    0.2
    """
    known = {rate: loss for rate, loss in losses.items() if loss is not None}
    least = min(known.values(), default=0.0)
    return max((rate for rate, loss in known.items() if loss <= (1 + NEAR) * least), default=None)


def delays() -> None:
    """Find the largest safe rate of each optimiser and delay."""
    cells, rows = Cells(RESULTS / "delays.json", {"rows": [[*key, *row] for key, row in ROWS.items()]}), []
    for (model, optimizer), (_, rates, every) in ROWS.items():
        for late in every:
            name, work = f"{model} {optimizer} {late}", partial(delayed, model, optimizer, late)
            losses = {rate: cells.of(f"{name} {rate}", partial(work, rate)) for rate in rates}
            told = {"losses": [[rate, loss] for rate, loss in losses.items()], "safe": safe(losses)}
            rows.append({"model": model, "optimizer": optimizer, "staleness": late} | told)
            print(rows[-1], flush=True)
    cells.finish({"near": NEAR, "rows": rows, "made": made_by()})


def stepped(link: str, late: int) -> dict[str, float]:
    """Return seconds of a step, as measured and as the model has them."""
    recipe = f"dd-ef-sgd:ratio=0.1,staleness={late}"
    record, steps = replicated(recipe, link, TIMED | {"emulate": True, "eval_samples": 0})
    later, shape = steps[FILL:], LinkShape.parse(link)
    waits, seconds = (sum(getattr(s, name) for s in later) / len(later) for name in ("wait_s", "seconds"))
    nbytes = record.bytes["exchange"] / 2 / STEPS
    model = delayed_step(seconds - waits, nbytes / (shape.rate or 1e12), shape.delay, late)
    return {"measured": seconds, "predicted": model, "busy": seconds - waits, "bytes": nbytes}


def times() -> None:
    """Hold the time model against measured steps."""
    cells, rows = Cells(RESULTS / "times.json", {"job": TIMED}), []
    for link in LINKS:
        for late in DELAYS:
            work = partial(stepped, link, late)
            found: list[dict[str, Any]] = [cells.of(f"{link} {late} {k}", work) for k in range(ROUNDS)]
            errors = [one["predicted"] / one["measured"] - 1 for one in found]
            middle = sorted(found, key=lambda one: one["measured"])[ROUNDS // 2]
            rows.append({"link": link, "staleness": late, **middle, "error": median(errors)})
            print(rows[-1], flush=True)
    cells.finish({"rows": rows, "made": made_by()})


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["recipes", *models]:
            recipes(models)
        case ["delays"]:
            delays()
        case ["times"]:
            times()
        case _:
            raise SystemExit("say which: recipes [MODEL ...], delays or times")
