"""What refining gains, and what removing splats by the exact error saves: ``make bench-scenes`` runs it too.

A cell is a level of PLAYBOT, dequantised as in ``bench.scenes.formats``, and a way: MesonGS with a share of
splats pruned, without and with its fine-tuning in as many bytes; or our recipe at a PSNR, without and with
``--refine``, in one layer. Figures are of the reported cameras, which nothing was refined by; by them both
sides of a quality search where they have it. Rates and rounds were found on level 3, not among these.

``python -m bench.scenes.refined [LEVEL] [WAY]``: the cells that have these words. It needs THINWIRE_DATA.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from bench.scenes.formats import dequantised, level
from bench.study.cells import Kept, run_study
from bench.study.tables import DASH, Draw, Row, columns
from thinwire.runs.records.progress import decibels
from thinwire.uses.scenes.files.packed_scene import read_scene, write_scene
from thinwire.uses.scenes.importance import seen_through
from thinwire.uses.scenes.importance_coder import Analysis
from thinwire.uses.scenes.layers import shown_after
from thinwire.uses.scenes.mesongs import MesonGS
from thinwire.uses.scenes.part import Layer
from thinwire.uses.scenes.refining.teacher import Teacher
from thinwire.uses.scenes.run.scene_packing import layers_at, refined_at, tuned
from thinwire.uses.scenes.view.render import Pictures
from thinwire.uses.scenes.view.views import Views

KEPT = Kept("refined")
STEPS = 150  # of MesonGS's fine-tuning
LEVELS = ("4_0", "2_0", "0_0")
PRUNED, ASKED = (0.2, 0.4), (36.0, 34.0)  # shares, and dB


class Cell(NamedTuple):
    """A level of the scene, a way to pack it, and how much of it: a share to prune, or dB."""

    level: str
    way: str
    much: float


def cells() -> list[Cell]:
    """Return all cells."""
    found = [Cell(name, "mesongs", share) for share in PRUNED for name in LEVELS]
    return found + [Cell(name, "thinwire", least) for least in ASKED for name in LEVELS if name != "4_0"]


class Study:
    """A scene, and its pictures by the reported cameras."""

    def __init__(self, name: str) -> None:
        source, _, folder = level(name)
        self.splats = dequantised(source, folder)
        self.views = Views.of(self.splats)
        self.pictures = Pictures(self.splats, self.views.reported)

    def row(self, layers: list[Layer], began: float) -> dict[str, Any]:
        """Return what a packed scene is: bytes, splats, how near, and processor seconds since it began."""
        seconds = time.process_time() - began
        data = write_scene(layers)
        shown = shown_after(read_scene(data))
        drawn = self.pictures.of(shown)
        found = {"nbytes": len(data), "splats": shown.count, "cpu_s": seconds}
        print(*found.values(), self.pictures.psnr(drawn), flush=True)
        by_kind = {kind: db for kind, (_, db, _) in self.pictures.by_kind(drawn).items()}
        return found | {"psnr_db": self.pictures.psnr(drawn), "by_kind": by_kind}

    def mesongs(self, share: float, steps: int) -> dict[str, Any]:
        """Return the row of MesonGS."""
        began = time.process_time()
        seen = seen_through(self.splats, self.views)
        return self.row([Layer(tuned(MesonGS(share, refine=steps), self.splats, self.views, seen))], began)

    def thinwire(self, least: float, refine: bool) -> dict[str, Any]:
        """Return the row of our recipe."""
        began = time.process_time()
        scene = Analysis.through(self.views, self.splats)
        if refine:
            teacher = Teacher.of(self.splats, self.views)
            return self.row(refined_at(scene, teacher, self.pictures, least, 1), began)
        return self.row(layers_at(scene, self.pictures, least, 1), began)


def measure(cell: Cell) -> dict[str, Any]:
    """Return both rows of a cell."""
    study = Study(cell.level)
    way = partial(getattr(study, cell.way), cell.much)
    last = STEPS if cell.way == "mesongs" else True
    about = {"splats": study.splats.count, "bands": study.splats.bands}
    return cell._asdict() | about | {"plain": way(type(last)(0)), "refined": way(last)}


def summary() -> dict[str, Any]:
    """Return what the finished cells found."""
    return {"cells": [found for cell in cells() if (found := KEPT.get(cell))]}


def _rows(way: str, found: Row) -> Iterator[Row]:
    for cell in found["cells"]:
        if cell["way"] != way:
            continue
        plain, refined = cell["plain"], cell["refined"]
        fewer = 100 * (1 - refined["nbytes"] / plain["nbytes"])
        gone = 100 * (1 - refined["splats"] / cell["splats"])
        about = {"scene": f"`{cell['level']}`, {cell['splats']:,} splats", "much": cell["much"]}
        about |= {"fewer": f"{fewer:.1f} %", "gone": f"{gone:.0f} %" if gone > 0 else DASH}
        gained = refined["psnr_db"] - plain["psnr_db"]
        yield about | {"plain": plain, "refined": refined, "gained": f"{gained:+.2f} dB"}


def _of(side: str, key: str, form: str = "{:.3f} MB", scale: float = 1e6) -> Any:
    return lambda row: form.format(row[side][key] / scale)


def _seconds(side: str) -> Any:
    return _of(side, "cpu_s", "{:.0f}", 1)


def _db(side: str) -> Any:
    return lambda row: decibels(row[side]["psnr_db"])


TABLES: dict[str, Draw] = {
    "refined-mesongs": columns(
        lambda found: _rows("mesongs", found),
        ("scene", "{scene}"), ("pruned", "{much:g}"),
        ("bytes", _of("plain", "nbytes")), ("PSNR", _db("plain")),
        ("refined, bytes", _of("refined", "nbytes")), ("PSNR", _db("refined")), ("gain", "{gained}"),
        ("CPU-s", _seconds("plain")), ("refined, CPU-s", _seconds("refined")),
    ),
    "refined": columns(
        lambda found: _rows("thinwire", found),
        ("scene", "{scene}"), ("asked for", "{much:g} dB"),
        ("bytes", _of("plain", "nbytes")), ("PSNR", _db("plain")),
        ("refined, bytes", _of("refined", "nbytes")), ("PSNR", _db("refined")), ("fewer bytes", "{fewer}"),
        ("splats removed", "{gone}"),
        ("CPU-s", _seconds("plain")), ("refined, CPU-s", _seconds("refined")),
    ),
}  # fmt: skip


if __name__ == "__main__":
    run_study("refined", sys.argv[1:], cells, measure, summary)
