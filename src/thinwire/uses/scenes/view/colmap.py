"""Cameras of COLMAP: the files ``cameras`` and ``images`` of a sparse model, as ``.bin`` or ``.txt``.

Source: COLMAP's page "Output Format" [quoted], and the parameters of its camera models [quoted].
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from thinwire.types import PayloadError, require
from thinwire.uses.scenes.view.project import rotation_matrices

# Models by their numbers: how many parameters they have, and whether two of these are focal lengths.
MODELS = {"SIMPLE_PINHOLE": (3, False), "PINHOLE": (4, True), "SIMPLE_RADIAL": (4, False)}
MODELS |= {"RADIAL": (5, False), "OPENCV": (8, True), "OPENCV_FISHEYE": (8, True)}
MODELS |= {"FULL_OPENCV": (12, True), "FOV": (5, True), "SIMPLE_RADIAL_FISHEYE": (4, False)}
MODELS |= {"RADIAL_FISHEYE": (5, False), "THIN_PRISM_FISHEYE": (12, True)}
MODELS |= {"RAD_TAN_THIN_PRISM_FISHEYE": (16, True)}
WHERE = (".", "sparse/0", "sparse", "0", "colmap/sparse/0")  # in a project's folder
CAMERA, IMAGE = struct.Struct("<iiQQ"), struct.Struct("<i4d3di")  # ids; a quaternion and a shift
POINT = 24  # bytes of a point of an image
MOST_NAME = 4096  # characters
Lens = tuple[float, float, float, float]  # width and height, focal lengths across and upright, in pixels


class Shot(NamedTuple):
    """A camera as a file says it: rows of ``turn`` [3, 3] are right, down and forward; lengths in pixels."""

    name: str
    place: npt.NDArray[np.float64]
    turn: npt.NDArray[np.float64]
    width: float
    height: float
    across: float  # focal lengths
    upright: float


def model_in(folder: Path) -> Path | None:
    """Return the folder of a sparse model in a project's folder; none where there is none."""
    for where in WHERE:
        if any((folder / where / f"cameras.{end}").is_file() for end in ("bin", "txt")):
            return folder / where
    return None


def read(folder: Path) -> Iterator[Shot]:
    """Yield the cameras of a model. Errors: ``PayloadError``, ``OSError``, ``ValueError``."""
    if (folder / "cameras.bin").is_file():
        with (folder / "cameras.bin").open("rb") as file:
            lenses = dict(_lenses(file))
        with (folder / "images.bin").open("rb") as file:
            yield from _images(file, lenses)
        return
    with (folder / "cameras.txt").open(encoding="utf-8", errors="replace") as text:
        lenses = dict(_lens_in(line.split()) for line in text if line.strip() and line[0] != "#")
    with (folder / "images.txt").open(encoding="utf-8", errors="replace") as text:
        lines = (line for line in text if not line.startswith("#"))
        for line in lines:
            words = line.split(maxsplit=9)
            if not words:
                continue
            require(len(words) == 10, PayloadError, f"images.txt has a wrong line {line[:40]!r}")
            next(lines, "")  # the points of the image
            yield _shot(words[9].strip(), [float(x) for x in words[1:8]], int(words[8]), lenses)


def _lens_in(words: list[str]) -> tuple[int, Lens]:
    require(len(words) > 4, PayloadError, f"cameras.txt has a wrong line {' '.join(words)[:40]!r}")
    return int(words[0]), _lens(words[1], float(words[2]), float(words[3]), [float(x) for x in words[4:]])


def _lens(model: str, width: float, height: float, numbers: list[float]) -> Lens:
    require(model in MODELS, PayloadError, f"a camera model {model!r:.40}; {', '.join(MODELS)} are known")
    count, two = MODELS[model]
    require(len(numbers) == count, PayloadError, f"{model} with {len(numbers)} parameters, expected {count}")
    return width, height, numbers[0], numbers[1] if two else numbers[0]


def _lenses(file: BinaryIO) -> Iterator[tuple[int, Lens]]:
    (many,) = struct.unpack("<Q", _taken(file, 8))
    for _ in range(_few(file, many, CAMERA.size)):
        number, model, width, height = CAMERA.unpack(_taken(file, CAMERA.size))
        names = list(MODELS)
        require(0 <= model < len(names), PayloadError, f"a camera model of number {model}")
        count = MODELS[names[model]][0]
        numbers = list(struct.unpack(f"<{count}d", _taken(file, 8 * count)))
        yield number, _lens(names[model], float(width), float(height), numbers)


def _images(file: BinaryIO, lenses: Mapping[int, Lens]) -> Iterator[Shot]:
    (many,) = struct.unpack("<Q", _taken(file, 8))
    for _ in range(_few(file, many, IMAGE.size)):
        _, *pose, camera = IMAGE.unpack(_taken(file, IMAGE.size))
        name = bytearray()
        while (letter := _taken(file, 1)) != b"\0":
            name += letter
            require(len(name) < MOST_NAME, PayloadError, "an image's name without an end")
        (points,) = struct.unpack("<Q", _taken(file, 8))
        file.seek(_few(file, points, POINT) * POINT, os.SEEK_CUR)
        yield _shot(name.decode("utf-8", "replace"), [float(x) for x in pose], int(camera), lenses)


def _shot(name: str, pose: list[float], camera: int, lenses: Mapping[int, Lens]) -> Shot:
    """Return a camera of its way from the world to what it sees: a quaternion w, x, y, z and a shift."""
    require(camera in lenses, PayloadError, f"image {name[:40]!r} is of camera {camera}, which is not there")
    quaternion = np.array([pose[:4]])
    length = float(np.linalg.norm(quaternion))
    require(0.5 < length < 2, PayloadError, f"image {name[:40]!r} has a quaternion of length {length:g}")
    turn = rotation_matrices(quaternion)[:, :, 0].astype(np.float64)
    return Shot(name, -turn.T @ np.array(pose[4:]), turn, *lenses[camera])


def _taken(file: BinaryIO, nbytes: int) -> bytes:
    data = file.read(nbytes)
    require(len(data) == nbytes, PayloadError, f"{Path(file.name).name} was cut short")
    return data


def _few(file: BinaryIO, many: int, nbytes: int) -> int:
    """Return how many there are, which the rest of the file has room for at so many bytes each, at least."""
    left = os.fstat(file.fileno()).st_size - file.tell()
    told = f"{Path(file.name).name} says {many} of {nbytes} bytes where {left} bytes are left"
    require(many * nbytes <= left, PayloadError, told)
    return many
