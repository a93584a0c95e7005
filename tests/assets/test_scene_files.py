"""Scene files: what is written reads back, what others write is read, and damage is told in a sentence."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import ball

from thinwire.assets.splats.code import turns
from thinwire.assets.splats.files.ply import read_ply, write_ply
from thinwire.assets.splats.files.scene_file import read_scene_file, scene_bytes
from thinwire.assets.splats.scene import Odd, Splats, cleaned
from thinwire.types import InputError, PayloadError


def same(a: Splats, b: Splats, error: float = 0) -> None:
    for f in fields(Splats):
        assert np.allclose(getattr(a, f.name), getattr(b, f.name), rtol=0, atol=error, equal_nan=True), f.name


@pytest.mark.parametrize("bands", range(4))
def test_a_ply_reads_back_as_it_was(bands: int) -> None:
    scene = ball(7, bands)
    same(read_ply(write_ply(scene)), scene)


def rewritten(scene: Splats, form: str) -> bytes:
    """Return a scene as a ``.ply`` of doubles of another order, or as text, with one column more."""
    head, _, body = write_ply(scene).partition(b"end_header\n")
    lines = head.decode().splitlines()
    names = [line.split()[-1] for line in lines if line.startswith("property")]
    table = np.frombuffer(body, "<f4").reshape(scene.count, len(names))
    order = np.random.default_rng(1).permutation(len(names))
    extra = np.concatenate([np.ones((scene.count, 1)), table[:, order]], 1)
    kind = {"binary_big_endian": ">f8", "ascii": "", "binary_little_endian": "<f8"}[form]
    shuffled = [f"property double {name}" for name in ["confidence", *(names[i] for i in order)]]
    top = "\n".join(["ply", f"format {form} 1.0", "comment by another", lines[2], *shuffled, "end_header\n"])
    rows = "\n".join(" ".join(repr(float(v)) for v in row) for row in extra)
    return top.encode() + (extra.astype(kind).tobytes() if kind else rows.encode())


@pytest.mark.parametrize("form", ["binary_little_endian", "binary_big_endian", "ascii"])
def test_other_orders_types_and_columns_are_read(form: str) -> None:
    scene = ball(2500 if form == "ascii" else 5, 1)
    scene.opacities[0] = np.inf
    same(read_ply(rewritten(scene, form)), scene)


def test_a_point_cloud_is_told_from_a_scene() -> None:
    data = write_ply(ball(3)).replace(b"f_dc_0", b"red_no").replace(b"scale_0", b"scale_9")
    with pytest.raises(PayloadError, match="no f_dc_0: a mesh or a point cloud"):
        read_ply(data)
    with pytest.raises(PayloadError, match="no scale_0"):
        read_ply(write_ply(ball(3)).replace(b"scale_0", b"scale_9"))


@settings(derandomize=True, max_examples=400, deadline=None)
@given(st.data())
def test_damage_to_a_ply_raises_one_error(data: st.DataObject) -> None:
    whole = bytearray(PLY if data.draw(st.booleans()) else TEXT)
    for _ in range(data.draw(st.integers(0, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        read_ply(bytes(whole[: data.draw(st.integers(0, len(whole)))]))
    except (PayloadError, InputError):
        pass


PLY, TEXT = write_ply(ball(4, 1)), rewritten(ball(4, 1), "ascii")


def test_a_count_beyond_the_bytes_takes_no_memory() -> None:
    for data in (PLY, TEXT):
        with pytest.raises(PayloadError, match="999999999999 splats"):
            read_ply(data.replace(b"vertex 4", b"vertex 999999999999"))


def test_odd_splats_are_kept_or_dropped_and_counted() -> None:
    scene = ball(6)
    scene.opacities[:2] = np.inf, -np.inf
    scene.log_scales[2, 0] = -np.inf
    scene.rotations[3] = 0
    scene.colours[4, 1] = np.nan
    scene.positions[5] = np.inf
    kept, odd = cleaned(scene)
    assert odd == Odd(dropped=2, endless=2, flat=1, turnless=1) and kept.count == 4
    assert kept.rotations[3].tolist() == [1, 0, 0, 0]
    with pytest.raises(InputError, match="2 of 6 splats hold a NaN"):
        cleaned(scene, strict=True)
    with pytest.raises(InputError, match="no splat that can be shown, of 1"):
        cleaned(scene.take(np.array([4])))


def test_a_path_s_name_says_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "a.ply").write_bytes(write_ply(ball(3)))
    found, nbytes = read_scene_file(tmp_path / "a.ply")
    same(found, ball(3))
    assert nbytes == (tmp_path / "a.ply").stat().st_size
    for name, told in {"b.obj": "no scene that can be read", "c.ply": "No such file"}.items():
        with pytest.raises((InputError, FileNotFoundError), match=told):
            read_scene_file(tmp_path / name)
    with pytest.raises(InputError, match="no meta"):
        read_scene_file(tmp_path)
    with pytest.raises(InputError, match="takes minutes"):
        scene_bytes(ball(3), tmp_path / "a.sog")


@pytest.mark.parametrize("name", ["a.spz", "a.compressed.ply"])
def test_formats_of_others_keep_what_they_can(
    tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gaussforge")
    scene = ball(500, 2)
    (tmp_path / name).write_bytes(scene_bytes(scene, tmp_path / name))
    found, _ = read_scene_file(tmp_path / name)
    apart = np.linalg.norm(found.positions[:, None] - scene.positions[None], axis=2)
    assert apart.min(0).max() < 0.01
    which = apart.argmin(1)
    assert np.abs(found.log_scales - scene.log_scales[which]).max() < 0.1
    assert np.median(np.abs(found.harmonics - scene.harmonics[which])) < 0.05
    same_way = (turns.unit(found.rotations) * turns.unit(scene.rotations[which])).sum(1)
    assert np.abs(same_way).min() > 0.99
    assert capfd.readouterr().out == ""
    assert found.bands == 2 and found.count == 500
    for cut in (0, 10, 200):
        (tmp_path / name).write_bytes(scene_bytes(scene, tmp_path / name)[:cut])
        with pytest.raises(InputError, match="cannot read"):
            read_scene_file(tmp_path / name)
