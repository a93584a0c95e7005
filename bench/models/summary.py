"""What the cells of ``packed`` say together: perplexities, and bytes at one perplexity."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from bench.federated.summary import interval
from bench.models.ways import OURS, SOURCE

Found = tuple[str, float, dict[str, Any]]


def summary(found: Sequence[Found]) -> dict[str, Any]:
    """Return a row for each way and budget, in the order of the cells."""
    ours = {bits: cell for way, bits, cell in found if way == OURS}
    curve = sorted((statistics.fmean(cell["losses"]), cell["nbytes"]) for cell in ours.values())
    return {"rows": [_row(way, bits, cell, ours.get(bits), curve) for way, bits, cell in found]}


def _row(
    way: str, bits: float, cell: dict[str, Any], ours: dict[str, Any] | None, curve: list[tuple[float, int]]
) -> dict[str, Any]:
    row = {"way": way, "asked": bits, "nbytes": cell["nbytes"], "bits": cell["bits"]}
    row["perplexity"] = exponential(cell["losses"])
    if ours is not None and way not in (OURS, SOURCE):
        apart = [a - b for a, b in zip(cell["losses"], ours["losses"], strict=True)]
        row["over_ours"] = exponential(apart)
        loss, (worst, fewest) = statistics.fmean(cell["losses"]), curve[-1]
        # Where even our smallest file tells the text better, it is a bound.
        same = fewest if loss > worst else nbytes_at(loss, curve)
        row["ours_saves"] = None if same is None else 1 - same / cell["nbytes"]
        row["at_least"] = loss > worst
    return row


def exponential(losses: Sequence[float]) -> list[float]:
    """Return the exponential of a mean, and from where to where it lies with 95 %, by window.

    >>> [round(x, 3) for x in exponential([1.0] * 8 + [1.2] * 8)]
    [3.004, 2.843, 3.174]
    """
    mean, half = interval(losses)
    return [math.exp(min(x, 700.0)) for x in (mean, mean - half, mean + half)]


def nbytes_at(loss: float, curve: Sequence[tuple[float, int]]) -> float | None:
    """Return the bytes that a curve of (loss, bytes) takes at a loss, between its points; None beyond them.

    >>> nbytes_at(1.5, [(1.0, 400), (2.0, 300)])
    350.0
    """
    for (low, more), (high, fewer) in pairwise(curve):
        if low <= loss <= high:
            return more + (fewer - more) * (loss - low) / (high - low)
    return None
