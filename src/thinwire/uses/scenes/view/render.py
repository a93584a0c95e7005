"""Pictures of a scene on a CPU: splats front to back, each over what those before it let through.

The compiled pass and numpy agree to 1e-4 in every pixel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from thinwire import compiled
from thinwire.similarity import mse, psnr, ssim
from thinwire.types import InputError, require
from thinwire.uses.scenes.scene import Array, Splats
from thinwire.uses.scenes.view.cameras import Camera
from thinwire.uses.scenes.view.project import Drawable, project

LEAST_THROUGH = 1e-4  # a pixel that lets less through is done
MOST_ALPHA = 0.99
FIELDS, LANES = 11, 8  # of kernels.c
FUNCTIONS = compiled.functions(Path(__file__).parent, ["splat", "back"])
there, without = FUNCTIONS.there, FUNCTIONS.without


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
    return *drawn(rows, camera), which


def drawn(rows: Array, camera: Camera) -> tuple[Array, npt.NDArray[np.float64]]:
    """Return a picture [height, width, 3] of what ``project`` found, and sums [n, 2] as of ``Seen``."""
    planes = np.zeros((4, camera.height, camera.width), np.float32)
    planes[3] = 1
    sums = (compiled_splat if there() else plain_splat)(rows, planes, LEAST_THROUGH)
    return np.ascontiguousarray(planes[:3].transpose(1, 2, 0)), sums


def plain_splat(rows: Array, planes: Array, least: float) -> npt.NDArray[np.float64]:
    """Do what ``compiled_splat`` does, without a compiler."""
    sums = np.zeros((len(rows), 2))
    for i, row in enumerate(rows):
        box = box_of(row, planes.shape[1:])
        if box is None:
            continue
        inside, alpha = alpha_of(row, box)
        through = planes[3][box]
        weight = np.where(inside & (through >= np.float32(least)), alpha * through, np.float32(0))
        for plane, colour in zip(planes, row[7:10], strict=False):
            plane[box] += weight * colour
        through -= weight
        sums[i] = weight.sum(dtype=np.float64), (weight * weight).sum(dtype=np.float64)
    return sums


def box_of(row: Array, size: tuple[int, ...]) -> tuple[slice, slice] | None:
    """Return the pixels around a splat; None where none is in the picture."""
    x, y, _, _, c, limit, up = (float(v) for v in (*row[:6], row[10]))
    aside = up * (c / float(row[2])) ** 0.5
    rows = slice(max(0, int(np.ceil(y - up))), min(size[0], int(np.floor(y + up)) + 1))
    columns = slice(max(0, int(np.floor(x - aside)) - 1), min(size[1], int(np.ceil(x + aside)) + 2))
    return (rows, columns) if limit > 0 and rows.start < rows.stop and columns.start < columns.stop else None


def alpha_of(row: Array, box: tuple[slice, slice]) -> tuple[npt.NDArray[np.bool_], Array]:
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


def compiled_splat(
    rows: npt.NDArray[np.float32], planes: npt.NDArray[np.float32], least: float
) -> npt.NDArray[np.float64]:
    """Draw splats [n, FIELDS], the nearest first, on planes [4, height, width]; return sums [n, 2].

    Of each splat's weights, and of their squares. Planes are red, green, blue, and what is let through.
    """
    room, sums = compiled_pass("splat", rows, planes, 4, 2, least)
    planes[...] = room[: planes.size].reshape(planes.shape)
    return sums


def compiled_pass(
    name: str,
    rows: npt.NDArray[np.float32],
    planes: npt.NDArray[np.float32],
    many: int,
    wide: int,
    least: float,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float64]]:
    """Pass over splats [n, FIELDS] by a function of ``kernels.c``, on a copy of planes [many, height, width].

    Return the copy, flat, and sums [n, ``wide``]. Errors: ``InputError`` for other shapes.
    """
    require(rows.ndim == 2 and rows.shape[1] == FIELDS, InputError, f"splats of shape {rows.shape}")
    require(planes.ndim == 3 and len(planes) == many, InputError, f"planes of shape {planes.shape}")
    room = np.zeros(planes.size + LANES, np.float32)  # a row's last lanes reach behind it
    room[: planes.size] = planes.reshape(-1)
    sums = np.zeros((len(rows), wide))
    size = ctypes.c_int64(planes.shape[2]), ctypes.c_int64(planes.shape[1]), ctypes.c_float(least)
    given = address(rows, np.float32), ctypes.c_size_t(len(rows)), *size, address(room, np.float32)
    FUNCTIONS[name](*given, address(sums, np.float64))
    return room, sums


def address(array: npt.NDArray[Any], kind: type) -> ctypes.c_void_p:
    """Return where an array lies. Errors: ``InputError`` where it is of another kind, or in pieces."""
    good = array.dtype == kind and array.flags.c_contiguous and array.flags.aligned
    require(good, InputError, f"{array.dtype}, expected {kind.__name__} in one piece of memory")
    return ctypes.c_void_p(array.__array_interface__["data"][0])


class Pictures:
    """Pictures of a scene by some cameras, to compare others with.

    Cameras of several kinds are told apart: what is said of all is what the worst kind has, so that pictures
    from afar do not hide what is wrong close by.
    """

    def __init__(self, splats: Splats, cameras: Sequence[Camera]) -> None:
        self._cameras = cameras
        self._pictures = self.of(splats)

    def of(self, splats: Splats) -> list[Array]:
        """Return another scene's pictures by the same cameras."""
        scene = Drawable.of(splats)
        return [render(scene, camera) for camera in self._cameras]

    def error(self, others: Sequence[Array]) -> float:
        """Return the mean square error of another scene's pictures."""
        return max(self._by_kind(mse, others).values())

    def psnr(self, others: Sequence[Array]) -> float:
        """Return the PSNR of another scene's pictures in dB, by the mean of all errors."""
        return psnr(self.error(others))

    def ssim(self, others: Sequence[Array]) -> float:
        """Return the structural similarity of another scene's pictures, the mean of all."""
        return min(self._by_kind(ssim, others).values())

    def by_kind(self, others: Sequence[Array]) -> dict[str, tuple[int, float, float]]:
        """Return by kind of camera how many there are, and another scene's PSNR in dB and SSIM there."""
        kinds = [camera.kind for camera in self._cameras]
        errors, alike = self._by_kind(mse, others), self._by_kind(ssim, others)
        return {kind: (kinds.count(kind), psnr(errors[kind]), alike[kind]) for kind in errors}

    def _by_kind(self, of: Callable[[Array, Array], float], others: Sequence[Array]) -> dict[str, float]:
        found = dict[str, list[float]]()
        for camera, a, b in zip(self._cameras, self._pictures, others, strict=True):
            found.setdefault(camera.kind, []).append(of(a, b))
        return {kind: float(np.mean(values)) for kind, values in found.items()}
