"""What is far out: it costs the rest of a scene neither quality nor bytes, and it is itself still there."""

from __future__ import annotations

import numpy as np
import pytest
from scenes import ball

from thinwire.types import PayloadError
from thinwire.uses.scenes import importance_coder
from thinwire.uses.scenes.code.morton import Bend
from thinwire.uses.scenes.coded import BENT
from thinwire.uses.scenes.layers import decode_part, encode_layers, shown_after, stand_ins
from thinwire.uses.scenes.merging import merged
from thinwire.uses.scenes.part import Layer, Part
from thinwire.uses.scenes.scene import Splats
from thinwire.uses.scenes.view.cameras import SceneFrame, look_at, reported_views
from thinwire.uses.scenes.view.render import Pictures
from thinwire.uses.scenes.view.views import Views

pytest.importorskip("zstandard")
PIXELS = 96
STRAYS = [[300, 0, 0], [0, -1e4, 0], [-3e5, 2e5, 9e5]]


def strayed(n: int) -> Splats:
    scene = ball(n, 1)
    scene.positions[: len(STRAYS)] = STRAYS
    return scene


def coded(scene: Splats, slope: float) -> tuple[Part, float, Splats]:
    part = importance_coder.encode(importance_coder.Analysis.of(scene, PIXELS), slope)
    pictures, back = Pictures(scene, reported_views(SceneFrame.of(scene), PIXELS)), decode_part(part)
    return part, pictures.psnr(pictures.of(back)), back


def test_strays_cost_the_rest_nothing_and_stay_where_they_were() -> None:
    plain, decibels, _ = coded(ball(600, 1), 1e-8)
    part, strays, back = coded(strayed(600), 1e-8)
    assert part.codec == BENT != plain.codec  # so that an earlier version refuses it
    assert decibels > 60 and strays > decibels - 3 and part.nbytes < 1.03 * plain.nbytes
    away = np.linalg.norm(back.positions, axis=1)
    found = back.positions[np.argsort(-away)[: len(STRAYS)]][::-1].astype(np.float64)
    for place, wanted in zip(found, np.array(STRAYS, float), strict=True):
        length = np.linalg.norm(wanted)
        assert abs(np.linalg.norm(place) / length - 1) < 0.05
        assert np.linalg.norm(place / np.linalg.norm(place) - wanted / length) < 1e-4


def test_strays_come_in_layers_and_do_not_lead_the_merging() -> None:
    scene = importance_coder.Analysis.of(strayed(2400), PIXELS)
    shown = stand_ins(scene, importance_coder.encode(scene, 1e-6).nbytes, 4)
    layers = encode_layers(scene, 1e-6, shown, 4)
    pictures = Pictures(scene.splats, reported_views(scene.frame, PIXELS))
    found = [pictures.psnr(pictures.of(shown_after(layers[: i + 1]))) for i in range(len(layers))]
    whole = pictures.psnr(pictures.of(decode_part(importance_coder.encode(scene, 1e-6))))
    assert found == sorted(found) and found[-1] > whole - 0.1
    plain = importance_coder.Analysis.of(ball(2400, 1), PIXELS)
    fewer = [merged(x.splats, x.seen.weights, x.frame.radius, 400) for x in (plain, scene)]
    own = Pictures(plain.splats, reported_views(plain.frame, PIXELS))
    assert pictures.psnr(pictures.of(fewer[1])) > own.psnr(own.of(fewer[0])) - 1


def test_a_sky_does_not_hide_what_given_cameras_stand_around() -> None:
    """A third of all splats far out, as trained scenes of streets have them: the radius is the sky's."""
    scene, core = ball(600, 1), SceneFrame((0.0, 0.0, 0.0), 1.0)
    scene.positions[:200] *= 1e4
    scene.log_scales[:200] = np.log(2e3)
    views = Views.given(scene, [look_at(core, 40 * i, 20 * (i % 3), PIXELS) for i in range(9)])
    analysis = importance_coder.Analysis.through(views, scene)
    assert SceneFrame.of(scene).radius > 9e3 and (analysis.seen.weights[200:] > 0).mean() > 0.7
    pictures = Pictures(scene, views.reported)
    assert pictures.psnr(pictures.of(decode_part(importance_coder.encode(analysis, 1e-9)))) > 55


def test_drawn_in_space_leads_back_and_leaves_the_ball_alone() -> None:
    bend, draw = Bend((1.0, 2.0, 3.0), 2.0), np.random.default_rng(0)
    places = (draw.normal(size=(300, 3)) * 10.0 ** draw.uniform(-2, 6, (300, 1))).astype(np.float32)
    inward = bend.inward(places)
    away = np.linalg.norm(places - np.array(bend.middle), axis=1)
    assert (inward[away <= 2] == places[away <= 2]).all() and np.abs(inward - bend.middle).max() < 6
    assert np.allclose(bend.outward(inward), places, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "wrong", [[0, 0, 0, 0], [0, 0, 0, -1], [float("nan"), 0, 0, 1], [0, 0, 1], "abcd", None]
)
def test_a_wrong_bend_is_refused(wrong: object) -> None:
    part = importance_coder.encode(importance_coder.Analysis.of(strayed(60), PIXELS), 1e-5)
    with pytest.raises(PayloadError):
        shown_after(
            [Layer(Part(part.codec, part.count, part.bands, {**part.about, "bend": wrong}, part.streams))]
        )
