"""What a scene is refined by: cameras, and the pictures that they have of the source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from thinwire.uses.scenes.scene import Array, Splats
from thinwire.uses.scenes.view.cameras import INSIDE, OUTSIDE, RINGS, Camera, look_at, spread, turn_of
from thinwire.uses.scenes.view.project import Drawable
from thinwire.uses.scenes.view.render import render
from thinwire.uses.scenes.view.views import Views

CAMERAS = 72  # at most: a picture of each is kept, 3 MB
ASIDE = 5.0  # degrees beyond the rings
STEEP = 60.0  # degrees up or down, within a room
GOLDEN = 0.5 + 5**0.5 / 2


@dataclass(frozen=True, eq=False)
class Teacher:
    """Cameras, and the pictures ``wanted`` by each; lengths are in shares of ``radius``."""

    radius: float
    cameras: Sequence[Camera]
    wanted: Sequence[Array]

    @classmethod
    def of(cls, splats: Splats, views: Views, seed: int = 0) -> Teacher:
        """Return the teacher of a scene: by the chosen cameras and others of their kind, never reported ones.

        Others are drawn by ``seed``: a few cameras alone are matched better than what lies between them.
        """
        cameras = others(views, seed)
        scene = Drawable.of(splats)
        return cls(views.frame.radius, cameras, [render(scene, camera) for camera in cameras])

    def few(self, count: int) -> Teacher:
        """Return the teacher by so many of its cameras, or all, evenly among them."""
        n = len(self.cameras)
        at = [int((i + 0.5) * n / count) for i in range(count)] if count < n else range(n)
        return replace(self, cameras=[self.cameras[i] for i in at], wanted=[self.wanted[i] for i in at])


def others(views: Views, seed: int) -> list[Camera]:
    """Return the chosen cameras and others of their kinds; given cameras have no others."""
    draw, found = np.random.default_rng(seed), spread(views.chosen, min(CAMERAS, len(views.chosen)))
    for i in range(max(0, CAMERAS - len(views.chosen))):
        like = views.chosen[int(i * GOLDEN % 1 * len(views.chosen))]  # of every kind, soon
        around = float(draw.uniform(0, 360))
        if like.kind == OUTSIDE:
            above = float(draw.uniform(min(RINGS) - ASIDE, max(RINGS) + ASIDE))
            found.append(look_at(views.frame, around, above, like.width))
        elif like.kind == INSIDE:
            found.append(replace(like, turn=turn_of(around, float(draw.uniform(-STEEP, STEEP)))))
    return found
