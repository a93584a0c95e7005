"""Packed scenes: targets are met, every recipe reads back, prefixes and damage are told."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import ball

from thinwire.similarity import mse, psnr
from thinwire.types import InputError, PayloadError
from thinwire.uses.scenes import importance_coder as coder
from thinwire.uses.scenes import search
from thinwire.uses.scenes.coded import finer_part
from thinwire.uses.scenes.files.packed_scene import read_scene, write_scene
from thinwire.uses.scenes.importance import classes_of, seen_through
from thinwire.uses.scenes.layers import SHARES, decode_part, encode_layers, shown_after, stand_ins
from thinwire.uses.scenes.merging import merged
from thinwire.uses.scenes.mesongs import MesonGS, block_codes, block_values
from thinwire.uses.scenes.part import Layer
from thinwire.uses.scenes.scene import Splats, cleaned
from thinwire.uses.scenes.thinning import thinned_to_budget
from thinwire.uses.scenes.view.cameras import SceneFrame, reported_views
from thinwire.uses.scenes.view.project import Drawable
from thinwire.uses.scenes.view.render import Seen, render
from thinwire.uses.scenes.view.views import Views

pytest.importorskip("zstandard")
PIXELS = 96


def quality(scene: Splats, other: Splats) -> float:
    a, b = Drawable.of(scene), Drawable.of(other)
    return psnr(
        float(
            np.mean([mse(render(a, c), render(b, c)) for c in reported_views(SceneFrame.of(scene), PIXELS)])
        )
    )


@pytest.fixture(scope="module")
def scene() -> coder.Analysis:
    return coder.Analysis.of(ball(1500, 1), PIXELS)


def test_finer_slopes_take_more_bytes_and_lose_less(scene: coder.Analysis) -> None:
    layers = [coder.encode(scene, slope) for slope in (1e-4, 1e-5, 1e-6, 1e-7)]
    sizes = [layer.nbytes for layer in layers]
    qualities = [quality(scene.splats, decode_part(layer)) for layer in layers]
    assert sizes == sorted(sizes) and qualities == sorted(qualities)
    assert qualities[-1] - qualities[0] > 15


def test_a_budget_is_met_within_two_per_cent(scene: coder.Analysis) -> None:
    for most in (12000, 16000, 21000, 30000):
        layer = search.to_budget(lambda slope: coder.encode(scene, slope), lambda x: x.nbytes, most)
        assert 0.98 * most <= layer.nbytes <= most
    with pytest.raises(InputError, match=r"takes \d+ bytes at least, and 100 are asked for"):
        search.to_budget(lambda slope: coder.encode(scene, slope), lambda x: x.nbytes, 100)


def test_a_quality_is_met() -> None:
    made = search.to_quality(lambda slope: slope, lambda slope: -10 * np.log10(slope), 47)
    assert 47 <= -10 * np.log10(made) <= 47.05
    with pytest.raises(InputError, match="the finest steps reach 30"):
        search.to_quality(lambda slope: slope, lambda slope: 30.0, 47)


ODD = {
    "one": ball(1, 1),
    "two at one point": Splats.of(np.ones((2, 3)), colours=[[0, 1, 2], [3, 4, 5]]),
    "many at one point": Splats.of(np.ones((300, 3))),
    "no harmonics": ball(40, 0),
    "all bands": ball(40, 3),
    "infinite": replace(
        ball(3), opacities=np.float32([np.inf, -np.inf, 0]), log_scales=np.full((3, 3), -np.inf, "f4")
    ),
    "never seen": replace(ball(5), opacities=np.full(5, -np.inf, np.float32)),
}


def outlier(name: str, value: float) -> Splats:
    """Return a scene whose first splat has another value in an attribute, as it is cleaned."""
    scene = ball(60, 1)
    getattr(scene, name)[0] = value
    return cleaned(scene)[0]


ODD |= {f"log-scale {x}": outlier("log_scales", x) for x in (30, 80, 1e30)}
ODD |= {f"{name} {x}": outlier(name, x) for name in ("colours", "harmonics") for x in (-1e30, 3e38)}
ODD |= {f"rotation {x}": outlier("rotations", x) for x in (1e-30, 3e38)}
ODD |= {f"position {x}": outlier("positions", x) for x in (20, 1e5, 3e38)}
for size in (1e-12, 1e12):
    ODD[f"of size {size}"] = replace(
        ball(60, 1),
        positions=ball(60).positions * np.float32(size),
        log_scales=ball(60).log_scales + np.float32(np.log(size)),
    )
ODD["opacity"] = outlier("opacities", 1e30)
ODD["all of them large"] = cleaned(replace(ball(9), log_scales=np.full((9, 3), 80, np.float32)))[0]


@pytest.mark.parametrize("name", ODD)
def test_odd_scenes_read_back(name: str) -> None:
    scene = ODD[name]
    layer = coder.encode(coder.Analysis.of(scene, PIXELS), 1e-7)
    back = shown_after(read_scene(write_scene([Layer(layer)])))
    assert (back.count, back.bands) == (scene.count, scene.bands)
    assert quality(scene, back) > 35
    meson = MesonGS(prune=0.0, depth=10, blocks=3, book=16, steps=5)
    back = decode_part(meson.encode(scene, seen_through(scene, Views.of(scene, PIXELS))))
    assert 1 <= back.count <= scene.count


def test_mesongs_codes_the_same_numbers_either_way() -> None:
    scene = ball(800, 2)
    seen = seen_through(scene, Views.of(scene, PIXELS))
    plain = MesonGS(prune=0.1, depth=12, book=64, steps=10)
    layers = [coder.encode(scene, seen) for coder in (plain, replace(plain, coder="own"))]
    a, b = map(decode_part, layers)
    assert all(
        np.array_equal(getattr(a, name), getattr(b, name)) for name in ("positions", "colours", "harmonics")
    )
    assert layers[1].nbytes < layers[0].nbytes and 700 < a.count <= 720
    middle = decode_part(replace(plain, voxels="middle").encode(scene, seen))
    assert quality(scene, middle) > quality(scene, a) - 0.5
    assert quality(scene, a) > 20


def test_blocks_of_eight_bits_hold_zero() -> None:
    x = np.random.default_rng(0).normal(-5, 1, (100, 2))
    ranges, codes = block_codes(x, 7)
    assert (ranges[0] < 0).all() and np.allclose(ranges[0] + 255 * ranges[1], 0, atol=1e-5)
    assert (np.abs(block_values(codes, ranges.astype(float)) - x) <= ranges[1].max() * 0.51).all()


def test_classes_go_with_the_root_of_the_squares() -> None:
    squares = np.float64([100, 25, 25 / 4, 0])
    assert classes_of(Seen(squares, squares)).tolist() == [0, 1, 2, 7]


SMALL = coder.encode(coder.Analysis.of(ball(60, 1), PIXELS), 1e-5)


def test_layers_show_more_and_more() -> None:
    scene = coder.Analysis.of(ball(4000, 1), PIXELS)
    whole = coder.encode(scene, 1e-6)
    for count in SHARES:
        layers = encode_layers(scene, 1e-6, stand_ins(scene, whole.nbytes, count), count)
        layers = read_scene(write_scene(layers))
        assert len(layers) == count and (count == 1 or layers[0].nbytes <= 0.1 * whole.nbytes)
        shown = [quality(scene.splats, shown_after(layers[: i + 1])) for i in range(count)]
        assert shown == sorted(shown) and shown[0] > 15
        assert shown[-1] == pytest.approx(quality(scene.splats, decode_part(whole)), abs=0.1)
        assert sum(layer.nbytes for layer in layers) < 1.25 * whole.nbytes


def test_merging_looks_better_than_dropping() -> None:
    scene = ball(3000, 0)
    frame = SceneFrame.of(scene)
    seen = seen_through(scene, Views.of(scene, PIXELS))
    fewer = merged(scene, seen.weights, frame.radius, 400)
    dropped = scene.take(np.argsort(-seen.weights)[:400])
    assert fewer.count == 400 and quality(scene, fewer) > quality(scene, dropped) + 0.5
    for n in (1, 2):
        assert merged(ball(9, 1), np.ones(9), 1.0, n).count == n


def test_channels_that_vary_slowly_are_cheaper_as_coefficients() -> None:
    even = ball(3000, 0)
    slow = replace(even, colours=np.sin(2 * even.positions).astype(np.float32))
    raw = replace(coder.Analysis.of(slow, PIXELS), classes=np.zeros(3000, np.int64))
    own = replace(raw, transforms=True)
    fine = coder.quantised(own, 1e-6)
    coarse = fine.coarser({group: own.most(group) for group in own.channels})
    assert fine.groups["colours"].transformed
    assert len(fine.part().streams["colours"]) < 0.8 * len(coder.encode(raw, 1e-6).streams["colours"])
    found = [read_scene(write_scene([Layer(coarse.part()), Layer(finer=finer_part([coarse], [fine]))]))]
    shown = [quality(slow, shown_after(found[0][:n])) for n in (1, 2)]
    assert shown[1] > shown[0] + 3 and shown[1] > quality(slow, decode_part(coder.encode(raw, 1e-6))) - 0.5
    assert np.allclose(shown_after(found[0]).colours, decode_part(fine.part()).colours, atol=1e-6)


def test_few_bytes_hold_fewer_splats_and_look_better() -> None:
    scene = coder.Analysis.of(ball(4000, 1), PIXELS)
    most = 24000
    fewer, _ = thinned_to_budget(scene, most)
    assert 100 < fewer.splats.count < 3000
    found = [search.to_budget(partial(coder.encode, x), lambda p: p.nbytes, most) for x in (scene, fewer)]
    before, after = (quality(scene.splats, decode_part(part)) for part in found)
    assert after > before + 0.5
    assert thinned_to_budget(scene, 120000)[0] is scene  # enough for all


def test_merged_splats_have_the_moments_of_both() -> None:
    pair = Splats.of([[0, 0, 0], [2, 0, 0]], log_scales=np.full((2, 3), np.log(0.1)), opacities=[3, 3])
    one = merged(pair, np.float64([1, 3]), 1.0, 1)
    assert one.positions[0].tolist() == pytest.approx([1.5, 0, 0])
    assert np.exp(one.log_scales).max() == pytest.approx((0.75 * 0.25 * 4 + 0.01) ** 0.5, rel=1e-4)


FILE = write_scene([Layer(None, SMALL), Layer(SMALL)])


def _finer() -> bytes:
    scene = coder.Analysis.of(ball(60, 1), PIXELS)
    fine = coder.quantised(scene, 1e-5)
    coarse = fine.coarser({group: scene.most(group) for group in scene.channels})
    return write_scene([Layer(coarse.part()), Layer(finer=finer_part([coarse], [fine]))])


def test_a_prefix_reads_as_the_layers_that_it_holds() -> None:
    first = (len(FILE) - 8 - int.from_bytes(FILE[:8], "little")) // 2
    assert len(read_scene(FILE)) == 2 and len(read_scene(FILE[:-1])) == 1
    assert len(read_scene(FILE[:-first])) == 1
    with pytest.raises(PayloadError, match=f"first layer ends at byte {len(FILE) - first}"):
        read_scene(FILE[: -first - 1])


def test_a_newer_version_is_told_with_both() -> None:
    with pytest.raises(PayloadError, match="version 9, and this thinwire reads version 1"):
        read_scene(
            FILE.replace(b'"version\\":1', b'"version\\":9', 1).replace(b'version\\":1', b'version\\":9', 1)
        )


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.data())
def test_damage_raises_one_error(data: st.DataObject) -> None:
    whole = bytearray(data.draw(st.sampled_from(DAMAGED)))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at] = data.draw(st.integers(0, 255))
    try:
        shown_after(read_scene(bytes(whole[: data.draw(st.integers(len(whole) // 2, len(whole)))])))
    except PayloadError:
        pass


def _meson(coder: str) -> bytes:
    scene = ball(60, 1)
    own = MesonGS(depth=8, blocks=2, book=8, steps=3, coder=coder)
    return write_scene([Layer(own.encode(scene, seen_through(scene, Views.of(scene, PIXELS))))])


DAMAGED = [FILE, _finer(), _meson("deflate"), _meson("own")]


def test_a_count_beyond_the_bytes_takes_no_memory() -> None:
    head = json.loads(FILE[8 : 8 + int.from_bytes(FILE[:8], "little")])
    note = json.loads(head["__metadata__"]["thinwire.scene"])
    note["layers"][0]["stand_in"]["count"] = 10**9
    head["__metadata__"]["thinwire.scene"] = json.dumps(note)
    text = json.dumps(head).encode()
    with pytest.raises(PayloadError, match="1000000000 splats in"):
        read_scene(len(text).to_bytes(8, "little") + text + FILE[8 + int.from_bytes(FILE[:8], "little") :])
