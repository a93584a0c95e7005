"""The page of packed scenes: pictures side by side, what came when, and what each stream took."""

from __future__ import annotations

import html
from base64 import b64encode
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.runs.records.finished_runs import Run, over
from thinwire.runs.records.progress import decibels, megabytes
from thinwire.runs.report.details import Rows
from thinwire.runs.report.elements import card, dot, grid, legend, memory, table, terminal_table
from thinwire.runs.report.plotting import SERIES, WIDTH, labelled, new_axes, series_colour, series_order
from thinwire.uses.scenes.run.record import LayerInfo, Picture, Rival, SceneRecord

SceneRun = Run[SceneRecord]
Runs = Sequence[SceneRun]
COLUMNS = ("packed by", "bytes", "× smaller than the source", "PSNR", "SSIM", "packing", "unpacking")
LAYERS = (
    "layer",
    "splats",
    "bytes",
    "bytes so far",
    "share",
    "seconds, predicted",
    "seconds, measured",
    "PSNR",
)
ODD = {
    "dropped": "dropped: they hold a NaN or a wrong infinity",
    "far": "dropped: they are a million times as far out as the others",
    "endless": "of infinite opacity, kept",
    "flat": "with a scale of zero, kept",
    "turnless": "with a rotation of zero, taken for none",
}
STYLE = "display:block;width:100%;border-radius:4px;margin-bottom:6px"
GRID = (
    "display:grid;gap:18px;font-size:14px;grid-template-columns:repeat(auto-fit,minmax(min(100%,280px),1fr))"
)


def headline(runs: Runs) -> str:
    """Return what was seen when, or what became of the bytes, beside SPZ, good or bad."""
    if len(runs) > 1:
        least = min(runs, key=lambda run: run.record.packed_nbytes)
        found = f"the smallest, by {least.label}, has {_size_and_quality(least.record)}"
        return f"{len(runs)} packed scenes; {found}"
    record = runs[0].record
    spz = next((r for r in record.rivals if r.name == "spz"), None)
    seconds = [seconds_of(layer) for layer in record.layers]
    first, last = (seconds[0], seconds[-1]) if seconds else (None, None)
    if first is None or last is None:
        beside = f"; SPZ takes {megabytes(spz.nbytes)} at {decibels(spz.psnr_db)}" if spz else ""
        return f"{record.splats:,} splats in {_size_and_quality(record)}{beside}"
    shown = f"A first picture after {first:.2f} s, all {record.splats:,} splats after {last:.2f} s"
    shown += f" at {decibels(record.psnr_db)}"
    theirs = seconds_of(spz) if spz else None
    if spz is None or theirs is None:
        return shown
    return f"{shown}; SPZ shows nothing for {theirs:.2f} s, then {decibels(spz.psnr_db)}"


def setting(runs: Runs) -> str:
    """Return what was packed, over which link, and what PSNR is against."""
    record = runs[0].record
    sent = f", over {over([run.record for run in runs])}" if record.link.asked != "none" else ""
    credit = f" {record.credit}." if record.credit else ""
    return (
        f"{Path(record.source).name}: {record.splats:,} splats with {record.bands} bands of harmonics, "
        f"{megabytes(record.source_nbytes)}{sent}.{credit} PSNR and SSIM are against the source's own "
        f"pictures by {_cameras(record)}, and of the worse where there are several kinds; "
        "there are no photographs."
    )


def _cameras(record: SceneRecord) -> str:
    """Return from where a scene was looked at."""
    told = [f"{view.reported} cameras {view.name}" for view in record.views]
    return " and ".join(told or ["4 cameras around the scene"]) + ", beside those that say what matters"


def warnings(runs: Runs) -> list[str]:
    """Return what no record's notes say: splats that went, and those that nothing is claimed of."""
    gone = [
        f"{run.label}: {run.record.odd[kind]} splats were {ODD[kind]}."
        for run in runs
        for kind in ("dropped", "far")
        if run.record.odd.get(kind)
    ]
    return gone + [f"{run.label}: {unseen(run.record)}." for run in runs if run.record.unseen]


def unseen(record: SceneRecord) -> str:
    """Return how many splats no camera saw.

    >>> from thinwire.runs.records.run_record import RecipeText
    >>> unseen(SceneRecord(RecipeText("thinwire"), splats=10, unseen=1))
    '1 of 10 splats (10.0%) are seen by none of the 0 cameras, and nothing is claimed of them'
    """
    share, cameras = record.unseen / max(1, record.splats), sum(view.chosen for view in record.views)
    said = f"{record.unseen:,} of {record.splats:,} splats ({share:.1%})"
    return f"{said} are seen by none of the {cameras} cameras, and nothing is claimed of them"


