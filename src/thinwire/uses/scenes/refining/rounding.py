"""Splats as our coder will give them back, in their own order, so that refining sees what rounding does.

Source: gradients straight through the rounding (Y. Bengio and others, arXiv 1308.3432) [from memory], as
MesonGS fine-tunes through its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from thinwire.uses.scenes.code import orientations
from thinwire.uses.scenes.code.channels import Channels, class_steps, rounded
from thinwire.uses.scenes.code.morton import PositionGrid
from thinwire.uses.scenes.coded import CLASSES
from thinwire.uses.scenes.importance_coder import Analysis, values_of
from thinwire.uses.scenes.scene import Array, Splats


@dataclass(frozen=True, eq=False)
class Rounding:
    """The rounding of a scene at a slope: its splats may move, its grid, classes and axes do not."""

    scene: Analysis
    grid: PositionGrid
    steps: dict[str, Array]  # [n, 1] of each attribute

    @classmethod
    def at(cls, scene: Analysis, slope: float) -> Rounding:
        """Return what coding a scene at a slope does to it."""
        grid = PositionGrid.cubic(scene.splats.positions, scene.step("positions", slope), scene.bend)
        own = {g: class_steps(scene.step(g, slope), scene.most(g), CLASSES) for g in scene.channels}
        return cls(scene, grid, {g: steps[scene.classes][:, None] for g, steps in own.items()})

    def __call__(self, splats: Splats) -> Splats:
        """Return splats as they come back."""
        found = dict[str, Array]()
        for group, values in values_of(_upright(splats)).items():
            axes, steps = self.scene.channels[group].axes, self.steps[group]
            numbers = rounded(np.asarray(axes.forward(values), np.float32) / steps)
            found[group] = axes.inverse(np.asarray(numbers * steps, np.float64)).astype(np.float32)
        harmonics = found["harmonics"] if splats.bands else splats.harmonics
        return Splats.of(
            self.grid.positions(self.grid.cells(splats.positions)),
            log_scales=found["log_scales"],
            rotations=orientations.whole(found["rotations"]),
            opacities=found["opacities"][:, 0],
            colours=found["colours"],
            harmonics=harmonics.reshape(splats.harmonics.shape),
        )

    def held(self, splats: Splats) -> Analysis:
        """Return the scene with these splats, on its grid and along its axes: so they come back as here."""
        on_grid = self.grid.positions(self.grid.cells(splats.positions)).astype(np.float32)
        splats = replace(_upright(splats), positions=on_grid)
        channels = {g: Channels.of(x, self.scene.channels[g].axes) for g, x in values_of(splats).items()}
        return replace(self.scene, splats=splats, channels=channels)


def _upright(splats: Splats) -> Splats:
    """Return splats with rotations of length 1 whose w is not below 0."""
    turned = orientations.unit(splats.rotations)
    turned = np.where(turned[:, :1] < 0, -turned, turned)
    return replace(splats, rotations=turned.astype(np.float32))
