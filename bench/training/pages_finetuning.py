"""Tables of what adapters, dropout and packing anew do to a delta."""

from __future__ import annotations

from typing import Any

from bench.study.tables import Rows, tabled

MASKS = {"none": "none", "by sample": "{:g}, by sample", "drawn anew": "{:g}, drawn anew at each visit"}
CHANGED = {"masks": "other dropout masks", "prefix": "another prefix of {} tokens"}


@tabled("trained", "values", "rate", "loss by pass", "delta's share of the energy, second pass", "third")
def adapters(found: Any) -> Rows:
    """What is trained, how fast it learns, and what a later visit has to send."""
    for r in found["adapters"]:
        losses = ", ".join(f"{x:.2f}" for x in r["loss"])
        trained = f"adapters, rank {r['rank']}" if r["rank"] else "all weights"
        values = f"{r['values'] / 1e6:.1f} million"
        rate = f"{r['rate']:.0e}".replace("e-0", "e-")
        yield [trained, values, rate, losses, *(f"{100 * x:.2f} %" for x in r["share"])]


@tabled("dropout", "second pass", "third")
def dropout(found: Any) -> Rows:
    """What dropout makes of a delta."""
    for r in found["dropout"]:
        yield [MASKS[r["masks"]].format(r["rate"]), *map(ranged, r["share"])]


@tabled("changed", "share of the energy, all tokens", "median token", "new sinks, tokens")
def same_weights(found: Any) -> Rows:
    """What destroys a delta even where no weight has changed."""
    half = found["jobs"]["smollm2-135m"]["seq"] // 2

    for r in found["same_weights"]:
        least, largest = (f"{r['sinks'][of]:.0f}" for of in ("least", "largest"))
        sinks = least if least == largest else f"{least} to {largest}"
        yield [CHANGED[r["changed"]].format(half), *(ranged(r[of]) for of in ("all", "median")), sinks]


def ranged(x: dict[str, float]) -> str:
    """Return a share's mean over the seeds, and from where to where they lie."""
    return f"{100 * x['mean']:.1f} % ({100 * x['least']:.1f} to {100 * x['largest']:.1f})"


TABLES = {
    "finetuning-adapters": adapters,
    "finetuning-dropout": dropout,
    "finetuning-disturbed": same_weights,
}