def story(record: SceneRecord) -> list[str]:
    """Return what was seen when, a line a layer and a rival."""
    bytes_so_far, many = so_far(record), len(record.layers)
    lines = [
        f"layer {i} of {many}: seen after {_seconds(seconds_of(layer))}, {megabytes(sent)} so far, "
        f"{layer.splats:,} splats, {decibels(layer.psnr_db)}"
        for i, (layer, sent) in enumerate(zip(record.layers, bytes_so_far, strict=True), 1)
    ]
    for rival in record.rivals:
        when = f"nothing for {_seconds(seconds_of(rival))}, then {decibels(rival.psnr_db)}"
        lines.append(f"{rival.name.upper()}, {megabytes(rival.nbytes)}: {when}")
    return lines


def folds(runs: Runs) -> dict[str, Rows]:
    """Return odd splats, and what each run was asked for."""
    odd = [
        (
            run.label,
            ", ".join(f"{n} {ODD.get(kind, kind)}" for kind, n in run.record.odd.items() if n) or "none",
        )
        for run in runs
    ]
    seen = [
        (
            f"{run.label}, {view.name}" if len(runs) > 1 else view.name,
            f"{decibels(view.psnr_db)}, SSIM {view.ssim or 0:.4f}, by {view.reported} cameras; "
            f"{view.chosen} others say what matters",
        )
        for run in runs
        for view in run.record.views
    ]
    target = [(run.label, _target(run.record)) for run in runs]
    return {"Odd splats": odd, "Cameras": seen, "Target": target}


def cards(runs: Runs) -> list[str]:
    """Return the cards, in order."""
    text = (
        "Packing and unpacking are processor seconds; packing has the pictures that say what matters in it."
    )
    return [
        *curves(runs),
        *(_pictures(run, label) for run, label in zip(runs, _of(runs), strict=True)),
        card("The figures", text, table(COLUMNS, _rows(runs))),
        *(card(f"Layers{label}", _about_layers(run.record), table(LAYERS, _layers(run.record)))
          for run, label in zip(runs, _of(runs), strict=True)),
        card("Bytes by stream", "All layers together.", _streams(runs)),
        memory(runs),
    ]  # fmt: skip


def _size_and_quality(record: SceneRecord) -> str:
    return f"{megabytes(record.packed_nbytes)} at {decibels(record.psnr_db)}"


def _target(record: SceneRecord) -> str:
    if record.target_db is not None:
        return f"{record.target_db:g} dB"
    return f"{record.target_nbytes:,} bytes at most" if record.target_nbytes else "the recipe's own"


def _of(runs: Runs) -> list[str]:
    """Return what is put behind a title to say of which run it is; nothing where there is one."""
    return [f" of {run.label}" if len(runs) > 1 else "" for run in runs]


def _pictures(run: SceneRun, of: str) -> str:
    """Return the cards of a run's pictures and of their differences from the source's; none where none."""
    record = run.record
    if not record.pictures:
        return ""
    shown = [_figure(run, p.file, _title(p), _words(record, p)) for p in record.pictures]
    off = [_figure(run, p.difference, _title(p), _words(record, p)) for p in record.pictures if p.difference]
    text = f"Amplified {record.stronger:g} times: black where there is none."
    return card(f"Pictures{of}", "All by the same cameras.", _side_by_side(shown)) + card(
        f"Differences from the source{of}", text, _side_by_side(off)
    )


def _title(picture: Picture) -> str:
    return picture.name.upper() if picture.name == "spz" else picture.name.capitalize()


def _side_by_side(figures: Sequence[str]) -> str:
    return f'<div style="{GRID}">{"".join(figures)}</div>'


def _figure(run: SceneRun, file: str, title: str, words: str) -> str:
    told = f"<figcaption><b>{html.escape(title)}.</b> {html.escape(words)}</figcaption>"
    return f'<figure style="margin:0">{_image(run, file, title)}{told}</figure>'


def _words(record: SceneRecord, picture: Picture) -> str:
    """Return what a picture took, when it is there, and how near it is."""
    if picture.name == "source":
        return f"{record.splats:,} splats, {megabytes(record.source_nbytes)}."
    rival = next((r for r in record.rivals if r.name == picture.name), None)
    if rival is not None:
        return f"{megabytes(rival.nbytes)}{_when(rival)}, {decibels(rival.psnr_db)}. Nothing before."
    index = int(picture.name.rpartition(" ")[2]) - 1 if picture.name.startswith("layer ") else 0
    if not 0 <= index < len(record.layers):
        return ""
    layer, sent = record.layers[index], so_far(record)[index]
    return f"{layer.splats:,} splats, {megabytes(sent)}{_when(layer)}, {decibels(layer.psnr_db)}."


