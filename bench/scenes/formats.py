"""Scenes of 3D Gaussians packed in every way, beside the formats they have now: ``make bench-scenes``.

A cell is one level of the scene PLAYBOT, as it is (``sog``) or with the steps of its format taken out again
(``float``), in every format in turn. Pictures are compared with those of the same scene, by four cameras
between those that say what is important. Ours comes at the PSNR that each rival has, and at five budgets.

``python -m bench.scenes.formats [LEVEL] [FORM]``: the cells that have these words. It needs THINWIRE_DATA.

"PLAYBOT" by Stephane Agullo (https://sa3d.fr), https://superspl.at/view?id=ee6d8bc4, CC-BY-4.0.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from bench.study.cells import Kept, run_study
from thinwire.runs.records.writer import finite
from thinwire.uses.scenes.code.orientations import unit
from thinwire.uses.scenes.files.foreign import read_foreign, write_foreign
from thinwire.uses.scenes.files.packed_scene import read_scene, write_scene
from thinwire.uses.scenes.files.scene_file import read_scene_file
from thinwire.uses.scenes.importance import seen_through
from thinwire.uses.scenes.importance_coder import Analysis
from thinwire.uses.scenes.layers import LAYERS, shown_after
from thinwire.uses.scenes.mesongs import MesonGS
from thinwire.uses.scenes.part import Layer
from thinwire.uses.scenes.recipes import SCENE, SCENES
from thinwire.uses.scenes.run.scene_packing import layers_at, layers_within
from thinwire.uses.scenes.scene import Array, Splats
from thinwire.uses.scenes.view.render import Pictures
from thinwire.uses.scenes.view.views import Views

KEPT = Kept("scenes")
LEVELS, FORMS = ("2_0", "0_0"), ("float", "sog")
MESONGS = ("mesongs", "mesongs:coder=own,voxels=middle")
OURS = {LAYERS: "thinwire", 1: "thinwire:layers=1"}
BUDGETS = (0.2, 0.35, 0.5, 0.7, 1.0)  # of SPZ's bytes
DECODED = 3  # times, of which the shortest counts
Made = TypeVar("Made")
HARMONICS = 0.05  # standard deviation of what is added to harmonics, whose steps are those of vectors
POSITION_LEVELS, TURN_STEP, ALPHA_LEVELS = 65535, 2**0.5 / 255, 255
SPZ_HEADER = 32  # bytes
SPZ_STREAMS = ("positions", "opacities", "colours", "log_scales", "rotations", "harmonics")
Floats = npt.NDArray[np.float64]


class Cell(NamedTuple):
    """A level of the scene, and which form of it."""

    level: str
    form: str


def cells() -> list[Cell]:
    """Return all cells."""
    return [Cell(name, form) for name in LEVELS for form in FORMS]


def timed(work: Callable[[], Made]) -> tuple[Made, float]:
    """Return what comes of a call, and its processor seconds."""
    began = time.process_time()
    made = work()
    return made, time.process_time() - began


class Study:
    """A scene and its pictures, in every format in turn."""

    def __init__(self, cell: Cell) -> None:
        self.source, self._source_nbytes, self._folder = level(cell.level)
        self.splats = dequantised(self.source, self._folder) if cell.form == "float" else self.source
        self.views = Views.of(self.splats)
        self.pictures = Pictures(self.splats, self.views.reported)

    def of(self, name: str, data: bytes, decode: Callable[[], Splats], encode_s: float) -> dict[str, Any]:
        """Return the row of a file."""
        found = [timed(decode) for _ in range(DECODED)]
        drawn = self.pictures.of(found[0][0])
        row = {
            "name": name,
            "nbytes": len(data),
            "psnr_db": finite(self.pictures.psnr(drawn)),
            "ssim": self.pictures.ssim(drawn),
            "encode_cpu_s": encode_s,
            "decode_cpu_s": min(seconds for _, seconds in found),
        }
        print(*row.values(), flush=True)
        return row

    def foreign(self, form: str) -> dict[str, Any]:
        """Return the row of another format."""
        data, seconds = timed(lambda: write_foreign(self.splats, form))
        streams = streams_of(data, form, self.splats)
        return self.of(form, data, partial(read_foreign, data, form), seconds) | {"streams": streams}

    def sog(self) -> dict[str, Any]:
        """Return the row of the files that the scene came in."""
        row = self.of("sog", b"", lambda: level(self._folder.name)[0], 0.0)
        files = {f.stem: f.stat().st_size for f in sorted(self._folder.iterdir())}
        return row | {"nbytes": self._source_nbytes, "encode_cpu_s": None, "streams": files}

    def mesongs(self, recipe: str) -> dict[str, Any]:
        """Return the row of MesonGS."""
        coder = SCENES.parse(recipe).schemes[SCENE]
        if not isinstance(coder, MesonGS):
            raise SystemExit(f"{recipe} is not MesonGS")
        seen = partial(seen_through, self.splats, self.views)
        layers, seconds = timed(lambda: [Layer(coder.encode(self.splats, seen()))])
        return self.packed(recipe, layers, seconds)

    def packed(self, name: str, layers: list[Layer], seconds: float) -> dict[str, Any]:
        """Return the row of a packed scene of ours."""
        data = write_scene(layers)
        row = self.of(name, data, lambda: shown_after(read_scene(data)), seconds)
        begun = [self.layer(layers[: i + 1]) for i in range(len(layers))]
        return row | {"streams": own_streams(layers, len(data)), "layers": begun}

    def layer(self, layers: list[Layer]) -> dict[str, Any]:
        """Return what a receiver has after these layers, the first ones of a file."""
        shown = shown_after(layers)
        nbytes, drawn = sum(layer.nbytes for layer in layers), self.pictures.of(shown)
        return {"nbytes": nbytes, "splats": shown.count, "psnr_db": self.pictures.psnr(drawn)}


def ours(study: Study, scene: Analysis, analysis_s: float, rival: dict[str, Any]) -> list[dict[str, Any]]:
    """Return our rows at a rival's own PSNR, in layers and in one."""
    rows = list[dict[str, Any]]()
    for count, name in OURS.items():
        layers, seconds = timed(partial(layers_at, scene, study.pictures, rival["psnr_db"], count))
        rows.append(study.packed(name, layers, seconds + analysis_s) | {"at": rival["name"]})
    return rows


