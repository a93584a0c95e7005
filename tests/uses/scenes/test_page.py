"""Pages of scenes: self-contained, coded near enough, and drawn by a browser as by the renderer."""

from __future__ import annotations

import base64
import io
import json
import re
import time
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from browser import tab
from hypothesis import given
from hypothesis import strategies as st
from scenes import ball

from thinwire.similarity import mse, psnr
from thinwire.uses.scenes import importance_coder
from thinwire.uses.scenes.layers import encode_layers, shown_after, stand_ins
from thinwire.uses.scenes.page.web_page import Plane, deflated, page_of, page_of_scene
from thinwire.uses.scenes.part import Layer
from thinwire.uses.scenes.scene import Splats
from thinwire.uses.scenes.view.cameras import SceneFrame, look_at
from thinwire.uses.scenes.view.project import Drawable
from thinwire.uses.scenes.view.render import render

SIZE = 160  # pixels
ANGLES = ((20.0, 15.0), (250.0, -35.0))  # degrees: azimuth and elevation
SHIFT = 8  # of the modifiers of the DevTools protocol
LAYER = re.compile(r'page\.push\((\[.*?\]),"([A-Za-z0-9+/=]+)"\);</script>')


def read(plane: Plane) -> np.ndarray:
    """Return a channel's numbers, as the page's decode.js does."""
    rows = np.frombuffer(plane.data, np.uint8).reshape(plane.planes, -1).astype(np.int64)
    codes = (rows << 8 * np.arange(plane.planes)[:, None]).sum(0)
    if plane.differences:
        codes = np.cumsum(codes >> 1 ^ -(codes & 1))
    return plane.low + plane.step * codes


def turns(layers: list[Layer]) -> int:
    """Return how many layers a page has: splats come in their finest steps."""
    return sum(layer.finer is None for layer in layers)


numbers = st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=50)


@given(numbers, st.floats(1e-3, 10))
def test_channels_come_back_within_half_a_step(values: list[float], step: float) -> None:
    plane = Plane.of(np.array(values), step)
    assert np.abs(read(plane) - values).max() <= 0.501 * step + 1e-4
    assert len(plane.data) == plane.planes * len(values)


def test_differences_are_taken_where_neighbours_are_near() -> None:
    draw = np.random.default_rng(0)
    assert Plane.of(np.arange(3000.0), 1).differences
    assert not Plane.of(draw.normal(size=3000), 0.01).differences


def test_layers_are_raw_deflate_in_the_order_they_came_in(layers: list[Layer]) -> None:
    page = page_of(layers, "a ball")
    found = LAYER.findall(page)
    assert len(found) == turns(layers) > 1
    for about, text in found:
        sizes = [
            part["count"] * sum(channel[2] for channel in part["channels"]) for part in json.loads(about)
        ]
        assert len(zlib.decompress(base64.b64decode(text), -15)) == sum(sizes)
    assert deflated([]) == zlib.compress(b"", 9, -15)


def test_a_page_needs_nothing_and_says_words_as_they_are() -> None:
    page = page_of_scene(ball(5), '</title><script>alert("$code")', "made by <b>A & B</b>")
    assert not re.search(r"(src|href)\s*=|url\(|@import|https?:", page)
    assert "default-src 'none'" in page
    assert page.count("<script>alert") == 0 and "&lt;script&gt;alert(&quot;$code&quot;)" in page
    assert "made by &lt;b&gt;A &amp; B&lt;/b&gt;</p>" in page


@pytest.mark.parametrize("places", [[[1e38] * 3, [-1e38] * 3], [[1e38] * 3], [[1e10, 0, 0]] * 3])
def test_scenes_far_out_become_pages(places: list[list[float]]) -> None:
    ((about, _),) = LAYER.findall(page_of_scene(Splats.of(places), "far"))
    for low, step, planes, _ in json.loads(about)[0]["channels"]:
        assert np.isfinite([low, step]).all() and planes <= 4


@pytest.fixture(scope="module")
def layers() -> list[Layer]:
    """Return the layers of a small scene with all bands, and splats of the odd kinds."""
    pytest.importorskip("zstandard")
    splats = ball(2200, 3)
    splats.opacities[:3] = np.inf, -np.inf, 9
    splats.log_scales[4, 1] = -np.inf
    scene = importance_coder.Analysis.of(splats, 48)
    found = encode_layers(scene, 1e-6, stand_ins(scene, 60_000))
    assert len(found) > 2 and found[0].stays is None
    return found


def test_a_browser_draws_what_the_renderer_draws(layers: list[Layer], tmp_path: Path) -> None:
    text, frame = page_of(layers, "a ball", "drawn by numpy"), SceneFrame.of(shown_after(layers))
    whole, begun = tmp_path / "whole.html", tmp_path / "begun.html"
    whole.write_text(text, encoding="utf-8")
    begun.write_text(text[: LAYER.search(text).end()], encoding="utf-8")  # what has come over a slow link
    with tab(tmp_path, SIZE) as shown:
        for path, scene in ((whole, shown_after(layers)), (begun, shown_after(layers[:1]))):
            shown.open(path)
            for azimuth, elevation in ANGLES:
                url = shown.value(f"page.picture({azimuth}, {elevation}, {SIZE})")
                picture = pixels(url)
                expected = render(Drawable.of(scene), look_at(frame, azimuth, elevation, SIZE))
                assert expected.std() > 0.1
                assert psnr(mse(expected, picture)) > 35
            history = shown.value("page.history")
            for before, after in pairwise(history):
                assert before["drawn"] > 0 and before["painted"] <= after["began"]
            told = shown.value('document.getElementById("status").textContent')
            assert told.startswith(f"layer {len(history)} of {turns(layers)}: {scene.count:,} splats, ")
            assert shown.value("document.body.innerText").count("drawn by numpy") == 1
        assert {url.partition(":")[0] for url in shown.requests} == {"file", "blob"}


