"""The page of pictures: the sheets side by side, how they differ, and what each took."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from thinwire.runs.records.finished_runs import Run, over
from thinwire.runs.records.progress import decibels, megabytes
from thinwire.runs.report.details import Rows
from thinwire.runs.report.elements import card, grid, memory, table, terminal_table
from thinwire.uses.pictures.run.options import BATCH, ONE
from thinwire.uses.pictures.run.record import PicturesRecord

PicturesRun = Run[PicturesRecord]
COLUMNS = ("way", "mode", "seconds", "× faster", "s/step", "sent a step", "× fewer than fp16", "sent in all",
           "waiting and coding", "PSNR", "SSIM", "flicker")  # fmt: skip
TABLE = (0, 2, 3, 4, 5, 6, 9)  # of them, in a terminal
NARROW = 270  # pixels of a clip's card, at least
OLD = " (windows of 7)"  # of records that do not say it
STYLE = "image-rendering:pixelated;width:100%;border-radius:4px"


def headline(runs: Sequence[PicturesRun]) -> str:
    """Return what the fastest way that is no single machine won, good or bad."""
    base, many, what = _one(runs), runs[0].record.config.get("pictures", 1), _what(runs[0].record)
    one = f"one {what}" if many == 1 else f"{many} {what}s"
    # of a single picture a batch of one a rank is no faster way
    alone = (ONE, BATCH) if many == 1 else (ONE,)
    others = [run for run in runs if run.record.mode not in alone and run.valid]
    if base is None or not others:
        return _among(others, one) or f"{one.capitalize()} by {runs[0].label}"
    best = min(others, key=lambda run: run.record.totals["seconds"])
    ratio = base.record.totals["seconds"] / best.record.totals["seconds"]
    quality = decibels(best.record.quality.get("psnr_db"))
    if ratio < 1:
        return f"One machine is the fastest here: {best.label}, the next best, takes {1 / ratio:.2f}× as long"
    sent = _fewer(best.record)
    bytes_text = f", sending {sent:.1f}× fewer bytes a step than float16" if sent and sent > 1.05 else ""
    same, near = (f"an equal {what}", f"a {what}") if many == 1 else (f"equal {what}s", f"{what}s")
    kept, off = (same, "") if quality == "equal" else (near, f", at a PSNR of {quality} to one machine's")
    return f"{best.label} makes {kept} {ratio:.2f}× faster than one machine{bytes_text}{off}"


def _among(runs: Sequence[PicturesRun], what: str) -> str:
    """Return how much faster the fastest of several ways is than the slowest; nothing of one alone."""
    timed = sorted(runs, key=lambda run: run.record.totals["seconds"])
    if len(timed) < 2:
        return ""
    ratio = timed[-1].record.totals["seconds"] / timed[0].record.totals["seconds"]
    return f"{timed[0].label} makes {what} {ratio:.2f}× faster than {timed[-1].label}"


def _what(record: PicturesRecord) -> str:
    return "clip" if record.frames > 1 else "picture"


def setting(runs: Sequence[PicturesRun]) -> str:
    """Return what was made, by how many processes, over which link."""
    c, record = runs[0].record.config, runs[0].record
    many = f"{c['pictures']} sheets" if c["pictures"] > 1 else "One sheet"
    what = f"{many} of {c['sheet']} garments"
    if c["sheet"] == "1x1":
        what = f"{c['pictures']} pictures of a garment"
    if record.frames > 1:
        clips = f"{c['pictures']} clips" if c["pictures"] > 1 else "One clip"
        what = f"{clips} of {record.frames} frames, {c['canvas']} pixels,"
    guided = "" if c["guidance"] == 1 else f", guidance {c['guidance']:g}"
    return (
        f"{what} by {c['model']}, {c['steps']} denoising steps{guided}, by "
        f"{record.ranks} processes over {over([run.record for run in runs])}."
    )


def warnings(runs: Sequence[PicturesRun]) -> list[str]:
    """Return what no record's notes say: that weights are random."""
    random = any(run.record.config.get("init") for run in runs)
    return ["The model has random weights, so its pictures show nothing."] if random else []


