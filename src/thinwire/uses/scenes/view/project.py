"""From splats to ellipses on a picture.

Source: "3D Gaussian Splatting for Real-Time Radiance Field Rendering", arXiv 2308.04079, after EWA splatting:
a covariance through the local linear part of the projection, widened by 0.3 square pixels [quoted].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from thinwire.uses.scenes.scene import Array, Splats
from thinwire.uses.scenes.view.cameras import Camera
from thinwire.uses.scenes.view.harmonics import shaded

WIDER = 0.3  # square pixels
LEAST_ALPHA = 1 / 255  # what is fainter is not drawn
LONGEST = 1e6  # pixels of an axis: beyond, its end is nowhere near, and squares of squares overflow
BEYOND = 1.3  # of half a picture: where the linear part is taken of what lies farther out


@dataclass(frozen=True, eq=False)
class Drawable:
    """A scene as drawing wants it: columns, and what no camera changes."""

    positions: Array  # [3, n]
    axes: Array  # [3, 3, n]: the columns of each rotation times its scales
    opacities: Array  # [n], 0 to 1
    colours: Array  # [1 + k, 3, n]

    @classmethod
    def of(cls, splats: Splats) -> Drawable:
        """Return a scene that may be drawn many times."""
        with np.errstate(over="ignore"):
            scales = np.exp(splats.log_scales)
            opacities = np.asarray(1 / (1 + np.exp(-splats.opacities)), np.float32)
        axes = np.asarray(rotation_matrices(splats.rotations) * scales.T, np.float32)
        colours = np.concatenate([splats.colours[:, None], splats.harmonics], axis=1).transpose(1, 2, 0)
        return cls(np.ascontiguousarray(splats.positions.T), axes, opacities, np.ascontiguousarray(colours))


def rotation_matrices(rotations: Array) -> Array:
    """Return rotations w, x, y, z [n, 4] of any length as matrices [3, 3, n]; a zero one turns nothing."""
    length = np.linalg.norm(rotations, axis=1)
    w, x, y, z = (rotations / np.where(length > 0, length, 1)[:, None]).T
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    return np.array(rows, dtype=np.float32)


def project(scene: Drawable, camera: Camera) -> tuple[Array, npt.NDArray[np.intp]]:
    """Return what ``native.splat`` takes of the splats in a picture, nearest first, and which these are."""
    turn = camera.turn.astype(np.float32)
    directions = scene.positions - camera.place.astype(np.float32)[:, None]
    x, y, depth = turn @ directions
    z = np.maximum(depth, np.float32(camera.near))
    u, v = x / z, y / z
    (a, b, c), up = _form(scene.axes, turn, camera, u, v, z)
    limit = 2 * np.log(np.maximum(scene.opacities / np.float32(LEAST_ALPHA), 1))
    centre_x = np.float32(camera.focal) * u + np.float32(camera.width / 2 - 0.5)
    centre_y = np.float32(camera.focal) * v + np.float32(camera.height / 2 - 0.5)
    reach = np.sqrt(limit * up)
    aside = np.sqrt(limit * up * c / np.maximum(a, 1e-30))  # how far the form reaches left and right
    inside = (depth > camera.near) & (limit > 0) & np.isfinite(a + b + c)
    inside &= (centre_y + reach >= 0) & (centre_y - reach <= camera.height - 1)
    inside &= (centre_x + aside >= 0) & (centre_x - aside <= camera.width - 1)
    red, green, blue = shaded(scene.colours, directions)
    kept = np.flatnonzero(inside)
    kept = kept[np.argsort(z[kept], kind="stable")]
    # In the file's order up to here, which memory is read fastest in.
    columns = (centre_x, centre_y, a, b, c, limit, scene.opacities, red, green, blue, reach)
    return np.take(np.stack(columns, axis=1), kept, axis=0).astype(np.float32, copy=False), kept


def _form(
    axes: Array, turn: Array, camera: Camera, u: Array, v: Array, z: Array
) -> tuple[tuple[Array, Array, Array], Array]:
    """Return a, b, c of a dx² + 2 b dx dy + c dy² of each splat [n], and its variance up and down [n]."""
    n = len(z)
    right, down, forward = (turn @ axes.reshape(3, 3 * n)).reshape(3, 3, n)
    wide, high = (np.float32(BEYOND * size / 2 / camera.focal) for size in (camera.width, camera.height))
    scale = np.float32(camera.focal) / z
    across = scale * (right - np.clip(u, -wide, wide) * forward)
    upright = scale * (down - np.clip(v, -high, high) * forward)
    longest = np.maximum(np.abs(across), np.abs(upright))
    if longest.max(initial=0) > LONGEST:
        shorter = np.float32(LONGEST) / np.maximum(longest, np.float32(LONGEST))
        across, upright = across * shorter, upright * shorter
    xx, yy = (across * across).sum(0) + np.float32(WIDER), (upright * upright).sum(0) + np.float32(WIDER)
    xy = (across * upright).sum(0)
    inverse = 1 / np.maximum(xx * yy - xy * xy, np.float32(WIDER * WIDER))  # as much as widening leaves
    return (yy * inverse, -xy * inverse, xx * inverse), yy
