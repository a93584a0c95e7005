"""Levels of the scene PLAYBOT, as they are and with the steps of their format taken out again.

"PLAYBOT" by Stephane Agullo (https://sa3d.fr), https://superspl.at/view?id=ee6d8bc4, CC-BY-4.0.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from thinwire.uses.scenes.code.turns import unit
from thinwire.uses.scenes.files.scene_file import read_scene_file
from thinwire.uses.scenes.part import Layer
from thinwire.uses.scenes.scene import Array, Splats

HARMONICS = 0.05  # standard deviation of what is added to harmonics, whose steps are those of vectors
POSITION_LEVELS, TURN_STEP, ALPHA_LEVELS = 65535, 2**0.5 / 255, 255
SPZ_HEADER = 32  # bytes
SPZ_STREAMS = ("positions", "opacities", "colours", "log_scales", "rotations", "harmonics")
Floats = npt.NDArray[np.float64]


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