def test_a_browser_draws_every_number_of_bands(tmp_path: Path) -> None:
    with tab(tmp_path, SIZE) as shown:
        for bands in range(3):  # three are drawn above
            path, scene = tmp_path / f"{bands}.html", ball(500, bands)
            path.write_text(page_of_scene(scene, "a ball"), encoding="utf-8")
            shown.open(path)
            picture = pixels(shown.value(f"page.picture(20, 15, {SIZE})"))
            expected = render(Drawable.of(scene), look_at(SceneFrame.of(scene), 20, 15, SIZE))
            assert psnr(mse(expected, picture)) > 40


def test_a_browser_moves_the_camera_and_tells_of_damage(layers: list[Layer], tmp_path: Path) -> None:
    path, text = tmp_path / "page.html", page_of(layers, "a ball")
    end = LAYER.findall(text)[-1][1][-200:]
    path.write_text(text.replace(end, ""), encoding="utf-8")
    with tab(tmp_path, SIZE) as shown:
        shown.open(path)
        assert shown.value("last.catch((e) => page.history.length)") == turns(layers) - 1
        assert shown.value("told.textContent").startswith("cannot show this scene: ")
        turning, place = "[orbit.azimuth, orbit.elevation, orbit.distance]", "orbit.around"
        azimuth, elevation, distance = shown.value(turning)

        def drag(button: str, modifiers: int = 0) -> None:
            held = {"button": button, "buttons": 2 if button == "right" else 1, "modifiers": modifiers}
            for kind, x, y in (("Pressed", 50, 50), ("Moved", 70, 60), ("Released", 70, 60)):
                shown.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, clickCount=1, **held)

        def touch(*middles: float, apart: float) -> None:
            for kind, x in (("Start", middles[0]), *(("Move", x) for x in middles), ("End", 0)):
                points = [{"x": x + side * apart, "y": 80, "id": i} for i, side in enumerate((-1, 1)) if x]
                shown.call("Input.dispatchTouchEvent", type=f"touch{kind}", touchPoints=points)
                apart += 10 if len(middles) == 1 else 0

        def press(key: str, modifiers: int = 0) -> None:
            shown.call("Input.dispatchKeyEvent", type="keyDown", key=key, modifiers=modifiers)

        drag("left")
        turned = shown.value(turning)
        assert turned[0] > azimuth and turned[1] > elevation and turned[2] == distance
        shown.call("Input.dispatchMouseEvent", type="mouseWheel", x=50, y=50, deltaX=0, deltaY=-50)
        near = shown.value(turning)
        assert near[2] < distance
        touch(80, apart=10)
        assert shown.value(turning)[2] < near[2] * 0.6
        press("Home")
        press("ArrowRight", SHIFT)
        assert shown.value(turning) == [azimuth - 5, elevation, distance]
        sideways = [
            lambda: drag("right"),
            lambda: drag("left", SHIFT),
            lambda: touch(80, 95, apart=20),
            lambda: press("ArrowLeft"),
        ]
        for move in sideways:  # what is in the middle goes to the right: the camera to the left
            press("Home")
            before = shown.value(place)
            move()
            after = shown.value(place)
            left = np.array(after) - before
            assert left @ shown.value("orbit.axes().slice(0, 3)") < -0.02
            assert shown.value(turning) == pytest.approx([azimuth, elevation, distance])
        press("Home")
        assert shown.value(place) == before


def test_few_splats_stand_for_all_while_it_moves_and_a_lost_gpu_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page_of_scene(ball(4000, 1), "a ball"), encoding="utf-8")
    moving = """new Promise((done) => {
        const turn = () => {
            piece = 200;
            orbit.move(0, 0, 1);
            if (drawing.larger > 1) done([drawing.count, drawing.larger]);
            else setTimeout(turn, 20);
        };
        turn();
    })"""
    with tab(tmp_path, SIZE) as shown:
        shown.open(path)
        before = pixels(shown.value(f"page.picture(20, 15, {SIZE})"))
        count, larger = shown.value(moving)
        assert 0 < count <= 1600 and 1 < larger <= 3
        while not shown.value("whole"):  # as soon as it rests
            time.sleep(0.02)
        assert shown.value("[drawing.count, drawing.larger]") == [4000, 1]
        back = "() => setTimeout(() => gpu.restoreContext(), 50)"
        shown.value('gpu = drawing.gl.getExtension("WEBGL_lose_context"); 0')
        shown.value(f'canvas.addEventListener("webglcontextlost", {back})')
        shown.value("gpu.loseContext()")
        while not shown.value("page.history.length === 1 && !drawing.gl.isContextLost()"):
            time.sleep(0.02)
        assert psnr(mse(before, pixels(shown.value(f"page.picture(20, 15, {SIZE})")))) > 50


def test_one_splat_is_seen(tmp_path: Path) -> None:
    path, one = tmp_path / "page.html", ball(1, 0)
    path.write_text(page_of_scene(one, "one"), encoding="utf-8")
    with tab(tmp_path, SIZE) as shown:
        shown.open(path)
        assert (pixels(shown.value(f"page.picture(0, 0, {SIZE})")).max(2) > 0.05).mean() > 0.02


def pixels(url: str) -> np.ndarray:
    """Return the picture [height, width, 3] of a data URL, 0 to 1."""
    image = pytest.importorskip("PIL.Image")
    png = base64.b64decode(url.partition(",")[2])
    return np.asarray(image.open(io.BytesIO(png)).convert("RGB"), np.float32) / 255
