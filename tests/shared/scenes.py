"""Small scenes of 3D Gaussians: a bumpy ball, as a file of full floats holds one."""

from __future__ import annotations

import numpy as np
import pytest

from thinwire.uses.scenes import importance_coder
from thinwire.uses.scenes.scene import Splats
from thinwire.uses.scenes.view import given, views


def small_pictures(patch: pytest.MonkeyPatch, size: int = 96) -> None:
    """Let all pictures of scenes have ``size`` pixels both ways, which is enough for small ones."""
    for function in (views.Views.of.__func__, given.read_cameras, importance_coder.Analysis.of.__func__):
        patch.setattr(function, "__defaults__", (size,))


def ball(n: int = 600, bands: int = 1, seed: int = 0) -> Splats:
    """Return ``n`` flat splats on a ball, whose colours vary smoothly."""
    draw = np.random.default_rng(seed)
    out = draw.normal(size=(n, 3))
    out /= np.linalg.norm(out, axis=1, keepdims=True)
    positions = out * (1 + 0.1 * np.sin(5 * out[:, :1]))
    coefficients = (bands + 1) ** 2 - 1
    return Splats.of(
        positions,
        log_scales=np.log(0.1) + draw.normal(0, 0.4, (n, 3)),
        rotations=draw.normal(size=(n, 4)),
        opacities=draw.normal(1, 1.5, n),
        colours=np.sin(4 * positions) + draw.normal(0, 0.1, (n, 3)),
        harmonics=draw.laplace(0, 0.1, (n, coefficients, 3)),
    )


def layered(count: int = 3, n: int = 60) -> bytes:
    """Return a packed scene of ``count`` layers of ``n`` splats each; all but the last have a stand-in."""
    from thinwire.uses.scenes import importance_coder
    from thinwire.uses.scenes.files.packed_scene import write_scene
    from thinwire.uses.scenes.part import Layer

    parts = [
        importance_coder.encode(importance_coder.Analysis.of(ball(n, 1, i), 64), 1e-5) for i in range(count)
    ]
    return write_scene([Layer(part, parts[0] if part is not parts[-1] else None) for part in parts])