def folds(runs: Sequence[PicturesRun]) -> dict[str, Rows]:
    """Return what was predicted, one row a way."""
    rows = [
        (run.label, f"{run.record.predicted_s:.2f} s predicted, {run.record.totals['seconds']:.2f} s taken")
        for run in runs
        if run.record.predicted_s is not None
    ]
    return {"What was predicted": rows} if rows else {}


def cards(runs: Sequence[PicturesRun]) -> list[str]:
    """Return the cards, in order."""
    shown, what = [_picture(run) for run in runs], _what(runs[0].record)
    moves = what == "clip"
    text = "Bytes are those of the rank that sends most, headers included. Seconds are of denoising alone, "
    text += "the median of the repeats; "
    text += "PSNR and flicker, which is the PSNR of what changes from frame to frame, are" if moves else ""
    text += f"{'' if moves else 'PSNR and SSIM are'} against one machine's {what} of the same noise."
    left_out = COLUMNS.index("SSIM" if moves else "flicker")
    head, *rows = ([c for i, c in enumerate(row) if i != left_out] for row in (COLUMNS, *_rows(runs)))
    figures = card("The figures", text, table(head, rows))
    return [figures, grid(shown, NARROW) if moves else grid(shown), memory(runs)]


def _picture(run: PicturesRun) -> str:
    record = run.record
    body = _image(record.preview, f"the {_what(record)} of {run.label}")
    same = record.quality.get("psnr_db") is None
    if not same:
        body += "<p>Its difference from one machine's, ten times as strong:</p>"
        body += _image(record.difference, f"the difference of {run.label}")
    words = f"Equal to one machine's {_what(record)}." if same else decibels(record.quality["psnr_db"])
    if record.mode == ONE:
        words = "By one machine."
    return card(run.label, words, body)


def _image(data: str, about: str) -> str:
    return f'<img style="{STYLE}" alt="{html.escape(about)}" src="data:image/png;base64,{data}">'


def _one(runs: Sequence[PicturesRun]) -> PicturesRun | None:
    return next((run for run in runs if run.record.mode == ONE and run.valid), None)


def _fewer(record: PicturesRecord) -> float | None:
    steady, half = record.bytes.get("steady_step", 0), record.bytes.get("fp16_step", 0)
    return half / steady if steady and half else None


def _rows(runs: Sequence[PicturesRun]) -> list[list[str]]:
    base = _one(runs)
    first = base.record.totals["seconds"] if base else None
    return [_row(run, first) for run in runs]


def _row(run: PicturesRun, first: float | None) -> list[str]:
    record = run.record
    seconds, fewer, share = record.totals["seconds"], _fewer(record), record.comm_to_compute
    alone = record.mode == ONE
    ssim = record.quality.get("ssim")
    return [
        run.label,
        record.mode,
        f"{seconds:.2f}",
        f"{first / seconds:.2f}" if first and seconds else "–",
        f"{record.step_seconds:.3f}",
        "–" if alone else megabytes(record.bytes["steady_step"]),
        f"{fewer:.1f}" if fewer else "–",
        "–" if alone else megabytes(record.bytes["total"]),
        "–" if alone or share is None else f"{100 * share:.0f} % of compute",
        "–" if alone else decibels(record.quality.get("psnr_db")),
        "–" if alone or ssim is None else f"{ssim:.4f}" + ("" if record.quality.get("ssim_window") else OLD),
        "–" if alone else decibels(record.quality.get("flicker_db")),
    ]


def summary_table(runs: Sequence[PicturesRun]) -> Any:
    """Return the figures for a terminal."""
    rows = ([row[i] for i in TABLE] for row in _rows(runs))
    return terminal_table([COLUMNS[i] for i in TABLE], rows)
