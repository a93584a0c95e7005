"""What the runs of ``methods`` have in common: the best step size, means and intervals over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

Found = Mapping[str, Any]  # of a cell
# Student's t that leaves out 2.5 % at each end, for so many values.
QUANTILES = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 16: 2.131}


def best_rate(found: Mapping[float, Found]) -> float:
    """Return the step size that was soonest at the target; of equal ones, the most accurate.

    >>> accuracy = {"best": 0.7}
    >>> late, soon = ({"target": target, "accuracy": accuracy} for target in (None, {"virtual_s": 9.0}))
    >>> best_rate({0.1: late, 0.2: soon})
    0.2
    """

    def late(rate: float) -> tuple[float, float]:
        cell = found[rate]
        target = cell["target"]
        return target["virtual_s"] if target else math.inf, -(cell["accuracy"]["best"] or 0.0)

    return min(found, key=late)


def interval(values: Sequence[float]) -> list[float]:
    """Return the mean, and how far the 95 % interval by Student's t goes to either side; of one, the mean.

    >>> [round(x, 3) for x in interval([1.0, 2.0, 3.0])]
    [2.0, 2.484]
    """
    many = len(values)
    if many < 2:
        return [fmean(values)]
    return [fmean(values), QUANTILES[many] * stdev(values) / math.sqrt(many)]


def summary(found: Iterable[tuple[str, str, Found]]) -> list[dict[str, Any]]:
    """Return a row for each group and method, of which each seed's cell is given."""
    rows: dict[tuple[str, str], list[Found]] = {}
    for group, method, cell in found:
        rows.setdefault((group, method), []).append(cell)
    return [{"group": g, "method": m, **joined(cells)} for (g, m), cells in rows.items()]


def joined(cells: Sequence[Found]) -> dict[str, Any]:
    """Return what a method's runs come to.

    ``until``: means to the target where all runs came to it, else to the end: then bounds from below.
    """
    targets = [cell["target"] for cell in cells]
    whole = [cell["bytes"] | {"virtual_s": cell["totals"]["virtual_s"]} for cell in cells]
    until = [t or end for t, end in zip(targets, whole, strict=True)]
    each = {name: [float(u[name]) for u in until] for name in ("virtual_s", "up", "down")}
    each["bytes"] = [up + down for up, down in zip(each["up"], each["down"], strict=True)]
    sent = [cell["bytes"] for cell in cells]
    return {
        "seeds": len(cells),
        "rate": cells[0]["rate"],
        "reached": sum(t is not None for t in targets),
        "diverged": sum(cell["diverged"] is not None for cell in cells),
        "until": {name: interval(values) for name, values in each.items()},
        "best": interval([cell["accuracy"]["best"] or 0.0 for cell in cells]),
        "final": interval([cell["accuracy"]["final"] or 0.0 for cell in cells]),
        "up_share": interval([b["up"] / b["raw_up"] if b["raw_up"] else 0.0 for b in sent]),
        "versions": interval([float(cell["totals"]["rounds"]) for cell in cells]),
        "local_steps": interval([float(cell["totals"]["local_steps"]) for cell in cells]),
        "density": densities(cells),
    }


def densities(cells: Sequence[Found]) -> list[list[float]]:
    """Return the mean share of the values, as bytes, that updates sent, by version."""
    by_version: dict[int, list[float]] = {}
    for cell in cells:
        for point in cell["accuracy"]["curve"]:
            if point["density"] is not None:
                by_version.setdefault(point["version"], []).append(point["density"])
    kept = sorted(by_version.items())
    every = math.ceil(len(kept) / 10) or 1
    return [[version, fmean(values)] for version, values in kept[::every]]
