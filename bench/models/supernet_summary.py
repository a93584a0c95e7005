"""What the cells of ``supernet`` have in common: means and intervals over seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from bench.federated.summary import interval

Found = Mapping[str, Any]  # of a cell
APART = "apart"


class Point(NamedTuple):
    """What cells of several seeds have in common."""

    group: str
    variant: str
    way: str
    kind: str
    bits: float


def summary(found: Iterable[tuple[str, str, Found]]) -> list[dict[str, Any]]:
    """Return a row a group, variant, way, kind of budget and budget, of the cells of all seeds.

    Networks of one width are one variant; their way is ``uniform``, as that of the others' uniform widths.
    """
    points: dict[Point, list[tuple[Found, Found]]] = {}
    for group, variant, cell in found:
        shared = APART if variant.startswith(APART) else variant
        for way, kind, bits, row in _points(cell):
            points.setdefault(Point(group, shared, way, kind, bits), []).append((cell, row))
    return [point._asdict() | _joined(cells) for point, cells in points.items()]


def _points(cell: Found) -> Iterable[tuple[str, str, float, Found]]:
    """Yield way, kind, bits and figures of all that a cell measured."""
    for bits, row in cell["widths"].items():
        yield "uniform", "", float(bits), row
    for served in cell["served"]:
        for way, row in served["ways"].items():
            yield way, served["kind"], served["bits"], row


def _joined(cells: list[tuple[Found, Found]]) -> dict[str, Any]:
    rows = [row for _, row in cells]
    each = {name: [float(row[name]) for row in rows] for name in ("accuracy", "bitops", "nbytes", "packed")}
    return {
        "epochs": cells[0][0]["epochs"],
        "seeds": len(rows),
        **{name: interval(values) for name, values in each.items()},
        "train_cpu_s": interval([cell["train_cpu_s"] for cell, _ in cells]),
    }
