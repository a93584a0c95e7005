"""Scene files: what is written reads back, what others write is read, and damage is told in a sentence."""

from __future__ import annotations

import gzip
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import ball

from thinwire.types import InputError, PayloadError
from thinwire.uses.scenes.code import orientations
from thinwire.uses.scenes.files.ply import read_ply, write_ply
from thinwire.uses.scenes.files.scene_file import read_scene_file, scene_bytes
from thinwire.uses.scenes.scene import Odd, Splats, cleaned


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
    for name in (b"scale_0", b"f_dc_0"):
        with pytest.raises(PayloadError, match=f"no {name.decode()}: a mesh or a point cloud"):
            read_ply(write_ply(ball(3)).replace(name, b"q" * len(name)))


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
    for which in ([4], []):
        with pytest.raises(InputError, match=f"no splat that can be shown, of {len(which)}"):
            cleaned(scene.take(np.array(which, int)))
    stray = ball(60)
    stray.positions[3] = 1e8
    assert cleaned(stray)[1] == Odd(far=1) and cleaned(stray)[0].count == 59
    with pytest.raises(InputError, match=r"1 of 60 splats are 1e\+06 times as far out"):
        cleaned(stray, strict=True)


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
    same_way = (orientations.unit(found.rotations) * orientations.unit(scene.rotations[which])).sum(1)
    assert np.abs(same_way).min() > 0.99
    assert capfd.readouterr().out == ""
    assert found.bands == 2 and found.count == 500
    for cut in (0, 10, 200):
        (tmp_path / name).write_bytes(scene_bytes(scene, tmp_path / name)[:cut])
        with pytest.raises(InputError, match="cannot read"):
            read_scene_file(tmp_path / name)


def edited(data: bytes, **by: str) -> bytes:
    """Return a ``.ply`` whose header has other words in place of some, and newlines of ``mark``."""
    mark = by.pop("mark", "\n")
    head, _, body = data.partition(b"end_header\n")
    text = head.decode() + "end_header\n"
    for old, new in by.items():
        text = text.replace(old, new)
    return text.replace("\n", mark).encode() + body


FACES = "element face 2\nproperty list uchar int vertex_indices\n"
FACE_DATA = bytes([3]) + bytes(12) + bytes([1]) + bytes(4)
CAMERA = "element camera 2\nproperty float at\nproperty uchar kind\n"
AS_WRITTEN = {
    "faces behind": edited(write_ply(ball(4, 1)), end_header=FACES + "end_header") + FACE_DATA,
    "faces before": edited(write_ply(ball(4, 1)), **{"element vertex": FACES + "element vertex"}).replace(
        b"end_header\n", b"end_header\n" + FACE_DATA
    ),
    "cameras before": edited(write_ply(ball(4, 1)), **{"element vertex": CAMERA + "element vertex"}).replace(
        b"end_header\n", b"end_header\n" + bytes(10)
    ),
    "faces before, as text": rewritten(ball(4, 1), "ascii")
    .replace(b"element vertex", FACES.encode() + b"element vertex")
    .replace(b"end_header\n", b"end_header\n3 0 1 2\n1 0\n"),
    "header of Windows": edited(write_ply(ball(4, 1)), mark="\r\n"),
    "header of an old Macintosh": edited(write_ply(ball(4, 1)), mark="\r"),
    "text of Windows": rewritten(ball(4, 1), "ascii").replace(b"\n", b"\r\n"),
    "its end in a comment": edited(write_ply(ball(4, 1)), ply="ply\ncomment end_header comes later"),
    "no normals": None,
}


@pytest.mark.parametrize("name", AS_WRITTEN)
def test_a_ply_is_read_however_it_is_written(name: str) -> None:
    whole = AS_WRITTEN[name]
    if whole is None:
        whole = (
            rewritten(ball(4, 1), "ascii").replace(b"double nx", b"double a").replace(b"double nz", b"char b")
        )
    same(read_ply(whole), ball(4, 1))


def test_shown_colours_and_disks_are_read() -> None:
    """As some programs write them: red, green and blue of 8 or 16 bits or 0 to 1, and two scales."""
    scene = ball(5)
    shown = np.clip(0.5 + 0.28209479 * scene.colours, 0, 1)
    names = {"x": "<f4", "y": "<f4", "z": "<f4", "scale_0": "<f4", "scale_1": "<f4", "opacity": "<f8"}
    names |= {f"rot_{i}": "<f4" for i in range(4)}
    for kind, word, full in (("<u1", "uchar", 255), ("<u2", "ushort", 65535), ("<f4", "float", 1)):
        rows = np.zeros(5, np.dtype([*names.items(), *((c, kind) for c in ("red", "green", "blue"))]))
        for i in range(3):
            rows["xyz"[i]], rows[("red", "green", "blue")[i]] = scene.positions[:, i], shown[:, i] * full
        for i in range(4):
            rows[f"rot_{i}"] = scene.rotations[:, i]
        rows["scale_0"], rows["scale_1"] = scene.log_scales[:, 0], scene.log_scales[:, 1]
        words = {"<f4": "float", "<f8": "double", kind: word}
        lines = [f"property {words[rows.dtype[n].str.replace('|', '<')]} {n}" for n in rows.dtype.names]
        top = ["ply", "format binary_little_endian 1.0", "element vertex 5", *lines, "end_header\n"]
        found = read_ply("\n".join(top).encode() + rows.tobytes())
        assert np.abs(np.clip(0.5 + 0.28209479 * found.colours, 0, 1) - shown).max() < 1.01 / full + 1e-6
        assert np.isneginf(found.log_scales[:, 2]).all()
        assert (found.log_scales[:, :2] == scene.log_scales[:, :2]).all()


NOT_READ = {
    "zero.ply": (write_ply(Splats.of(np.zeros((0, 3)))), "it holds no splats"),
    "empty.ply": (b"", "it is empty"),
    "empty.splat": (b"", "it is empty"),
    "cut.splat": (bytes(40), "40 bytes are no whole number of splats of 32"),
    "packed.ply": (gzip.compress(PLY), "it is packed by gzip; unpack it first"),
    "lists.ply": (edited(PLY, end_header="property list uchar int q\nend_header"), "vertices with lists"),
    "odd.ply": (PLY.replace(b"f_rest_8", b"another_"), "8 f_rest columns, and a scene has 0, 9, 24, 45"),
    "faces.ply": (
        edited(PLY, **{"element vertex": "element faces"}),
        "its elements are faces, and",
    ),
    "many.ply": (
        edited(PLY, **{"element vertex": FACES.replace("2", "999999999") + "element vertex"}),
        "it was cut short",
    ),
}


@pytest.mark.parametrize("name", NOT_READ)
def test_what_is_no_scene_is_told_in_a_sentence(tmp_path: Path, name: str) -> None:
    data, told = NOT_READ[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=told):
        read_scene_file(tmp_path / name)


def test_what_a_file_is_counts_more_than_its_name(tmp_path: Path) -> None:
    pytest.importorskip("gaussforge")
    packed = {
        form: scene_bytes(ball(300), tmp_path / f"a.{form}") for form in ("spz", "compressed.ply", "ply")
    }
    for form, name in (("spz", "a.ply"), ("compressed.ply", "b.ply"), ("ply", "c.compressed.ply")):
        (tmp_path / name).write_bytes(packed[form])
        assert read_scene_file(tmp_path / name)[0].count == 300
