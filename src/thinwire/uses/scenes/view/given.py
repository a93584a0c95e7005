"""Cameras that a user gives, from the files that trainers of scenes leave.

``cameras.json`` as 3D Gaussian Splatting writes it, a folder of COLMAP, or ``transforms.json`` as nerfstudio
and Blender's scenes have it. A camera becomes a pinhole of the same field of view without distortion, whose
pictures have square pixels, and as many as 512 by 512 at most. Sources: ``camera_to_JSON`` of the first
[second-hand]; the pages on data formats of the others [quoted].
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinwire.types import WRONG_VALUES, InputError, PayloadError, require
from thinwire.uses.scenes.scene import FARTHEST
from thinwire.uses.scenes.view import colmap
from thinwire.uses.scenes.view.cameras import GIVEN, SIZE, Camera
from thinwire.uses.scenes.view.colmap import Shot

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
        folder = colmap.model_in(path)
        require(
            folder is not None or bool(found), PayloadError, "neither cameras.bin nor cameras.txt is there"
        )
        return colmap.read(folder) if folder is not None else _shots(found[0])
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