def budget(study: Study, scene: Analysis, analysis_s: float, most: int) -> dict[str, Any]:
    """Return what packing to so many bytes comes to."""
    layers, seconds = timed(lambda: layers_within(scene, most))
    data = write_scene(layers)
    row = study.of(OURS[LAYERS], data, lambda: shown_after(read_scene(data)), seconds + analysis_s)
    return {"target_nbytes": most} | row


def measure(cell: Cell) -> dict[str, Any]:
    """Return every row of a cell."""
    study = Study(cell)
    rivals = [study.sog(), *map(study.foreign, ("spz", "compressed.ply")), *map(study.mesongs, MESONGS)]
    scene, analysis_s = timed(lambda: Analysis.of(study.splats))
    rows = list(rivals)
    for rival in rivals:
        if rival["name"] in ("spz", *MESONGS):
            rows += ours(study, scene, analysis_s, rival)
    spz = next(row["nbytes"] for row in rivals if row["name"] == "spz")
    budgets = [budget(study, scene, analysis_s, int(share * spz)) for share in BUDGETS]
    about = {"splats": study.splats.count, "bands": study.splats.bands, "raw_nbytes": study.splats.nbytes}
    return cell._asdict() | about | {"rows": rows, "budgets": budgets}


def summary() -> dict[str, Any]:
    """Return what the finished cells found."""
    return {"cells": [found for cell in cells() if (found := KEPT.get(cell))]}


