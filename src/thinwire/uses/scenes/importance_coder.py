"""Our own coder of scenes: every attribute in uniform steps of equal cost to the pictures.

Positions are an octree with neighbour contexts. Steps of an attribute go with its measured sensitivity, and
double from class to class of a splat's importance. One number, the slope, trades bytes for error: it is the
mean square error that one more bit a value would take away.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from thinwire.spec import Spec
from thinwire.uses.scenes.code import orientations
from thinwire.uses.scenes.code.channels import Axes, Channels, Floats, Numbers, class_steps
from thinwire.uses.scenes.code.morton import Bend, PositionGrid, morton
from thinwire.uses.scenes.coded import CHANNELS, CLASSES, DEEPER, Coded, forward, of_part
from thinwire.uses.scenes.importance import classes_of, most_steps, seen_through, sensitivities
from thinwire.uses.scenes.part import Part
from thinwire.uses.scenes.scene import Splats
from thinwire.uses.scenes.view.cameras import SIZE, SceneFrame
from thinwire.uses.scenes.view.render import Seen
from thinwire.uses.scenes.view.views import Views

LOGIT, FLOOR = 12.0, -23.0  # what infinite opacities and scales of zero become
TURNED = ("log_scales", "colours", "harmonics")  # attributes whose channels vary together
FAR, BALL = 8.0, 2.0  # radii: from where on space is drawn in, and the ball in which it is not
WORTH = 200  # splats for each number of the axes, or they cost more than they save


@dataclass(frozen=True, repr=False)
class Thinwire(Spec):
    """Our own coder. A target says how small. More ``layers`` show a scene sooner, and take more bytes.

    ``transforms``: whether channels that take fewer bits so are coded as coefficients of the Haar transform.
    """

    layers: int = 4
    transforms: bool = False


@dataclass(frozen=True, eq=False)
class Analysis:
    """What coding a scene begins with, at any slope: splats in their smallest rotations, what matters."""

    splats: Splats
    views: Views
    seen: Seen
    classes: npt.NDArray[np.int64]
    sensitivity: Mapping[str, float]
    channels: Mapping[str, Channels]
    transforms: bool = False  # whether channels may be coded as coefficients of the Haar transform

    @classmethod
    def of(cls, splats: Splats, size: int = SIZE) -> Analysis:
        """Return the analysis of a scene, from pictures of it that have ``size`` pixels both ways."""
        return cls.through(Views.of(splats, size), splats)

    @classmethod
    def through(cls, views: Views, splats: Splats) -> Analysis:
        """Return the analysis of a scene from pictures by these cameras, which may be another's."""
        floor = np.float32(FLOOR + min(0.0, math.log(views.frame.radius)))  # of a small scene, small as well
        rotations, scales = orientations.smallest(splats.rotations, np.maximum(splats.log_scales, floor))
        bounded = np.clip(splats.opacities, -LOGIT, LOGIT)
        splats = replace(splats, rotations=rotations.astype(np.float32), log_scales=scales, opacities=bounded)
        seen = seen_through(splats, views)
        classes = classes_of(seen)
        sensitivity = sensitivities(splats, views, classes)
        weights: Floats = np.exp2(-2.0 * classes)
        channels = {g: Channels.of(x, _axes(g, x, weights)) for g, x in values_of(splats).items()}
        return cls(splats, views, seen, classes, sensitivity, channels)

    @property
    def bend(self) -> Bend | None:
        """Return how space is drawn in, or the step of positions would go with the farthest stray."""
        away = np.abs(self.splats.positions - np.array(self.frame.middle, np.float32)).max(initial=0)
        return Bend(self.frame.middle, BALL * self.frame.radius) if away > FAR * self.frame.radius else None

    @property
    def frame(self) -> SceneFrame:
        """Where the scene is, but for what lies far out."""
        return self.views.frame

    def step(self, group: str, slope: float) -> float:
        """Return the step of an attribute, in class 0, at a slope."""
        values = {"positions": 3, "harmonics": 3 * self.splats.harmonics.shape[1]} | CHANNELS
        own = (slope * values[group] / self.sensitivity[group]) ** 0.5
        return min(float(own), self.most(group))

    def most(self, group: str) -> float:
        """Return the largest step that an attribute may have."""
        return most_steps(group, self.frame.radius)


def quantised(scene: Analysis, slope: float, which: npt.NDArray[np.intp] | None = None) -> Coded:
    """Return a scene, or those of its splats that are asked for, in whole steps at a slope."""
    which = np.arange(scene.splats.count) if which is None else which
    # One grid for all parts of a scene.
    grid = PositionGrid.cubic(scene.splats.positions, scene.step("positions", slope), scene.bend)
    codes = morton(grid.cells(scene.splats.positions[which]))
    order = np.lexsort((scene.classes[which], codes))
    classes = scene.classes[which[order]].astype(np.int32)
    by_class = which[order[np.argsort(classes, kind="stable")]]
    counts, groups = np.bincount(classes, minlength=CLASSES).tolist(), dict[str, Numbers]()
    transform = forward(codes[order], classes, grid.depth) if scene.transforms else None
    for group, channels in scene.channels.items():
        steps = class_steps(scene.step(group, slope), scene.most(group), CLASSES)
        groups[group] = channels.numbers(by_class, steps, counts, transform)
    return Coded(scene.splats.bands, grid, codes[order], classes, groups, min(DEEPER, grid.depth - 1))


def encode(scene: Analysis, slope: float, which: npt.NDArray[np.intp] | None = None) -> Part:
    """Return a scene, or those of its splats that are asked for, as one part at a slope."""
    return quantised(scene, slope, which).part()


def values_of(splats: Splats) -> dict[str, Floats]:
    """Return the channels [n, d] of each attribute but positions."""
    found = {
        "opacities": splats.opacities[:, None],
        "rotations": splats.rotations[:, 1:],
        "log_scales": splats.log_scales,
        "colours": splats.colours,
    }
    if splats.bands:
        found["harmonics"] = splats.harmonics.reshape(splats.count, -1)
    return {group: values.astype(np.float64) for group, values in found.items()}


def _axes(group: str, values: Floats, weights: Floats) -> Axes:
    worth = len(values) >= WORTH * values.shape[1]
    return Axes.principal(values, weights) if group in TURNED and worth else Axes.plain(values)


def decode(part: Part) -> Splats:
    """Return the scene of a part. Errors: ``PayloadError``."""
    return of_part(part).splats()
