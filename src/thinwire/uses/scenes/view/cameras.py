"""Cameras around a scene: rings for importance, and others between them for what is reported."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from thinwire.uses.scenes.scene import Splats

SIZE = 512  # pixels, both ways
ANGLE = 45.0  # degrees that a picture shows
MARGIN = 1.05
WITHIN = 0.95  # the share of a scene's weight that the pictures hold
RINGS, AROUND = (-20.0, 10.0, 40.0), 8  # degrees above the scene's middle, and cameras a ring
BETWEEN = (-5.0, 25.0, -5.0, 25.0)  # degrees of the reported ones
REACH, LOGS = 3.0, 23.0  # deviations that a splat is seen to; a bound of logarithms
UP = (0.0, -1.0, 0.0)  # files of Gaussians have y downwards
OUTSIDE, INSIDE, GIVEN = "around the scene", "within the scene", "as given"  # kinds of cameras


@dataclass(frozen=True, eq=False)
class Camera:
    """A pinhole camera: rows of ``turn`` [3, 3] are right, down and forward; lengths in pixels."""

    place: npt.NDArray[np.float64]
    turn: npt.NDArray[np.float64]
    focal: float
    width: int = SIZE
    height: int = SIZE
    near: float = 0.01
    kind: str = OUTSIDE  # of where it stands


@dataclass(frozen=True)
class SceneFrame:
    """The ball that a scene is in, but for what lies far out: its middle and radius."""

    middle: tuple[float, float, float]
    radius: float

    @classmethod
    def of(cls, splats: Splats) -> SceneFrame:
        """Return the frame of a scene, whose splats count by their opacity."""
        with np.errstate(over="ignore"):
            weight = 1 / (1 + np.exp(-splats.opacities.astype(np.float64)))
        weight = weight if weight.any() else np.ones(splats.count)
        places = splats.positions.astype(np.float64)
        middle = np.array([_quantile(x, weight, 0.5) for x in places.T])
        radius = _quantile(np.linalg.norm(places - middle, axis=1), weight, WITHIN)
        if not radius:  # all at one place: as far as their sizes reach
            sizes = np.exp(np.clip(splats.log_scales.astype(np.float64), -LOGS, LOGS))
            radius = REACH * _quantile(sizes.max(1), weight, 0.5)
        return cls((float(middle[0]), float(middle[1]), float(middle[2])), radius)


def _quantile(x: npt.NDArray[np.float64], weight: npt.NDArray[np.float64], share: float) -> float:
    order = np.argsort(x, kind="stable")
    total = np.cumsum(weight[order])
    return float(x[order[min(np.searchsorted(total, share * total[-1]), len(x) - 1)]])


def turn_of(azimuth: float, elevation: float) -> npt.NDArray[np.float64]:
    """Return right, down and forward [3, 3] of who looks from an angle in degrees at the middle."""
    around, above = math.radians(azimuth), math.radians(elevation)
    up = np.array(UP)
    out = math.cos(above) * np.array([math.sin(around), 0.0, math.cos(around)]) + math.sin(above) * up
    right = np.cross(-out, up)
    right /= np.linalg.norm(right)
    return np.stack([right, np.cross(-out, right), -out])


def focal_of(angle: float, size: int) -> float:
    """Return the focal length in pixels that shows an angle in degrees on so many pixels."""
    return size / 2 / math.tan(math.radians(angle) / 2)


def look_at(frame: SceneFrame, azimuth: float, elevation: float, size: int = SIZE) -> Camera:
    """Return a camera that sees the whole frame from an angle in degrees."""
    turn = turn_of(azimuth, elevation)
    distance = frame.radius * MARGIN / math.sin(math.radians(ANGLE) / 2)
    place = np.array(frame.middle) - turn[2] * distance
    return Camera(place, turn, focal_of(ANGLE, size), size, size, distance / 50)


def importance_views(frame: SceneFrame, size: int = SIZE) -> list[Camera]:
    """Return 24 cameras on three rings: those that say how much each splat is seen."""
    return [look_at(frame, i * 360 / AROUND, ring, size) for ring in RINGS for i in range(AROUND)]


def reported_views(frame: SceneFrame, size: int = SIZE) -> list[Camera]:
    """Return 4 cameras between those of ``importance_views``: those of what is reported."""
    return [look_at(frame, (i * 2 + 0.5) * 360 / AROUND, e, size) for i, e in enumerate(BETWEEN)]


def spread(cameras: Sequence[Camera], count: int) -> list[Camera]:
    """Return ``count`` of the cameras, evenly among them."""
    step = len(cameras) / count
    return [cameras[int((i + 0.5) * step)] for i in range(min(count, len(cameras)))]
