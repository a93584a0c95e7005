"""The largest learning rate that a delay of gradients bears, by optimiser: ``make bench-safe-rates``.

Two replicas send the largest hundredth of each gradient and apply it some steps later. A rate is safe where
the held-out loss at the end is within ``NEAR`` of the best of its row. ``REPLICA_SAFE`` of the trainer has
the largest of each row, and a run beyond it is warned.
"""

from __future__ import annotations

from typing import Any

from bench.study.cells import RESULTS, Cells, made_by
from bench.study.runs import trained
from thinwire.types import ThinwireError

RESULT = RESULTS / "delays.json"
NEAR = 0.1  # of the least loss of a row
CNN = {"data": "fashion-mnist", "steps": 120, "batch": 128, "eval_samples": 1024}
TEXT = {"data": "shakespeare", "steps": 40, "batch": 8, "seq": 64}
# By model and optimiser: the job, its rates, and the delays; momentum under more is refused by the trainer.
ROWS: dict[tuple[str, str], tuple[dict[str, Any], tuple[float, ...], tuple[int, ...]]] = {
    ("cnn-fashion", "sgd"): (CNN, (0.05, 0.1, 0.2, 0.4, 0.8), (0, 1, 2, 4)),
    ("cnn-fashion", "sgd:momentum=0.9"): (CNN, (0.00625, 0.0125, 0.025, 0.05, 0.1), (0, 1)),
    ("gpt2-lab", "adamw"): (TEXT, (2.5e-4, 5e-4, 1e-3, 2e-3), (0, 1, 2, 4)),
}


def measure(model: str, optimizer: str, late: int, rate: float) -> float | None:
    """Return the held-out loss at the end; None for a run whose numbers ran away."""
    options = ROWS[model, optimizer][0] | {"model": model, "optimizer": optimizer, "lr": rate, "replicas": 2}
    options |= {"replica_recipe": f"dd-ef-sgd:ratio=0.01,staleness={late}", "link": "none"}
    try:
        record, _ = trained(options | {"save_model": False, "tensorboard": False})
    except ThinwireError as e:
        if "not finite" in str(e) or "is nan" in str(e) or "is inf" in str(e):
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


def main() -> None:
    cells, rows = Cells(RESULT, {"rows": [[*key, *row] for key, row in ROWS.items()]}), []
    for (model, optimizer), (_, rates, delays) in ROWS.items():
        for late in delays:
            losses = {
                rate: cells.of(
                    f"{model} {optimizer} {late} {rate}",
                    lambda m=model, o=optimizer, s=late, r=rate: measure(m, o, s, r),
                )
                for rate in rates
            }
            rows.append(
                {
                    "model": model,
                    "optimizer": optimizer,
                    "staleness": late,
                    "losses": [[rate, loss] for rate, loss in losses.items()],
                    "safe": safe(losses),
                }
            )
            print(rows[-1], flush=True)
    cells.finish({"near": NEAR, "rows": rows, "made": made_by()})


if __name__ == "__main__":
    main()
