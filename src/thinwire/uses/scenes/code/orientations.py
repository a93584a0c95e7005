"""Rotations of splats: as Euler's angles, and as the smallest of those that show the same ellipsoid.

An ellipsoid looks the same after a quarter turn about one of its axes that swaps the other two, and after
half turns. Of its 24 rotations the smallest is at most 63 degrees, so w is the largest component and follows
from the others, which take fewer bits.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from thinwire.uses.scenes.scene import Array
from thinwire.uses.scenes.view.project import rotation_matrices

Floats = npt.NDArray[np.float64]


def unit(rotations: npt.NDArray[np.floating]) -> Floats:
    """Return rotations [n, 4] of length 1; a zero one turns nothing."""
    q = rotations.astype(np.float64)
    length = np.linalg.norm(q, axis=1, keepdims=True)
    return np.where(length > 0, q / np.where(length > 0, length, 1), [1.0, 0.0, 0.0, 0.0])


def product(p: Floats, q: Floats) -> Floats:
    """Return p q, rotations [..., 4] as w, x, y, z: first q, then p."""
    pw, px, py, pz = np.moveaxis(p, -1, 0)
    qw, qx, qy, qz = np.moveaxis(q, -1, 0)
    parts = (
        pw * qw - px * qx - py * qy - pz * qz,
        pw * qx + px * qw + py * qz - pz * qy,
        pw * qy - px * qz + py * qw + pz * qx,
        pw * qz + px * qy - py * qx + pz * qw,
    )
    return np.stack(parts, axis=-1)


def _cube() -> tuple[Floats, npt.NDArray[np.int64]]:
    """Return the 24 rotations of a cube [24, 4], and where each takes the three scales from [24, 3]."""
    half = 0.5**0.5
    found = [np.array(q) for q in itertools.product((0.0, 1.0, -1.0, half, -half, 0.5, -0.5), repeat=4)]
    found = [q for q in found if abs(np.linalg.norm(q) - 1) < 1e-9 and next(v for v in q if v) > 0]
    turns = np.stack(found)
    matrices = rotation_matrices(turns.astype(np.float32)).transpose(2, 0, 1)
    whole = np.abs(np.abs(matrices) - np.round(np.abs(matrices))).max((1, 2)) < 1e-6
    return turns[whole], np.abs(matrices[whole]).argmax(1)


_TURNS, _FROM = _cube()


def smallest(rotations: Array, log_scales: Array) -> tuple[Floats, Array]:
    """Return rotations [n, 4] of length 1 and scales [n, 3] that show the same ellipsoids, w the largest."""
    q = unit(rotations)
    best = np.abs(q @ (_TURNS * [1, -1, -1, -1]).T).argmax(1)  # of the products' w
    turned = product(q, _TURNS[best])
    turned *= np.where(turned[:, :1] < 0, -1, 1)
    return turned, np.take_along_axis(log_scales, _FROM[best], axis=1)


def whole(vectors: npt.NDArray[np.floating]) -> Array:
    """Return rotations [n, 4] of their components x, y, z [n, 3], shortened where they are too long."""
    v = vectors.astype(np.float64)
    square = (v * v).sum(1, keepdims=True)
    v = np.where(square > 1, v / np.sqrt(np.maximum(square, 1)), v)
    w = np.sqrt(np.maximum(1 - np.minimum(square, 1), 0))
    return np.concatenate([w, v], axis=1).astype(np.float32)


def to_euler(rotations: Array) -> Floats:
    """Return roll, pitch and yaw [n, 3] in radians."""
    w, x, y, z = unit(rotations).T
    roll = np.arctan2(2 * (w * x + y * z), 1 - 2 * (x * x + y * y))
    pitch = np.arcsin(np.clip(2 * (w * y - z * x), -1, 1))
    return np.stack([roll, pitch, np.arctan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z))], axis=1)


def from_euler(angles: npt.NDArray[np.floating]) -> Array:
    """Return rotations [n, 4] of roll, pitch and yaw [n, 3]."""
    (cr, cp, cy), (sr, sp, sy) = np.cos(angles.T / 2), np.sin(angles.T / 2)
    parts = (
        cr * cp * cy + sr * sp * sy,
        sr * cp * cy - cr * sp * sy,
        cr * sp * cy + sr * cp * sy,
        cr * cp * sy - sr * sp * cy,
    )
    return np.stack(parts, axis=1).astype(np.float32)


def of_matrices(matrices: Floats) -> Floats:
    """Return the rotations [n, 4] that matrices [n, 3, 3] are, of length 1.

    Source: S. W. Shepperd, Journal of Guidance and Control 1 (1978): the largest component first.
    """
    m = matrices
    x, y, z = m[:, 0, 0], m[:, 1, 1], m[:, 2, 2]
    squares = np.stack([1 + x + y + z, 1 + x - y - z, 1 - x + y - z, 1 - x - y + z], axis=1)
    a, b, c = m[:, 2, 1] - m[:, 1, 2], m[:, 0, 2] - m[:, 2, 0], m[:, 1, 0] - m[:, 0, 1]
    d, e, f = m[:, 1, 0] + m[:, 0, 1], m[:, 0, 2] + m[:, 2, 0], m[:, 2, 1] + m[:, 1, 2]
    w, i, j, k = squares.T
    rows = np.stack(
        [[w, a, b, c], [a, i, d, e], [b, d, j, f], [c, e, f, k]]
    )  # each a multiple of the rotation
    return unit(rows[squares.argmax(1), :, np.arange(len(m))])
