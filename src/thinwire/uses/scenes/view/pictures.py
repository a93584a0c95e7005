"""Pictures of a scene by several cameras, to compare other scenes with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from thinwire.similarity import mse, psnr, ssim
from thinwire.uses.scenes.scene import Array, Splats
from thinwire.uses.scenes.view.cameras import Camera
from thinwire.uses.scenes.view.project import Drawable
from thinwire.uses.scenes.view.render import render


class Pictures:
    """Pictures of a scene by some cameras, to compare others with.

    Cameras of several kinds are told apart: what is said of all is what the worst kind has, so that pictures
    from afar do not hide what is wrong close by.
    """

    def __init__(self, splats: Splats, cameras: Sequence[Camera]) -> None:
        self._cameras = cameras
        self._pictures = self.of(splats)

    def of(self, splats: Splats) -> list[Array]:
        """Return another scene's pictures by the same cameras."""
        scene = Drawable.of(splats)
        return [render(scene, camera) for camera in self._cameras]

    def error(self, others: Sequence[Array]) -> float:
        """Return the mean square error of another scene's pictures."""
        return max(self._by_kind(mse, others).values())

    def psnr(self, others: Sequence[Array]) -> float:
        """Return the PSNR of another scene's pictures in dB, by the mean of all errors."""
        return psnr(self.error(others))

    def ssim(self, others: Sequence[Array]) -> float:
        """Return the structural similarity of another scene's pictures, the mean of all."""
        return min(self._by_kind(ssim, others).values())

    def by_kind(self, others: Sequence[Array]) -> dict[str, tuple[int, float, float]]:
        """Return by kind of camera how many there are, and another scene's PSNR in dB and SSIM there."""
        kinds = [camera.kind for camera in self._cameras]
        errors, alike = self._by_kind(mse, others), self._by_kind(ssim, others)
        return {kind: (kinds.count(kind), psnr(errors[kind]), alike[kind]) for kind in errors}

    def _by_kind(self, of: Callable[[Array, Array], float], others: Sequence[Array]) -> dict[str, float]:
        found = dict[str, list[float]]()
        for camera, a, b in zip(self._cameras, self._pictures, others, strict=True):
            found.setdefault(camera.kind, []).append(of(a, b))
        return {kind: float(np.mean(values)) for kind, values in found.items()}
