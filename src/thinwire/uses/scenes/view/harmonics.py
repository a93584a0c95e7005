"""Colours of splats as a camera sees them: real spherical harmonics of degree 0 to 3.

Source: "Efficient Spherical Harmonic Evaluation" (P.-P. Sloan, JCGT 2013), with the signs that files of
Gaussians use.
"""

from __future__ import annotations

import math

import numpy as np

from thinwire.uses.scenes.scene import Array

CONSTANT = 0.5 / math.sqrt(math.pi)
FIRST = math.sqrt(3 / (4 * math.pi))
SECOND = [f * math.sqrt(g / math.pi) for f, g in ((0.5, 15), (-0.5, 15), (0.25, 5), (-0.5, 15), (0.25, 15))]
THIRD = [
    f * math.sqrt(g / math.pi)
    for f, g in (
        (-0.25, 17.5),
        (0.5, 105),
        (-0.25, 10.5),
        (0.25, 7),
        (-0.25, 10.5),
        (0.25, 105),
        (-0.25, 17.5),
    )
]


def basis(directions: Array, coefficients: int) -> Array:
    """Return the values [1 + coefficients, n] of directions [3, n] of any length."""
    length = np.sqrt((directions * directions).sum(0))
    x, y, z = directions / np.where(length > 0, length, np.float32(1))
    xx, yy, zz = x * x, y * y, z * z
    values = [np.full_like(x, CONSTANT), -FIRST * y, FIRST * z, -FIRST * x]
    if coefficients > 3:
        second = (x * y, y * z, 2 * zz - xx - yy, x * z, xx - yy)
        values += [k * v for k, v in zip(SECOND, second, strict=True)]
    if coefficients > 8:
        out = 4 * zz - xx - yy
        third = [y * (3 * xx - yy), x * y * z, y * out, z * (2 * zz - 3 * xx - 3 * yy), x * out]
        third += [z * (xx - yy), x * (xx - 3 * yy)]
        values += [k * v for k, v in zip(THIRD, third, strict=True)]
    return np.array(values[: 1 + coefficients], dtype=np.float32)


def shaded(colours: Array, directions: Array) -> Array:
    """Return the colours [3, n] of coefficients [1 + k, 3, n] from these directions [3, n], none below 0."""
    values = basis(directions, len(colours) - 1)
    total = np.full(colours.shape[1:], 0.5, np.float32)
    for value, coefficients in zip(values, colours, strict=True):
        total += value * coefficients
    return np.maximum(total, 0)
