"""Fewer splats: those go without which the pictures change least, exactly measured.

Source: POTR, arXiv 2601.14821 [quoted]: splats are removed by the exact change of the squared error that each
removal causes. Several removals at once change each other's error, so they come in rounds.
"""

from __future__ import annotations

import numpy as np

from thinwire.uses.scenes.refining.teacher import Teacher
from thinwire.uses.scenes.scene import Splats
from thinwire.uses.scenes.view.look_back import Floats, look
from thinwire.uses.scenes.view.project import Drawable

LOOKS = 24  # cameras that say what goes


def removal_errors(splats: Splats, teacher: Teacher) -> Floats:
    """Return what the sum of squared errors over a teacher's pictures grows by without each splat [n].

    Less than nothing where pictures come nearer without it.
    """
    scene, found = Drawable.of(splats), np.zeros(splats.count)
    for camera, wanted in zip(teacher.cameras, teacher.wanted, strict=True):
        seen = look(scene, camera, wanted)
        found[seen.which] += seen.removed
    return found


def without(splats: Splats, teacher: Teacher, count: int) -> Splats:
    """Return the ``count`` splats that the pictures of a teacher need most."""
    errors = removal_errors(splats, teacher.few(LOOKS))
    return splats.take(np.sort(np.argsort(errors, kind="stable")[splats.count - count :]))
