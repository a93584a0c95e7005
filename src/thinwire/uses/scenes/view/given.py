"""Cameras that a user gives, from the files that trainers of scenes leave.

``cameras.json`` as 3D Gaussian Splatting writes it, a folder of COLMAP, or ``transforms.json`` as nerfstudio
and Blender's scenes have it. A camera becomes a pinhole of the same field of view without distortion, whose
pictures have square pixels, and as many as 512 by 512 at most. Sources: ``camera_to_JSON`` of the first
[second-hand]; the pages on data formats of the others [quoted].
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from thinwire.types import WRONG_VALUES, InputError, PayloadError, require
from thinwire.uses.scenes.scene import FARTHEST
from thinwire.uses.scenes.view.cameras import GIVEN, SIZE, Camera
from thinwire.uses.scenes.view.project import rotation_matrices

MOST_NBYTES = 1 << 27  # of a JSON file
LEAST_PIXELS, MOST_PIXELS = 16, 1 << 20  # a side of a picture
NAMES = ("transforms.json", "cameras.json", "transforms_train.json")  # in a folder, the last as Blender's
STRAIGHT = 1e-3  # that axes of length 1 may be off
ASKED = "give a cameras.json of 3D Gaussian Splatting, a folder of COLMAP or a transforms.json"


def read_cameras(path: Path, size: int = SIZE) -> list[Camera]:
    """Return the cameras in a file or folder, by the names of their pictures.

    Their pictures have as many pixels as ``size`` by ``size`` at most. Errors: ``InputError``.
    """
    try:
        shots = list(_shots(path))
        require(bool(shots), PayloadError, "there is no camera in it")
        return [_camera(shot, size) for shot in sorted(shots, key=lambda shot: shot.name)]
    except OSError as e:
        raise InputError(f"cannot read cameras {e.filename or path}: {e.strerror or e}; {ASKED}") from e
    except (PayloadError, RecursionError, *WRONG_VALUES) as e:
        said = e if isinstance(e, PayloadError) else f"{type(e).__name__} {str(e)[:60]}"
        raise InputError(f"cannot read cameras {path}: {said}; {ASKED}") from e


def _shots(path: Path) -> Iterator[Shot]:
    if path.is_dir():
        found = [path / name for name in NAMES if (path / name).is_file()]
        folder = colmap_in(path)
        require(
            folder is not None or bool(found), PayloadError, "neither cameras.bin nor cameras.txt is there"
        )
        return read_colmap(folder) if folder is not None else _shots(found[0])
    require(path.stat().st_size <= MOST_NBYTES, PayloadError, f"more than {MOST_NBYTES} bytes")
    told = json.loads(path.read_bytes())
    if isinstance(told, dict) and "frames" in told:
        return (_of_frame(told | frame, i) for i, frame in enumerate(told["frames"]))
    require(isinstance(told, list), PayloadError, "neither a list of cameras nor frames are in it")
    return (_of_entry(entry, i) for i, entry in enumerate(told))


def _of_entry(told: dict[str, Any], i: int) -> Shot:
    """Return a camera of ``cameras.json``, whose rotation has right, down and forward as columns."""
    turn = np.array(told["rotation"], np.float64).reshape(3, 3).T
    place = np.array(told["position"], np.float64).reshape(3)
    size = float(told["width"]), float(told["height"])
    return Shot(str(told.get("img_name", i)), place, turn, *size, float(told["fx"]), float(told["fy"]))


def _of_frame(told: dict[str, Any], i: int) -> Shot:
    """Return a camera of ``transforms.json``, whose matrix has right, up and backward as columns."""
    matrix = np.array(told["transform_matrix"], np.float64).reshape(-1, 4)
    turn = matrix[:3, :3].T * np.array([[1.0], [-1.0], [-1.0]])
    name = str(told.get("file_path", i))
    lengths = np.linalg.norm(turn, axis=1, keepdims=True)  # some have a scale in them
    require(bool(lengths.all()), PayloadError, f"camera {name[:60]!r} has a rotation that is none")
    turn = turn / lengths
    wide = float(told.get("w", 2 * float(told.get("cx", SIZE / 2))))
    high = float(told.get("h", 2 * float(told.get("cy", wide / 2))))
    across = told["fl_x"] if "fl_x" in told else wide / 2 / math.tan(_angle(told["camera_angle_x"]) / 2)
    return Shot(name, matrix[:3, 3], turn, wide, high, float(across), float(told.get("fl_y", across)))


def _angle(told: Any) -> float:
    wrong = f"a camera_angle_x of {str(told)[:20]}, which is no angle in radians"
    require(0 < float(told) < math.pi, PayloadError, wrong)
    return float(told)


def _camera(shot: Shot, size: int) -> Camera:
    name, sides = shot.name[:60], (shot.width, shot.height)
    numbers = [*shot.place, *shot.turn.ravel(), *sides, shot.across, shot.upright]
    told = f"camera {name!r} has a number that is not finite, or above {FARTHEST:g}"
    require(bool((np.abs(numbers) < FARTHEST).all()), PayloadError, told)
    few = f"camera {name!r} has pictures of {sides[0]:g} by {sides[1]:g} pixels"
    require(all(1 <= side <= MOST_PIXELS for side in sides), PayloadError, few)
    good = all(1e-3 < focal / side < 1e3 for focal in (shot.across, shot.upright) for side in sides)
    told = f"camera {name!r} has focal lengths of {shot.across:g} and {shot.upright:g} pixels"
    require(good, PayloadError, told)
    require(_turns(shot.turn), PayloadError, f"camera {name!r} has a rotation that is none")
    high = shot.height * shot.across / shot.upright  # in square pixels
    smaller = min(1.0, size / math.sqrt(shot.width * high))
    width, height = (round(side * smaller) for side in (shot.width, high))
    require(min(width, height) >= min(size, LEAST_PIXELS), PayloadError, few)
    return Camera(shot.place, shot.turn, shot.across * smaller, width, height, kind=GIVEN)


def _turns(turn: npt.NDArray[np.float64]) -> bool:
    return bool(np.allclose(turn @ turn.T, np.eye(3), atol=STRAIGHT) and np.linalg.det(turn) > 0)


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


def colmap_in(folder: Path) -> Path | None:
    """Return the folder of a sparse model in a project's folder; none where there is none."""
    for where in WHERE:
        if any((folder / where / f"cameras.{end}").is_file() for end in ("bin", "txt")):
            return folder / where
    return None


def read_colmap(folder: Path) -> Iterator[Shot]:
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
