"""The cameras that a scene is judged by: around it and in its rooms, if any, or those that a user gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle

import numpy as np
import numpy.typing as npt

from thinwire.types import InputError, require
from thinwire.uses.scenes.scene import Splats
from thinwire.uses.scenes.view.cameras import (
    GIVEN,
    INSIDE,
    SIZE,
    Camera,
    Frame,
    focal_of,
    importance_views,
    reported_views,
    spread,
    turn_of,
)
from thinwire.uses.scenes.view.rooms import places_within

VIEWS = 4  # cameras of each kind that searches and measurements of noise look through
PLACES = 4  # in rooms
TILTED = (17, 12)  # degrees: not along walls, whose splats are all as far off and have no order then
# Faces of a cube by what is right, down and forward there, of a camera's rows 1 to 3, or their opposites.
FACES = ((1, 2, 3), (1, 3, -2), (-3, 2, 1), (-1, 2, -3), (1, -3, 2), (3, 2, -1))
WIDE, NARROW = 90.0, 70.0  # degrees that a picture within a scene shows: a chosen one, a reported one
REPORTED = ((45, -10), (135, 15), (225, -10), (315, 15))  # between the faces
ASIDE = 0.4  # of a place's room: how far off the reported cameras stand
NEAR = 0.05  # of a place's room, nearer than which nothing is drawn
FAR = 100.0  # times nearer than the radius given cameras draw nothing
CLOSE = 0.25  # the share of splats that is close to given cameras
HELD_OUT = 8  # of so many given cameras one is for reports, as the field holds photographs out
MOST = 192  # given cameras that are looked through
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Views:
    """The cameras of a scene: ``chosen`` ones say what matters, ``reported`` ones what became of it."""

    frame: Frame
    chosen: Sequence[Camera]
    reported: Sequence[Camera]

    @classmethod
    def of(cls, splats: Splats, size: int = SIZE) -> Views:
        """Return cameras around a scene and, where it has rooms, in them; ``size`` pixels both ways."""
        frame = Frame.of(splats)
        places = places_within(splats, frame, PLACES)
        faces = [_face(turn_of(*TILTED), face) for face in FACES]
        within = [
            _standing(place.at, place.room, faces[(face + i) % len(FACES)], WIDE, size)
            for i, place in enumerate(places)
            for face in range(len(FACES))  # in another order at each, so that a few of all look everywhere
        ]
        aside = [
            _standing(place.at - ASIDE * place.room * turn[2], place.room, turn, NARROW, size)
            for place, turn in zip(cycle(places), [turn_of(*look) for look in REPORTED], strict=False)
        ]
        return cls(frame, [*importance_views(frame, size), *within], [*reported_views(frame, size), *aside])

    @classmethod
    def given(cls, splats: Splats, cameras: Sequence[Camera]) -> Views:
        """Return the views of a user's cameras, of which every eighth is for reports, where there are two."""
        require(len(cameras) > 0, InputError, "there is no camera; give one at least")
        frame = _around(Frame.of(splats), splats, cameras)
        own = [
            replace(camera, kind=GIVEN, near=frame.radius / FAR)
            for camera in spread(cameras, min(MOST, len(cameras)))
        ]
        chosen = [camera for i, camera in enumerate(own) if i % HELD_OUT]
        return cls(frame, chosen or own, own[::HELD_OUT])

    @property
    def searched(self) -> list[Camera]:
        """The few of the chosen cameras, of each kind, that searches look through."""
        return [
            camera
            for kind in self.kinds
            for camera in spread([c for c in self.chosen if c.kind == kind], VIEWS)
        ]

    @property
    def kinds(self) -> list[str]:
        """The kinds of cameras there are."""
        return list(dict.fromkeys(camera.kind for camera in self.chosen))


def _standing(at: Floats, room: float, turn: Floats, angle: float, size: int) -> Camera:
    return Camera(at, turn, focal_of(angle, size), size, size, NEAR * room, INSIDE)


def _face(turn: Floats, face: tuple[int, int, int]) -> Floats:
    return np.stack([math.copysign(1, row) * turn[abs(row) - 1] for row in face])


def _around(frame: Frame, splats: Splats, cameras: Sequence[Camera]) -> Frame:
    """Return the frame of what given cameras stand in, where that is less than a scene with all its sky."""
    places = np.stack([camera.place for camera in cameras]).astype(np.float64)
    middle = np.median(places, axis=0)
    apart = float(np.median(np.linalg.norm(places - middle, axis=1)))
    nearest = float(np.quantile(np.linalg.norm(splats.positions - middle, axis=1), CLOSE))
    radius = max(2 * apart, nearest)
    x, y, z = middle.tolist()
    return Frame((x, y, z), radius) if 0 < radius < frame.radius else frame
