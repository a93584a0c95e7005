"""The counts of a run that was killed: from the steps it booked, since its record is of some time before."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.lab.records.schema import RunRecord, StepMetrics


def recount(record: RunRecord, steps: Sequence[StepMetrics]) -> None:
    """Set steps, tokens, seconds, training losses and the bytes of both directions to those of ``steps``."""
    if not steps:
        return
    totals, last = record.totals, steps[-1].step
    totals.steps, totals.seconds = last, sum(m.seconds for m in steps)
    totals.tokens = last * int(record.config["batch"]) * int(record.config["seq"])
    record.loss.train = [m.loss for m in steps]
    for way in ("forward", "backward"):
        sent = sum(getattr(m, f"bytes_{way}") for m in steps)
        values = sum(_values(m, way) for m in steps)
        setattr(record.bytes, way, sent)
        setattr(record.bytes, f"raw_{way}", 4 * values)
        setattr(record.bits_per_value, way, 8 * sent / values if values else None)


def _values(step: StepMetrics, way: str) -> int:
    """Return how many values a step sent one way; its line has their bytes, and the bits of each."""
    bits = getattr(step, f"bits_{way}")
    return round(8 * getattr(step, f"bytes_{way}") / bits) if bits else 0
