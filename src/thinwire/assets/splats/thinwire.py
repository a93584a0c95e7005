"""Our own coder of scenes: every attribute in uniform steps of equal cost to the pictures.

Positions are an octree with neighbour contexts. Steps of an attribute go with its measured sensitivity, and
double from class to class of a splat's importance. One number, the slope, trades bytes for error: it is the
mean square error that one more bit a value would take away.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from thinwire.assets.code.symbols import pack_numbers, unpack_numbers
from thinwire.assets.splats.code import turns
from thinwire.assets.splats.code.channels import Axes, Channels, Floats, class_steps, unpack_channels
from thinwire.assets.splats.code.grid import MOST_DEPTH, Codes, Grid, cells_of, morton
from thinwire.assets.splats.code.octree import pack_cells, unpack_cells
from thinwire.assets.splats.importance import (
    MOST_CLASS,
    classes_of,
    most_steps,
    seen_around,
    sensitivities,
)
from thinwire.assets.splats.part import Part
from thinwire.assets.splats.scene import COEFFICIENTS, Splats
from thinwire.assets.splats.view.cameras import SIZE, Frame
from thinwire.assets.splats.view.render import Seen
from thinwire.spec import Spec
from thinwire.types import WRONG_VALUES, ByteCursor, PayloadError, require

NAME, CLASSES = "thinwire", MOST_CLASS + 1
LOGIT, FLOOR = 12.0, -23.0  # what infinite opacities and scales of zero become
CHANNELS = {"opacities": 1, "rotations": 3, "log_scales": 3, "colours": 3}
TURNED = ("log_scales", "colours", "harmonics")  # attributes whose channels vary together
WORTH = 200  # splats for each number of the axes, or they cost more than they save


@dataclass(frozen=True, repr=False)
class Thinwire(Spec):
    """Our own coder. A target says how small; without ``layers`` all splats come at once, in fewer bytes."""

    layers: bool = True


@dataclass(frozen=True, eq=False)
class Analysis:
    """What coding a scene begins with, at any slope: splats in their smallest rotations, what matters."""

    splats: Splats
    frame: Frame
    seen: Seen
    classes: npt.NDArray[np.int64]
    sensitivity: Mapping[str, float]
    channels: Mapping[str, Channels]

    @classmethod
    def of(cls, splats: Splats, size: int = SIZE) -> Analysis:
        """Return the analysis of a scene, from pictures of it that have ``size`` pixels both ways."""
        frame = Frame.of(splats)
        rotations, scales = turns.smallest(splats.rotations, np.maximum(splats.log_scales, FLOOR))
        bounded = np.clip(splats.opacities, -LOGIT, LOGIT)
        splats = replace(splats, rotations=rotations.astype(np.float32), log_scales=scales, opacities=bounded)
        seen = seen_around(splats, frame, size)
        classes = classes_of(seen)
        sensitivity = sensitivities(splats, frame, classes, size)
        weights: Floats = np.exp2(-2.0 * classes)
        channels = {g: Channels.of(x, _axes(g, x, weights)) for g, x in _values(splats).items()}
        return cls(splats, frame, seen, classes, sensitivity, channels)

    def step(self, group: str, slope: float) -> float:
        """Return the step of an attribute, in class 0, at a slope."""
        values = {"positions": 3, "harmonics": 3 * self.splats.harmonics.shape[1]} | CHANNELS
        own = (slope * values[group] / self.sensitivity[group]) ** 0.5
        return min(float(own), most_steps(group, self.frame.radius))


def encode(scene: Analysis, slope: float, which: npt.NDArray[np.intp] | None = None) -> Part:
    """Return a scene, or those of its splats that are asked for, as one part at a slope."""
    which = np.arange(scene.splats.count) if which is None else which
    positions = scene.splats.positions[which]
    grid = Grid.cubic(positions, scene.step("positions", slope))
    codes = morton(grid.cells(positions))
    order = np.lexsort((scene.classes[which], codes))
    classes = scene.classes[which[order]]
    unique, repeats = np.unique(codes[order], return_counts=True)
    by_class = which[order[np.argsort(classes, kind="stable")]]
    counts = np.bincount(classes, minlength=CLASSES).tolist()
    streams = {
        "positions": pack_cells(unique, grid.depth) + pack_numbers((repeats - 1).astype(np.int32)),
        "classes": pack_numbers(classes.astype(np.int32)),
    }
    about = {"origin": list(grid.origin), "step": grid.step[0], "depth": grid.depth, "cells": len(unique)}
    for group, channels in scene.channels.items():
        steps = class_steps(scene.step(group, slope), most_steps(group, scene.frame.radius), CLASSES)
        streams[group] = channels.pack(by_class, steps, counts)
    return Part(NAME, len(order), scene.splats.bands, about, streams)


def _values(splats: Splats) -> dict[str, Floats]:
    """Return the channels [n, d] of each attribute but positions."""
    found = {
        "opacities": splats.opacities[:, None],
        "rotations": splats.rotations[:, 1:],
        "log_scales": splats.log_scales,
        "colours": splats.colours,
    }
    if splats.bands:
        found["harmonics"] = splats.harmonics.reshape(splats.count, -1)
    return {group: values.astype(np.float64) for group, values in found.items()}


def _axes(group: str, values: Floats, weights: Floats) -> Axes:
    worth = len(values) >= WORTH * values.shape[1]
    return Axes.principal(values, weights) if group in TURNED and worth else Axes.plain(values)


def decode(part: Part) -> Splats:
    """Return the scene of a part. Errors: ``PayloadError``."""
    try:
        return _decoded(part)
    except WRONG_VALUES as e:
        raise PayloadError(f"a damaged part: {str(e)[:80]}") from e


def _decoded(part: Part) -> Splats:
    n, about = part.count, part.about
    depth, cells, step = int(about["depth"]), int(about["cells"]), float(about["step"])
    require(1 <= depth <= MOST_DEPTH and 1 <= cells <= n, PayloadError, f"{cells} cells at depth {depth}")
    x, y, z = map(float, about["origin"])
    codes = _positions(part.streams["positions"], n, cells, depth)
    classes = _classes(part.streams["classes"], n)
    by_class, counts = np.argsort(classes, kind="stable"), np.bincount(classes, minlength=CLASSES).tolist()
    coefficients = next(k for k, bands in COEFFICIENTS.items() if bands == part.bands)
    found = dict[str, Floats]()
    for group, d in (CHANNELS | ({"harmonics": 3 * coefficients} if coefficients else {})).items():
        found[group] = np.empty((n, d))
        found[group][by_class] = unpack_channels(part.streams[group], d, counts, group)
    return Splats.of(
        Grid((x, y, z), (step, step, step), depth).positions(cells_of(codes)),
        log_scales=found["log_scales"],
        rotations=turns.whole(found["rotations"]),
        opacities=found["opacities"][:, 0],
        colours=found["colours"],
        harmonics=found["harmonics"].reshape(n, -1, 3) if coefficients else np.zeros((n, 0, 3)),
    )


def _positions(data: bytes, n: int, cells: int, depth: int) -> Codes:
    cursor = ByteCursor(data, "positions")
    unique = unpack_cells(cursor, cells, depth)
    repeats = unpack_numbers(cursor, cells) + 1
    cursor.close()
    require(int(repeats.sum()) == n, PayloadError, f"{int(repeats.sum())} positions, expected {n}")
    return np.repeat(unique, repeats)


def _classes(data: bytes, n: int) -> npt.NDArray[np.int32]:
    cursor = ByteCursor(data, "classes")
    classes = unpack_numbers(cursor, n)
    cursor.close()
    require(int(classes.max()) < CLASSES, PayloadError, f"class {int(classes.max())} of {CLASSES}")
    return classes
