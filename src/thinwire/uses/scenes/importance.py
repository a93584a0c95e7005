"""How much each splat matters to pictures, and how much noise in each attribute does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from thinwire.similarity import mse
from thinwire.uses.scenes.code import orientations
from thinwire.uses.scenes.scene import Array, Splats
from thinwire.uses.scenes.view.project import Drawable
from thinwire.uses.scenes.view.render import Seen, render, seen_in
from thinwire.uses.scenes.view.views import Views

GROUPS = ("positions", "opacities", "rotations", "log_scales", "colours", "harmonics")
# Noise of about the steps that 40 to 45 dB want, in each attribute's unit: for positions, the radius.
TRIED = {"positions": 2e-4, "opacities": 0.3, "rotations": 0.05, "log_scales": 0.1}
TRIED |= {"colours": 0.1, "harmonics": 0.1}
TOP, MOST_CLASS = 0.98, 7


def classes_of(seen: Seen) -> npt.NDArray[np.int64]:
    """Return the class of each splat: its steps are 2**class times those of the splats that are seen best.

    What an error of a splat's colour costs goes with the squares of its weights, so steps of equal cost go
    with one over their root.
    """
    root = np.sqrt(seen.squares)
    top = float(np.quantile(root[root > 0], TOP)) if root.any() else 1.0
    with np.errstate(divide="ignore"):
        return np.clip(np.floor(np.log2(top / root) + 0.5), 0, MOST_CLASS).astype(np.int64)


def most_steps(group: str, radius: float) -> float:
    """Return the largest step that an attribute may have: beyond, a splat is another one."""
    return {"positions": radius / 16, "opacities": 2.0, "rotations": 0.35, "log_scales": 0.7}.get(group, 1.0)


def noisy(splats: Splats, group: str, amount: Array) -> Splats:
    """Return a scene with noise in one attribute, evenly drawn in a range of ``amount`` [n]."""
    draw = np.random.default_rng(7)
    values = getattr(splats, group)
    if group == "rotations":
        values = orientations.unit(values)
    shape = (-1, *[1] * (values.ndim - 1))
    noise = (draw.random(values.shape) - 0.5) * amount.reshape(shape)
    return replace(splats, **{group: (values + noise).astype(np.float32)})


def sensitivities(splats: Splats, views: Views, classes: npt.NDArray[np.int64]) -> Mapping[str, float]:
    """Return by attribute the mean square error of pictures for each square unit of a step's noise.

    Noise is by class, as steps are; that of positions is not.
    """
    cameras, radius = views.searched, views.frame.radius
    exact = Drawable.of(splats)
    pictures = [render(exact, camera) for camera in cameras]
    found = dict[str, float]()
    for group in GROUPS if splats.harmonics.size else GROUPS[:-1]:
        step = TRIED[group] * (radius if group == "positions" else 1)
        wide = np.full(splats.count, step) if group == "positions" else step * 2.0**classes
        moved = Drawable.of(noisy(splats, group, np.minimum(wide, most_steps(group, radius))))
        errors = [mse(p, render(moved, c)) for p, c in zip(pictures, cameras, strict=True)]
        found[group] = max(float(np.mean(errors)), 1e-15) / step**2
    return found


def seen_through(splats: Splats, views: Views) -> Seen:
    """Return how much of each splat the chosen cameras see."""
    return seen_in(Drawable.of(splats), views.chosen)
