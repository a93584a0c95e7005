"""Pictures of a scene by several cameras, to compare other scenes with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thinwire.assets.splats.scene import Array, Splats
from thinwire.assets.splats.view.cameras import Camera
from thinwire.assets.splats.view.image import mse, psnr, ssim
from thinwire.assets.splats.view.project import Drawable
from thinwire.assets.splats.view.render import render


class Pictures:
    """Pictures of a scene by some cameras, to compare others with."""

    def __init__(self, splats: Splats, cameras: Sequence[Camera]) -> None:
        self._cameras = cameras
        self._pictures = self.of(splats)

    def of(self, splats: Splats) -> list[Array]:
        """Return another scene's pictures by the same cameras."""
        scene = Drawable.of(splats)
        return [render(scene, camera) for camera in self._cameras]

    def error(self, others: Sequence[Array]) -> float:
        """Return the mean square error of another scene's pictures."""
        return float(np.mean([mse(a, b) for a, b in zip(self._pictures, others, strict=True)]))

    def psnr(self, others: Sequence[Array]) -> float:
        """Return the PSNR of another scene's pictures in dB, by the mean of all errors."""
        return psnr(self.error(others))

    def ssim(self, others: Sequence[Array]) -> float:
        """Return the structural similarity of another scene's pictures, the mean of all."""
        return float(np.mean([ssim(a, b) for a, b in zip(self._pictures, others, strict=True)]))
