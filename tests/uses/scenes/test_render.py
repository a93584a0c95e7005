"""The renderer: against a reference of a dozen lines, and the compiled pass against numpy's."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from scenes import ball

from thinwire.similarity import mse, psnr, ssim
from thinwire.uses.scenes.scene import Splats
from thinwire.uses.scenes.view import render as rendering
from thinwire.uses.scenes.view.cameras import SceneFrame, importance_views, look_at, reported_views
from thinwire.uses.scenes.view.harmonics import basis
from thinwire.uses.scenes.view.project import Drawable, rotation_matrices
from thinwire.uses.scenes.view.render import render, seen_in

SMALL = 48  # pixels


def reference(splats: Splats, camera) -> np.ndarray:
    """Return the picture by the formulas as they are written, a pixel's splats in turn, in doubles."""
    p = (splats.positions - camera.place) @ camera.turn.T
    image, through = np.zeros((camera.height, camera.width, 3)), np.ones((camera.height, camera.width))
    v, u = np.mgrid[: camera.height, : camera.width] + 0.5
    turns = rotation_matrices(splats.rotations).transpose(2, 0, 1)
    for i in np.argsort(p[:, 2]):
        x, y, z = p[i]
        spread = turns[i] * np.exp(splats.log_scales[i])
        jacobian = camera.focal / z * np.array([[1, 0, -x / z], [0, 1, -y / z]]) @ camera.turn
        covariance = jacobian @ spread @ spread.T @ jacobian.T + 0.3 * np.eye(2)
        a, b, _, c = np.linalg.inv(covariance).ravel()
        dx, dy = u - camera.width / 2 - camera.focal * x / z, v - camera.height / 2 - camera.focal * y / z
        alpha = np.exp(-0.5 * (a * dx * dx + 2 * b * dx * dy + c * dy * dy)) / (
            1 + np.exp(-splats.opacities[i])
        )
        weight = np.where((alpha >= 1 / 255) & (through >= 1e-4), np.minimum(alpha, 0.99) * through, 0)
        values = basis((splats.positions[i] - camera.place)[:, None], splats.harmonics.shape[1])[:, 0]
        colour = values @ np.concatenate([splats.colours[i : i + 1], splats.harmonics[i]]) + 0.5
        image += weight[..., None] * np.maximum(colour, 0)
        through -= weight
    return image


def test_the_library_is_of_this_source() -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    assert rendering.there(), "kernels.c changed: .venv/bin/python setup.py build_ext --inplace"


@pytest.mark.parametrize("bands", [0, 3])
def test_pictures_are_those_of_the_formulas(way: None, bands: int) -> None:
    scene = ball(120, bands)
    scene.opacities[:3] = np.inf, -np.inf, 9
    scene.log_scales[4, 1] = -np.inf
    camera = look_at(SceneFrame.of(scene), 30, 20, SMALL)
    found, expected = render(Drawable.of(scene), camera), reference(scene, camera)
    off = np.abs(found - expected).max(2)
    assert np.quantile(off, 0.99) < 2e-4  # the rest: the very edges of ellipses, where a splat ends at 1/255
    assert off.max() < 0.02
    assert expected.max() > 0.5


def test_both_ways_draw_the_same() -> None:
    if not rendering.there():
        pytest.skip("no C compiler when thinwire was installed")
    scene = Drawable.of(ball(300, 2))
    for camera in reported_views(SceneFrame.of(ball(300, 2)), 61):
        found, seen = render(scene, camera), seen_in(scene, [camera])
        with rendering.without():
            assert np.abs(found - render(scene, camera)).max() < 1e-4
            other = seen_in(scene, [camera])
        assert np.allclose(seen.weights, other.weights, rtol=1e-4, atol=1e-4)
        assert np.allclose(seen.squares, other.squares, rtol=1e-4, atol=1e-4)


def test_weights_are_what_pixels_did_not_let_through(way: None) -> None:
    scene = ball(50, 0)
    camera = look_at(SceneFrame.of(scene), 0, 0, SMALL)
    white = Splats.of(scene.positions, log_scales=scene.log_scales, rotations=scene.rotations,
                      opacities=scene.opacities, colours=np.full((50, 3), 0.5 / 0.28209479))  # fmt: skip
    seen = seen_in(Drawable.of(scene), [camera])
    assert seen.weights.sum() == pytest.approx(render(Drawable.of(white), camera)[..., 0].sum(), rel=1e-5)
    assert (seen.squares <= seen.weights + 1e-9).all() and seen.squares.max() > 0


def test_what_is_behind_or_beside_a_camera_is_not_drawn(way: None) -> None:
    scene = ball(40, 0)
    camera = look_at(SceneFrame.of(scene), 0, 0, SMALL)
    behind = Splats.of(scene.positions + 3 * camera.place, opacities=scene.opacities)
    beside = Splats.of(scene.positions + 1000 * camera.turn[0], opacities=scene.opacities)
    assert not render(Drawable.of(behind), camera).any() and not render(Drawable.of(beside), camera).any()


def test_cameras_see_the_whole_scene_and_stand_apart() -> None:
    frame = SceneFrame.of(ball(500))
    views, reported = importance_views(frame), reported_views(frame)
    assert (len(views), len(reported)) == (24, 4)
    for camera in [*views, *reported]:
        assert np.allclose(camera.turn @ camera.turn.T, np.eye(3), atol=1e-12)
        assert np.linalg.det(camera.turn) == pytest.approx(1)
        middle = camera.turn @ (np.array(frame.middle) - camera.place)
        assert np.allclose(middle[:2], 0, atol=1e-9) and middle[2] > 2 * frame.radius
    nearest = [min(np.linalg.norm(a.place - b.place) for b in views) for a in reported]
    assert min(nearest) > 0.3 * frame.radius
    one = SceneFrame.of(Splats.of(np.zeros((1, 3)), opacities=[-np.inf]))
    assert one.radius == pytest.approx(0.03) and one.middle == (0, 0, 0)


def test_quality_of_pictures() -> None:
    draw = np.random.default_rng(0)
    picture = draw.random((40, 40, 3)).astype(np.float32)
    worse, bad = (np.clip(picture + draw.normal(0, s, picture.shape), 0, 1) for s in (0.01, 0.1))
    assert psnr(mse(picture, picture)) == np.inf and ssim(picture, picture) == pytest.approx(1)
    assert psnr(mse(picture, worse)) == pytest.approx(40, abs=0.3)
    assert 1 > ssim(picture, worse) > ssim(picture, bad)