def level(name: str) -> tuple[Splats, int, Path]:
    """Return a level of the scene, the bytes of its files, and their folder."""
    root = os.environ.get("THINWIRE_DATA")
    folder = Path(root or ".") / "playbot" / name
    if not root or not (folder / "meta.json").is_file():
        raise SystemExit(f"put {name}/ of PLAYBOT into playbot/ of the folder that THINWIRE_DATA names")
    return *read_scene_file(folder), folder


def dequantised(splats: Splats, folder: Path) -> Splats:
    """Return a scene whose attributes are moved at random, each within its own cell of SOG."""
    draw, meta = np.random.default_rng(0), json.loads((folder / "meta.json").read_text("utf-8"))

    def evenly(shape: tuple[int, ...]) -> Floats:
        return draw.random(shape) - 0.5

    alpha = 1 / (1 + np.exp(-splats.opacities.astype(np.float64)))
    alpha = np.clip(alpha + evenly(alpha.shape) / ALPHA_LEVELS, 0.1 / ALPHA_LEVELS, 1 - 0.1 / ALPHA_LEVELS)
    turned = unit(splats.rotations + TURN_STEP * evenly(splats.rotations.shape))
    noise = HARMONICS * draw.standard_normal(splats.harmonics.shape)
    return replace(
        splats,
        positions=_moved(splats.positions, meta["means"], evenly(splats.positions.shape)),
        log_scales=_in_cell(splats.log_scales, meta["scales"]["codebook"], draw),
        rotations=turned.astype(np.float32),
        opacities=np.log(alpha / (1 - alpha)).astype(np.float32),
        colours=_in_cell(splats.colours, meta["sh0"]["codebook"], draw),
        harmonics=(splats.harmonics + noise).astype(np.float32),
    )


def _moved(positions: Array, means: dict[str, list[float]], by: Floats) -> Array:
    """Return positions moved by parts of a step, which are even in signed logarithms."""
    step = (np.array(means["maxs"]) - np.array(means["mins"])) / POSITION_LEVELS
    at = np.sign(positions) * np.log1p(np.abs(positions.astype(np.float64))) + step * by
    return (np.sign(at) * np.expm1(np.abs(at))).astype(np.float32)


def _in_cell(values: Array, book: list[float], draw: np.random.Generator) -> Array:
    """Return values somewhere between the middles to the neighbours of each in a book."""
    known = np.unique(np.array(book, np.float64))
    middles = (known[1:] + known[:-1]) / 2
    low, high = np.append(known[:1], middles), np.append(middles, known[-1:])
    at = np.searchsorted(middles, values.reshape(-1).astype(np.float64))
    share = draw.random(values.size)
    found: Floats = low[at] + share * (high[at] - low[at])
    return found.reshape(values.shape).astype(np.float32)


def streams_of(data: bytes, form: str, splats: Splats) -> dict[str, int]:
    """Return the bytes of each stream of an SPZ or compressed ``.ply`` file, and of what is around them."""
    if form == "spz":  # sizes stand behind the header, two numbers a stream
        sizes = struct.unpack_from(f"<{2 * len(SPZ_STREAMS)}Q", data, SPZ_HEADER)[::2]
        found = dict(zip(SPZ_STREAMS, sizes, strict=True))
    else:
        n = splats.count
        found = dict.fromkeys(("positions", "rotations", "log_scales", "colours and opacities"), 4 * n)
        found["harmonics"] = 3 * splats.harmonics.shape[1] * n
    return found | {"header": len(data) - sum(found.values())}


def own_streams(layers: list[Layer], nbytes: int) -> dict[str, int]:
    """Return the bytes of each stream of a file of ours, all layers together, and of its header."""
    found = dict[str, int]()
    for layer in layers:
        for name, data in chain.from_iterable(part.streams.items() for part in layer.parts.values()):
            found[name] = found.get(name, 0) + len(data)
    return found | {"header": nbytes - sum(found.values())}


if __name__ == "__main__":
    run_study("scenes", sys.argv[1:], cells, measure, summary)
