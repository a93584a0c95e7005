"""What a picture says of each splat in it: how the picture moves with it, and what is left without it.

One more pass over the pixels, front to back, once the picture is known: behind a splat is what is still to
come of it, over what is let through. The compiled pass and numpy agree to 1e-3.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from thinwire.uses.scenes.scene import Array
from thinwire.uses.scenes.view.cameras import Camera
from thinwire.uses.scenes.view.project import Drawable, project
from thinwire.uses.scenes.view.render import (
    LEAST_THROUGH,
    MOST_ALPHA,
    alpha_of,
    box_of,
    compiled_pass,
    drawn,
    there,
)

SUMS = 11  # of a splat
Floats = npt.NDArray[np.float64]


class LookedBack(NamedTuple):
    """What a camera sees: ``rows`` [m, 11] of splats and ``which`` [m] they are, and how far it is off."""

    rows: Array
    which: npt.NDArray[np.intp]
    off: Array  # [height, width, 3]: this picture less the one that it is to be
    sums: Floats  # [m, SUMS]

    @property
    def colours(self) -> Floats:
        """Half the slope of the squared error by each splat's colour [m, 3]."""
        return self.sums[:, :3]

    @property
    def removed(self) -> Floats:
        """What the sum of squared errors grows by if a splat goes [m], exactly."""
        found: Floats = self.sums[:, 3] - 2 * self.sums[:, 4]
        return found

    @property
    def slopes(self) -> Floats:
        """Slopes of the sum of squared errors [m, 9] by x, y, a, b, c, opacity, red, green and blue."""
        a, b, c, opacity = (self.rows[:, i].astype(np.float64) for i in (2, 3, 4, 6))
        p, dx, dy, xx, xy, yy = self.sums[:, 5:].T
        columns = (2 * (a * dx + b * dy), 2 * (b * dx + c * dy), -xx, -2 * xy, -yy, 2 * p / opacity)
        return np.concatenate([np.stack(columns, axis=1), 2 * self.colours], axis=1)


def look(scene: Drawable, camera: Camera, wanted: Array) -> LookedBack:
    """Return what a camera sees of a scene whose picture is to be ``wanted`` [height, width, 3]."""
    rows, which = project(scene, camera)
    picture, _ = drawn(rows, camera)
    off = picture - wanted
    return LookedBack(rows, which, off, looked_back(rows, picture, off))


def looked_back(rows: Array, picture: Array, off: Array) -> Floats:
    """Return sums [m, SUMS] of splats, the nearest first, over a picture of them, as in ``kernels.c``."""
    planes = np.ones((7, *picture.shape[:2]), np.float32)
    planes[:3], planes[4:] = picture.transpose(2, 0, 1), off.transpose(2, 0, 1)
    return (compiled_back if there() else plain_back)(rows, planes, LEAST_THROUGH)


def compiled_back(rows: Array, planes: Array, least: float) -> Floats:
    """Look back at splats [n, FIELDS] on planes [7, height, width]: picture, ones, and how far it is off."""
    return compiled_pass("back", rows, planes, 7, SUMS, least)[1]


def plain_back(rows: Array, planes: Array, least: float) -> Floats:
    """Do what ``compiled_back`` does, without a compiler."""
    planes, sums = planes.astype(np.float64), np.zeros((len(rows), SUMS))
    for i, row in enumerate(rows):
        box = box_of(row, planes.shape[1:])
        if box is None:
            continue
        inside, alpha = alpha_of(row, box)
        through = planes[3][box]
        weight = np.where(inside & (through >= least), alpha * through, 0)
        colour = row[7:10].astype(np.float64)[:, None, None]
        planes[(slice(0, 3), *box)] -= weight * colour
        through -= weight
        off = planes[(slice(4, 7), *box)]
        apart = np.where(weight > 0, colour - planes[(slice(0, 3), *box)] / np.maximum(through, 1e-12), 0)
        product = weight * (apart * off).sum(0)
        moving = np.where(alpha < MOST_ALPHA, product, 0)
        dy = (np.arange(box[0].start, box[0].stop) - float(row[1]))[:, None]
        dx = (np.arange(box[1].start, box[1].stop) - float(row[0]))[None]
        moments = [moving * f for f in (1, dx, dy, dx * dx, dx * dy, dy * dy)]
        own = [*(weight * off), weight * weight * (apart * apart).sum(0), product, *moments]
        sums[i] = [values.sum() for values in own]
    return sums
