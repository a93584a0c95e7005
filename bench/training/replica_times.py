"""The time model of late gradients against measured steps: ``make bench-replica-times``.

A small CNN on two replicas sends a tenth of each gradient over emulated links. The model gets the compute and
coding that the run measured, the bytes of its messages, and the link as asked for.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from bench.study.cells import RESULTS, Cells, made_by
from bench.study.runs import trained
from thinwire.links.shape import LinkShape
from thinwire.uses.training.replicas.choosing.time_model import delayed_step

RESULT = RESULTS / "times.json"
LINKS = ("20mbit,30ms", "5mbit,50ms", "100mbit,100ms")
DELAYS = (0, 1, 2, 4)
ROUNDS = 3
STEPS, FILL = 60, 10  # steps of a run, and those at its start that do not count
JOB = {"model": "cnn-fashion", "data": "fashion-mnist", "optimizer": "sgd", "steps": STEPS, "batch": 128}


def measure(link: str, late: int) -> dict[str, float]:
    """Return seconds of a step, as measured and as the model has them."""
    options = JOB | {"replicas": 2, "replica_recipe": f"dd-ef-sgd:ratio=0.1,staleness={late}", "link": link}
    options |= {"emulate": True, "eval_samples": 0, "save_model": False, "tensorboard": False}
    record, steps = trained(options)
    later, shape = steps[FILL:], LinkShape.parse(link)
    waits, seconds = (sum(getattr(s, name) for s in later) / len(later) for name in ("wait_s", "seconds"))
    nbytes = record.bytes["exchange"] / 2 / STEPS
    model = delayed_step(seconds - waits, nbytes / (shape.rate or 1e12), shape.delay, late)
    return {"measured": seconds, "predicted": model, "busy": seconds - waits, "bytes": nbytes}


def main() -> None:
    cells, rows = Cells(RESULT, {"job": JOB}), []
    for link in LINKS:
        for late in DELAYS:
            found: list[dict[str, Any]] = [
                cells.of(f"{link} {late} {k}", lambda x=link, s=late: measure(x, s)) for k in range(ROUNDS)
            ]
            errors = [one["predicted"] / one["measured"] - 1 for one in found]
            middle = sorted(found, key=lambda one: one["measured"])[ROUNDS // 2]
            rows.append({"link": link, "staleness": late, **middle, "error": median(errors)})
            print(rows[-1], flush=True)
    cells.finish({"rows": rows, "made": made_by()})


if __name__ == "__main__":
    main()
