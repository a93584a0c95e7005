"""Figures of packed scenes: how good the picture is as bytes and seconds pass, beside other forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from thinwire.runs.records.finished_runs import Run
from thinwire.runs.report.elements import card, dot, grid, legend
from thinwire.runs.report.plotting import SERIES, WIDTH, labelled, new_axes, series_colour, series_order
from thinwire.uses.scenes.run.record import LayerInfo, Rival, SceneRecord

BEST = 60.0  # dB at which an equal picture is drawn
ROOM = 3.0  # dB under the worst picture
Runs = Sequence[Run[SceneRecord]]
Points = list[tuple[float, float]]  # where, and dB


class Line(NamedTuple):
    """What one form shows as more of it comes."""

    label: str
    number: int  # of its colour
    points: Points


def curves(runs: Runs) -> list[str]:
    """Return the legend and the cards of PSNR over bytes and, where a link is known, over seconds."""
    by_bytes = _lines(
        runs, lambda record: [n / 1e3 for n in so_far(record)], lambda rival: rival.nbytes / 1e3
    )
    by_seconds = _lines(runs, lambda record: [seconds_of(x) for x in record.layers], seconds_of)
    measured = any(layer.seconds_measured is not None for run in runs for layer in run.record.layers)
    text = "Nothing is seen to the left of a line's first point."
    found = []
    if by_seconds:
        kind = "measured at the receiver, until decoded" if measured else "predicted for the link"
        found.append(_figure("PSNR over seconds", text, by_seconds, f"seconds, {kind}"))
    found.append(_figure("PSNR over bytes", text, by_bytes, "kilobytes", alone=not found))
    return [legend([(dot(f"--s{x.number}"), x.label) for x in by_bytes]), grid(found)] if by_bytes else []


def _lines(
    runs: Runs,
    layers: Callable[[SceneRecord], list[float | None]],
    rival: Callable[[Rival], float | None],
) -> list[Line]:
    """Return a line a run, and one for each other form of the first run's scene; those without points go."""
    numbers = series_order(runs)
    found = [
        Line(run.label, number % SERIES, _points(layers(run.record), [x.psnr_db for x in run.record.layers]))
        for run, number in zip(runs, numbers, strict=True)
    ]
    free = max([1, *numbers]) + 1
    for i, other in enumerate(runs[0].record.rivals):
        points = _points([rival(other)], [other.psnr_db])
        found.append(Line(other.name.upper(), (free + i) % SERIES, points))
    return [line for line in found if line.points]


def _points(at: Sequence[float | None], decibels: Sequence[float | None]) -> Points:
    pairs = zip(at, decibels, strict=True)
    return [(x, BEST if y is None else y) for x, y in pairs if x is not None]


def seconds_of(piece: LayerInfo | Rival) -> float | None:
    """Return when a piece is there: as measured, else as predicted."""
    return piece.seconds_predicted if piece.seconds_measured is None else piece.seconds_measured


def so_far(record: SceneRecord) -> list[int]:
    """Return the bytes of the file after each layer, header included."""
    sent, found = record.packed_nbytes - sum(layer.nbytes for layer in record.layers), list[int]()
    for layer in record.layers:
        sent += layer.nbytes
        found.append(sent)
    return found


def _figure(title: str, text: str, lines: Sequence[Line], label: str, alone: bool = False) -> str:
    axes = new_axes(WIDTH * 2 if alone else WIDTH, 3.3)
    low = min(y for line in lines for _, y in line.points) - ROOM
    end = 1.08 * max(x for line in lines for x, _ in line.points)
    for line in lines:
        x, y = [p[0] for p in line.points], [p[1] for p in line.points]
        look: dict[str, Any] = {
            "color": series_colour(line.number),
            "linewidth": 2.2 if line.number == 1 else 1.8,
        }
        axes.plot([x[0], *x, end], [low, *y, y[-1]], drawstyle="steps-post", **look)
        axes.plot(x, y, linestyle="", marker="o", markersize=4, color=look["color"])
    axes.set_xlim(0, end)
    axes.set_ylim(bottom=low)
    name, told = "scenes-" + title.lower().replace(" ", "-"), f"{title}, a step for each layer"
    return card(title, text, labelled(axes, name, told, label, "PSNR to the source, dB"))
