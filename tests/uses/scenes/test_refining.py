"""Refining: errors of removals and slopes are those that one measures, and what is lost comes back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scenes import ball, small_pictures

from thinwire import scenes
from thinwire.types import InputError
from thinwire.uses.scenes.files.packed_scene import read_scene, write_scene
from thinwire.uses.scenes.importance import seen_through
from thinwire.uses.scenes.importance_coder import Analysis, decode, encode
from thinwire.uses.scenes.mesongs import MesonGS
from thinwire.uses.scenes.part import Layer
from thinwire.uses.scenes.refining import refined_scene
from thinwire.uses.scenes.refining import teacher as teachers
from thinwire.uses.scenes.refining.refinement import refined, slopes
from thinwire.uses.scenes.refining.removal import removal_errors, without
from thinwire.uses.scenes.refining.rounding import Rounding
from thinwire.uses.scenes.refining.teacher import Teacher
from thinwire.uses.scenes.run.scene_packing import Packing, refined_layers, tuned
from thinwire.uses.scenes.scene import Splats
from thinwire.uses.scenes.view import render as rendering
from thinwire.uses.scenes.view.look_back import look
from thinwire.uses.scenes.view.project import Drawable
from thinwire.uses.scenes.view.render import Pictures, render
from thinwire.uses.scenes.view.views import Views

SMALL = 40  # pixels


def teacher_of(scene: Splats, cameras: int = 3) -> Teacher:
    return Teacher.of(scene, Views.of(scene, SMALL)).few(cameras)


def error(scene: Splats, teacher: Teacher) -> float:
    drawn = [render(Drawable.of(scene), camera) for camera in teacher.cameras]
    return float(
        sum(((a.astype(np.float64) - b) ** 2).sum() for a, b in zip(drawn, teacher.wanted, strict=True))
    )


@pytest.fixture
def compiled() -> None:
    if not rendering.there():
        pytest.skip("no C compiler when thinwire was installed")


def moved(scene: Splats, by: float = 0.3) -> Splats:
    draw = np.random.default_rng(3)
    noise = draw.normal(0, by, scene.colours.shape).astype(np.float32)
    return replace(scene, colours=scene.colours + noise, opacities=scene.opacities + noise[:, 0])


def test_a_removal_costs_what_a_picture_without_the_splat_shows(way: None) -> None:
    source = ball(60, 1)
    scene, teacher = moved(source), teacher_of(source)
    found, before = removal_errors(scene, teacher), error(scene, teacher)
    for i in range(0, 60, 4):
        left = scene.take(np.delete(np.arange(60), i))
        assert found[i] == pytest.approx(error(left, teacher) - before, rel=2e-3, abs=2e-3)
    assert error(without(scene, teacher, 40), teacher) < error(scene.take(np.arange(40)), teacher)


def test_slopes_are_those_of_differences(compiled: None) -> None:
    source = ball(80, 1)
    scene, teacher = moved(source), teacher_of(source, 1)
    camera, wanted = teacher.cameras[0], teacher.wanted[0]
    found, draw = slopes(scene, camera, wanted), np.random.default_rng(0)
    for name, step in (("positions", 1e-3), ("log_scales", 5e-3), ("rotations", 5e-3), ("opacities", 1e-2),
                       ("colours", 1e-2), ("harmonics", 1e-2)):  # fmt: skip
        values = getattr(scene, name)
        way = draw.normal(size=values.shape).astype(np.float32)
        ends = [error(replace(scene, **{name: values + s * step * way}), teacher) for s in (1, -1)]
        slope = float((found[name] * torch.from_numpy(way)).sum())
        assert slope == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=0.08, abs=0.3), name


def test_both_ways_look_back_the_same(compiled: None) -> None:
    source = ball(200, 2)
    teacher = teacher_of(source, 2)
    for camera, wanted in zip(teacher.cameras, teacher.wanted, strict=True):
        seen = look(Drawable.of(moved(source)), camera, wanted)
        with rendering.without():
            other = look(Drawable.of(moved(source)), camera, wanted)
        assert np.allclose(seen.sums, other.sums, rtol=1e-3, atol=2e-3)


def test_a_thinned_scene_regains_its_pictures_and_none_gets_worse(compiled: None) -> None:
    source = ball(500, 1)
    teacher, views = teacher_of(source, 12), Views.of(source, SMALL)
    reported = Pictures(source, views.reported)
    fewer = without(source, teacher, 250)
    again = refined(fewer, teacher, 36)
    gained = reported.psnr(reported.of(again)) - reported.psnr(reported.of(fewer))
    assert gained > 2 and again.count == 250
    few = teacher.few(6)  # those that check
    assert error(again, few) < error(fewer, few)
    assert refined(fewer, teacher, 2, share=20) is fewer  # steps too wide to gain anything


def test_a_scene_that_learnt_a_rounding_comes_back_as_it_was_rounded() -> None:
    scene = Analysis.of(ball(400, 1), SMALL)
    rounding = Rounding.at(scene, 1e-4)
    back, found = rounding(scene.splats), decode(encode(rounding.held(scene.splats), 1e-4))
    for name in ("positions", "colours", "harmonics", "opacities"):
        a, b = (np.sort(getattr(x, name).reshape(400, -1), axis=0) for x in (back, found))
        assert np.allclose(a, b, atol=1e-5), name


def test_splats_learn_to_bear_a_rounding(compiled: None) -> None:
    source = ball(400, 1)
    scene, slope = Analysis.of(source, 96), 1e-4
    rounding, reported = Rounding.at(scene, slope), Pictures(source, scene.views.reported)
    again = refined(scene.splats, Teacher.of(source, scene.views), 40, 0.5, rounding)
    before, after = (
        reported.psnr(reported.of(decode(encode(x, slope)))) for x in (scene, rounding.held(again))
    )
    assert after > before + 0.4


def test_refined_layers_keep_their_budget_and_their_prefixes(
    compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_pictures(monkeypatch, 48)
    for name in ("BETWEEN", "SETTLING", "LEARNING", "AGAIN"):
        monkeypatch.setattr(refined_scene, name, (16, 0.6))
    monkeypatch.setattr(refined_scene, "TRIES", 1)
    monkeypatch.setattr(teachers, "CAMERAS", 12)
    monkeypatch.setattr(refined_scene, "SHARE", 0.97)
    source, most = ball(3000, 0), 17_000
    views = Views.of(source)
    scene, reported = Analysis.through(views, source), Pictures(source, views.reported)
    layers = refined_layers(scene, source, most, None, 2)
    assert 0.9 * most < len(write_scene(layers)) <= most and len(layers) == 2
    shown = [scenes.unpack(write_scene(layers), layers=i) for i in (1, 2)]
    first, last = (reported.psnr(reported.of(x)) for x in shown)
    assert shown[0].count < shown[1].count < source.count and 10 < first < last


def test_mesongs_is_tuned_in_as_many_bytes(compiled: None) -> None:
    source = ball(400, 1)
    views = Views.of(source, SMALL)
    seen, reported, found = seen_through(source, views), Pictures(source, views.reported), []
    for steps in (0, 60):
        coder = MesonGS(prune=0.4, book=16, blocks=4, refine=steps)
        part = read_scene(write_scene([Layer(tuned(coder, source, views, seen))]))[0].stays
        assert part is not None
        found.append((part.nbytes, reported.psnr(reported.of(coder.decode(part)))))
    assert abs(found[1][0] - found[0][0]) < 0.03 * found[0][0] and found[1][1] > found[0][1] + 1


def test_what_cannot_be_refined_is_told(tmp_path) -> None:
    for recipe, told in (("mesongs", "its own parameter"), ("thinwire:transform=cheapest", "transform=raw")):
        with pytest.raises(InputError, match=told):
            Packing(tmp_path / "a.ply", recipe, None if recipe == "mesongs" else 9, refine=True)
    with rendering.without(), pytest.raises(InputError, match="C compiler"):
        scenes.pack(ball(200), nbytes=3000, refine=True)
