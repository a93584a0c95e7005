"""Pictures of a scene on a CPU: splats front to back, each over what those before it let through.

The compiled pass and numpy agree to 1e-4 in every pixel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from thinwire.uses.scenes.scene import Array
from thinwire.uses.scenes.view import native
from thinwire.uses.scenes.view.cameras import Camera
from thinwire.uses.scenes.view.project import Drawable, project

LEAST_THROUGH = 1e-4  # a pixel that lets less through is done
MOST_ALPHA = 0.99


class Seen(NamedTuple):
    """How much pictures show of each splat: sums over their pixels of its weight, and of its square."""

    weights: npt.NDArray[np.float64]  # [n]
    squares: npt.NDArray[np.float64]  # [n]


def render(scene: Drawable, camera: Camera) -> Array:
    """Return a picture [height, width, 3] on black, 0 to 1 and above."""
    return _drawn(scene, camera)[0]


def seen_in(scene: Drawable, cameras: Sequence[Camera]) -> Seen:
    """Return how much these cameras see of each splat."""
    found = np.zeros((len(scene.opacities), 2))
    for camera in cameras:
        _, sums, which = _drawn(scene, camera)
        found[which] += sums
    return Seen(found[:, 0], found[:, 1])


def _drawn(scene: Drawable, camera: Camera) -> tuple[Array, npt.NDArray[np.float64], npt.NDArray[np.intp]]:
    rows, which = project(scene, camera)
    planes = np.zeros((4, camera.height, camera.width), np.float32)
    planes[3] = 1
    sums = (native.splat if native.there() else splat)(rows, planes, LEAST_THROUGH)
    return np.ascontiguousarray(planes[:3].transpose(1, 2, 0)), sums, which


def splat(rows: Array, planes: Array, least: float) -> npt.NDArray[np.float64]:
    """Do what ``native.splat`` does, without a compiler."""
    sums = np.zeros((len(rows), 2))
    for i, row in enumerate(rows):
        box = _box(row, planes.shape[1:])
        if box is None:
            continue
        inside, alpha = _alpha(row, box)
        through = planes[3][box]
        weight = np.where(inside & (through >= np.float32(least)), alpha * through, np.float32(0))
        for plane, colour in zip(planes, row[7:10], strict=False):
            plane[box] += weight * colour
        through -= weight
        sums[i] = weight.sum(dtype=np.float64), (weight * weight).sum(dtype=np.float64)
    return sums


def _box(row: Array, size: tuple[int, ...]) -> tuple[slice, slice] | None:
    """Return the pixels around a splat; None where none is in the picture."""
    x, y, _, _, c, limit, up = (float(v) for v in (*row[:6], row[10]))
    aside = up * (c / float(row[2])) ** 0.5
    rows = slice(max(0, int(np.ceil(y - up))), min(size[0], int(np.floor(y + up)) + 1))
    columns = slice(max(0, int(np.floor(x - aside)) - 1), min(size[1], int(np.ceil(x + aside)) + 2))
    return (rows, columns) if limit > 0 and rows.start < rows.stop and columns.start < columns.stop else None


def _alpha(row: Array, box: tuple[slice, slice]) -> tuple[npt.NDArray[np.bool_], Array]:
    """Return which pixels of a box a splat reaches, as the compiled pass finds them, and its alpha."""
    x, y, a, b, c, limit = (float(v) for v in row[:6])
    down, across = np.arange(box[0].start, box[0].stop)[:, None], np.arange(box[1].start, box[1].stop)[None]
    dy = down - y
    u = b * dy
    rest = u * u - a * (c * dy * dy - limit)
    half, inverse = np.sqrt(np.maximum(rest, 0)), 1 / a
    inside = (rest >= 0) & (across >= np.ceil(x + (-u - half) * inverse))
    inside &= across <= np.floor(x + (-u + half) * inverse)
    dx = across - x
    power = np.minimum(-0.5 * ((a * dx + 2 * b * dy) * dx + c * dy * dy), 0)
    return inside, np.minimum(float(row[6]) * np.exp(power), MOST_ALPHA).astype(np.float32)