def _when(piece: LayerInfo | Rival) -> str:
    if piece.seconds_measured is not None:
        return f", seen after {piece.seconds_measured:.2f} s"
    return "" if piece.seconds_predicted is None else f", expected after {piece.seconds_predicted:.2f} s"


def _image(run: SceneRun, file: str, about: str) -> str:
    """Return a picture of the run's folder as part of the page."""
    try:
        data = (run.folder / file).read_bytes() if run.folder else b""
    except OSError:
        data = b""
    if not data:
        return f"<p>{html.escape(file)} is not beside the record.</p>"
    source = f"data:image/png;base64,{b64encode(data).decode('ascii')}"
    return f'<img style="{STYLE}" alt="{html.escape(about)}" src="{source}">'


def _about_layers(record: SceneRecord) -> str:
    asked = record.link.asked
    over_link = (
        f" Seconds are over {asked}, and until it is decoded where measured." if asked != "none" else ""
    )
    return f"What a receiver sees once a layer is there; bytes so far have the header.{over_link}"


def _layers(record: SceneRecord) -> list[list[str]]:
    return [
        [
            str(i),
            f"{layer.splats:,}",
            f"{layer.nbytes:,}",
            f"{sent:,}",
            f"{sent / max(1, record.packed_nbytes):.1%}",
            _seconds(layer.seconds_predicted),
            _seconds(layer.seconds_measured),
            decibels(layer.psnr_db),
        ]
        for i, (layer, sent) in enumerate(zip(record.layers, so_far(record), strict=True), 1)
    ]


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s"


def _rows(runs: Runs) -> list[list[str]]:
    """Return a row a run, and one for each other form of the first run's scene."""
    rows = []
    for run in runs:
        r = run.record
        ssim = "–" if r.ssim is None else f"{r.ssim:.4f}"
        rows.append(
            [run.label, f"{r.packed_nbytes:,}", _smaller(r, r.packed_nbytes), decibels(r.psnr_db), ssim,
             _seconds(r.encode_cpu_s), _seconds(r.decode_cpu_s)]
        )  # fmt: skip
    first = runs[0].record
    for rival in first.rivals:
        name, smaller = rival.name.upper(), _smaller(first, rival.nbytes)
        rows.append([name, f"{rival.nbytes:,}", smaller, decibels(rival.psnr_db), "–", "–", "–"])
    return rows


def _smaller(record: SceneRecord, nbytes: int) -> str:
    return f"{record.source_nbytes / nbytes:.2f}" if nbytes else "–"


def _streams(runs: Runs) -> str:
    names = list(dict.fromkeys(name for run in runs for name in run.record.streams))
    head = [
        "stream",
        *(f"{run.label}: {what}" for run in runs for what in ("bytes", "share", "bits a splat")),
    ]
    rows = []
    for name in names:
        row = [name.replace("_", " ")]
        for run in runs:
            r, nbytes = run.record, run.record.streams.get(name, 0)
            row += [
                f"{nbytes:,}",
                f"{nbytes / max(1, r.packed_nbytes):.1%}",
                f"{8 * nbytes / max(1, r.splats):.2f}",
            ]
        rows.append(row)
    return table(head, rows)


def summary_table(runs: Runs) -> Any:
    """Return the figures for a terminal."""
    return terminal_table(COLUMNS, _rows(runs))


BEST = 60.0  # dB at which an equal picture is drawn
ROOM = 3.0  # dB under the worst picture
Points = list[tuple[float, float]]  # where, and dB


class QualityCurve(NamedTuple):
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
        found.append(_curve_figure("PSNR over seconds", text, by_seconds, f"seconds, {kind}"))
    found.append(_curve_figure("PSNR over bytes", text, by_bytes, "kilobytes", alone=not found))
    return [legend([(dot(f"--s{x.number}"), x.label) for x in by_bytes]), grid(found)] if by_bytes else []


def _lines(
    runs: Runs,
    layers: Callable[[SceneRecord], list[float | None]],
    rival: Callable[[Rival], float | None],
) -> list[QualityCurve]:
    """Return a line a run, and one for each other form of the first run's scene; those without points go."""
    numbers = series_order(runs)
    found = [
        QualityCurve(
            run.label, number % SERIES, _points(layers(run.record), [x.psnr_db for x in run.record.layers])
        )
        for run, number in zip(runs, numbers, strict=True)
    ]
    free = max([1, *numbers]) + 1
    for i, other in enumerate(runs[0].record.rivals):
        points = _points([rival(other)], [other.psnr_db])
        found.append(QualityCurve(other.name.upper(), (free + i) % SERIES, points))
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


def _curve_figure(
    title: str, text: str, lines: Sequence[QualityCurve], label: str, alone: bool = False
) -> str:
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
