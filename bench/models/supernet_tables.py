"""Tables of one-shot mixed precision: accuracy against bit operations and bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from bench.models.supernet import APART, BUDGETS, ONESHOT
from bench.study.tables import Rows, tabled

Row = dict[str, Any]
LABELS = {
    "both": "one-shot",
    "no-scheduler": "without scheduler",
    "no-mitigation": "without mitigation",
    "neither": "with neither",
    APART: "trained apart",
}


def _accuracy(row: Row | None) -> str:
    if row is None:
        return "–"
    mean, *half = row["accuracy"]
    return f"{mean:.1%}" + (f" ± {100 * half[0]:.1f}" if half else "")


def budgets(kind: str, found: Any) -> str:
    """Accuracy at each budget: of searches, allocations, uniform widths."""
    rows = [r for r in found["rows"] if r["group"] == _group(found)]
    of = {(r["variant"], r["way"], r["kind"], r["bits"]): r for r in rows}
    head = [f"{bits:g} bits" for bits in BUDGETS]

    @tabled("training", "bits chosen by", *head)
    def drawn() -> Rows:
        for variant in ONESHOT:
            for way in ("search", "programme", "slope"):
                own = [of.get((variant, way, kind, bits)) for bits in BUDGETS]
                if any(own):
                    yield [LABELS[variant], way, *map(_accuracy, own)]
        for variant in ("both", APART):
            own = [of.get((variant, "uniform", "", bits)) for bits in BUDGETS]
            if any(own):
                yield [LABELS[variant], "one width for all", *map(_accuracy, own)]

    return drawn()


@tabled("training", "epochs", "seeds", *(f"{bits} bits" for bits in (2, 3, 4, 5, 6)), "CPU-s to train")
def widths(found: Any) -> Rows:
    """Accuracy of uniform widths of one network, and of networks trained apart."""
    rows = [r for r in found["rows"] if r["group"] == _group(found) and r["way"] == "uniform"]
    for variant, label in LABELS.items():
        own = {r["bits"]: r for r in rows if r["variant"] == variant}
        if own:
            some = next(iter(own.values()))
            parts = own.values() if variant == APART else [some]
            seconds = sum(r["train_cpu_s"][0] for r in parts)
            shown = [_accuracy(own.get(bits)) for bits in (2, 3, 4, 5, 6)]
            yield [label, str(some["epochs"]), str(some["seeds"]), *shown, f"{seconds:,.0f}"]


def _group(found: Any) -> str:
    """Return ``full`` where one network for all widths and those apart have run on one seed at least."""
    there = {r["variant"] for r in found["rows"] if r["group"] == "full"}
    return "full" if there >= {"both", APART} else "short"


TABLES: dict[str, Callable[[Any], str]] = {
    "supernet-widths": widths,
    "supernet-bitops": partial(budgets, "bitops"),
    "supernet-nbytes": partial(budgets, "nbytes"),
}
