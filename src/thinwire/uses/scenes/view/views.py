"""The cameras that a scene is judged by: around it and in its rooms, if any, or those that a user gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from thinwire.types import InputError, require
from thinwire.uses.scenes.scene import Splats
from thinwire.uses.scenes.view.cameras import (
    GIVEN,
    INSIDE,
    SIZE,
    Camera,
    SceneFrame,
    focal_of,
    importance_views,
    reported_views,
    spread,
    turn_of,
)
from thinwire.uses.scenes.view.project import rotation_matrices

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

    frame: SceneFrame
    chosen: Sequence[Camera]
    reported: Sequence[Camera]

    @classmethod
    def of(cls, splats: Splats, size: int = SIZE) -> Views:
        """Return cameras around a scene and, where it has rooms, in them; ``size`` pixels both ways."""
        frame = SceneFrame.of(splats)
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
        frame = _around(SceneFrame.of(splats), splats, cameras)
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


def _around(frame: SceneFrame, splats: Splats, cameras: Sequence[Camera]) -> SceneFrame:
    """Return the frame of what given cameras stand in, where that is less than a scene with all its sky."""
    places = np.stack([camera.place for camera in cameras]).astype(np.float64)
    middle = np.median(places, axis=0)
    apart = float(np.median(np.linalg.norm(places - middle, axis=1)))
    nearest = float(np.quantile(np.linalg.norm(splats.positions - middle, axis=1), CLOSE))
    radius = max(2 * apart, nearest)
    x, y, z = middle.tolist()
    return SceneFrame((x, y, z), radius) if 0 < radius < frame.radius else frame


CELLS, HALF = 60, 1.25  # cells along each axis, and half the grid's length in radii of the frame
MATTER = 0.1  # of a cell's face that splats cover
POINTS, MOST_POINTS = 256, 2_000_000  # of a splat larger than a cell, and of all of them
STANDING = 1  # cells around a place without matter, at least
TRIED, DIRECTIONS = 300, 100  # places that are looked around from, and rays from each
AROUND = 0.6  # of the rays that meet matter, where a place is in a room
WORTH = 0.02  # of the frame's ball that rooms take, or there are none
ROOMY = 0.4  # of the widest place's room that the others have
Cells = npt.NDArray[np.bool_]


class Standpoint(NamedTuple):
    """A place [3] to stand at, and how far off the nearest matter is, at least."""

    at: Floats
    room: float


def places_within(splats: Splats, frame: SceneFrame, most: int) -> list[Standpoint]:
    """Return up to ``most`` places, far from each other, in the rooms of a scene; none where it has none."""
    cell = 2 * HALF * frame.radius / CELLS
    room = _room(_matter(splats, frame, cell))
    free = np.argwhere(room > STANDING)
    off = ((free + 0.5) * cell) - HALF * frame.radius  # from the middle
    free = free[np.linalg.norm(off, axis=1) < frame.radius]
    if not len(free):
        return []
    tried = free[np.random.default_rng(0).permutation(len(free))[:TRIED]]
    within = tried[_surrounded(tried, room == 0) >= AROUND]
    volume = len(within) / len(tried) * len(free) * cell**3
    if volume < WORTH * 4 / 3 * np.pi * frame.radius**3:
        return []
    corner = np.array(frame.middle) - HALF * frame.radius
    return [
        Standpoint(corner + (at + 0.5) * cell, (float(room[tuple(at)]) - 0.5) * cell)
        for at in _apart(within, room, most)
    ]


def _matter(splats: Splats, frame: SceneFrame, cell: float) -> Cells:
    """Return which cells [CELLS, CELLS, CELLS] hold matter; what is farther out counts at the border."""
    with np.errstate(over="ignore"):
        alpha = 1 / (1 + np.exp(-splats.opacities.astype(np.float64)))
        scales = np.sort(np.exp(splats.log_scales.astype(np.float64)), axis=1)
    covered = alpha * np.minimum(np.pi * scales[:, 2] * scales[:, 1] / cell**2, 1)
    large = np.flatnonzero((scales[:, 2] > cell / 2) & (alpha > MATTER))
    small = np.setdiff1d(np.arange(splats.count), large, assume_unique=True)
    held = np.zeros(CELLS**3)
    held += np.bincount(_cells(splats.positions[small], frame, cell), covered[small], CELLS**3)
    if len(large):
        each = int(np.clip(MOST_POINTS // len(large), 1, POINTS))
        draw = np.random.default_rng(0).normal(size=(each, 3)).clip(-2, 2)
        axes = rotation_matrices(splats.rotations[large]) * np.exp(splats.log_scales[large].T)
        for point in draw:
            places = splats.positions[large] + np.einsum("ikn,k->ni", axes, point)
            held[_cells(places, frame, cell)] += MATTER
    return (held >= MATTER).reshape(CELLS, CELLS, CELLS)


def _cells(places: npt.NDArray[np.floating], frame: SceneFrame, cell: float) -> npt.NDArray[np.int64]:
    off = places.astype(np.float64) - frame.middle + HALF * frame.radius
    at = np.clip(off / cell, 0, CELLS - 1).astype(np.int64)
    return np.asarray(at @ np.array([CELLS * CELLS, CELLS, 1]), np.int64)


def _room(matter: Cells) -> npt.NDArray[np.int64]:
    """Return how many cells off, along the axes or across, the nearest matter is; 0 where there is some."""
    room, near = np.zeros(matter.shape, np.int64), matter
    while not near.all():
        room += ~near
        grown = near
        for axis in range(3):
            was, grown = grown.swapaxes(0, axis), grown.copy()
            wider = grown.swapaxes(0, axis)
            wider[1:] |= was[:-1]
            wider[:-1] |= was[1:]
        if np.array_equal(grown, near):  # there is no matter
            break
        near = grown
    return room


def _surrounded(places: npt.NDArray[np.int64], matter: Cells) -> Floats:
    """Return the share of directions, even over the sphere, in which matter is met from each place [n, 3]."""
    k = np.arange(DIRECTIONS) + 0.5
    height, turn = 1 - 2 * k / DIRECTIONS, np.pi * (1 + 5**0.5) * k
    flat = np.sqrt(1 - height * height)
    rays = np.stack([flat * np.cos(turn), height, flat * np.sin(turn)], axis=1)
    start, ways = np.repeat(places, DIRECTIONS, 0).T + 0.5, np.tile(rays, (len(places), 1)).T
    met, left = np.zeros(start.shape[1], bool), np.arange(start.shape[1])  # rays that go on
    for step in range(1, int(2 * CELLS * 3**0.5)):  # half a cell at a time
        at = np.floor(start[:, left] + 0.5 * step * ways[:, left])
        inside = ((at >= 0) & (at < CELLS)).all(0)
        x, y, z = at[:, inside].astype(np.int64)
        hit, left = matter[x, y, z], left[inside]
        met[left[hit]], left = True, left[~hit]
        if not len(left):
            break
    return np.asarray(met.reshape(len(places), DIRECTIONS).mean(1), np.float64)


def _apart(
    within: npt.NDArray[np.int64], room: npt.NDArray[np.int64], most: int
) -> list[npt.NDArray[np.int64]]:
    """Return up to ``most`` of the places, the roomiest first, then each far from those before."""
    own = room[tuple(within.T)]
    first = within[int(np.argmax(own))]
    found, left = [first], within[own >= ROOMY * own.max()]
    off = np.linalg.norm(left - first, axis=1)
    while len(found) < most and off.max() > STANDING:
        found.append(left[int(np.argmax(off))])
        off = np.minimum(off, np.linalg.norm(left - found[-1], axis=1))
    return found
