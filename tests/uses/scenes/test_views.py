"""From where scenes are judged: around them, in their rooms, or as a user's cameras say."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scenes import ball

from thinwire.types import InputError
from thinwire.uses.scenes.scene import Splats
from thinwire.uses.scenes.view.cameras import INSIDE, OUTSIDE, Camera, SceneFrame, look_at
from thinwire.uses.scenes.view.given import read_cameras
from thinwire.uses.scenes.view.project import Drawable
from thinwire.uses.scenes.view.render import Pictures, seen_in
from thinwire.uses.scenes.view.views import HELD_OUT, Views

SIZE = 64


def room(n: int = 3000) -> Splats:
    """Return splats on the walls of a room of 6 by 3 by 8, and a ball that stands in it."""
    draw, half = np.random.default_rng(0), np.array([3, 1.5, 4])
    places = draw.uniform(-1, 1, (n, 3))
    side = draw.integers(0, 3, n)
    places[np.arange(n), side] = np.sign(places[np.arange(n), side])
    own = ball(400, 0)
    scales = np.concatenate([np.full((n, 3), np.log(0.1)), own.log_scales - 1.5])
    places = np.concatenate([places * half, own.positions * 0.4 + [1, 0.9, -2]])
    return Splats.of(places, log_scales=scales, opacities=np.full(n + 400, 4.0), colours=np.sin(3 * places))


def plate(n: int = 2000) -> Splats:
    """Return splats on a floor, and a ball on it: nothing to be within."""
    draw, own = np.random.default_rng(0), ball(400, 0)
    floor = draw.uniform(-1, 1, (n, 3)) * [3, 0, 3]
    places = np.concatenate([floor, own.positions * 0.4 - [0, 0.5, 0]])
    return Splats.of(places, log_scales=np.full((n + 400, 3), np.log(0.06)), opacities=np.full(n + 400, 4.0))


def test_rooms_are_looked_at_from_within_and_other_scenes_are_not() -> None:
    for scene, kinds in ((room(), [OUTSIDE, INSIDE]), (plate(), [OUTSIDE])):
        views = Views.of(scene, SIZE)
        assert views.kinds == kinds and {camera.kind for camera in views.searched} == set(kinds)
        assert len(views.reported) == 4 * len(kinds)
        for camera in [*views.chosen, *views.reported]:
            assert np.allclose(camera.turn @ camera.turn.T, np.eye(3), atol=1e-9)
            assert np.linalg.det(camera.turn) == pytest.approx(1)
            free = np.linalg.norm(scene.positions - camera.place, axis=1).min()
            within = bool((np.abs(camera.place) < [3, 1.5, 4]).all()) and free > camera.near
            assert within or camera.kind == OUTSIDE
    views = Views.of(room(), SIZE)
    inside, outside = (
        seen_in(Drawable.of(room()), [camera for camera in views.chosen if camera.kind == kind])
        for kind in (INSIDE, OUTSIDE)
    )
    assert (inside.weights[3000:] > 0).mean() > 0.9
    assert inside.weights[3000:].sum() > 10 * outside.weights[3000:].sum()  # what walls hide


def test_what_is_claimed_of_pictures_is_what_the_worst_kind_has() -> None:
    scene = ball(200, 0)
    near, far = (look_at(SceneFrame.of(scene), a, 10, 32) for a in (0, 90))
    pictures = Pictures(scene, [near, Camera(far.place, far.turn, far.focal, 32, 32, far.near, INSIDE)])
    others = [picture + off for picture, off in zip(pictures.of(scene), (0.001, 0.1), strict=True)]
    found = pictures.by_kind(others)
    assert found[OUTSIDE][1] > found[INSIDE][1] + 20 and pictures.psnr(others) == found[INSIDE][1]
    assert pictures.ssim(others) == found[INSIDE][2] < found[OUTSIDE][2]


def entries(cameras: list[Camera]) -> list[dict]:
    """Return cameras as 3D Gaussian Splatting writes them."""
    return [
        {"id": i, "img_name": f"{i:03}", "width": 4 * c.width, "height": 2 * c.height, "fx": 4 * c.focal,
         "fy": 2 * c.focal, "position": c.place.tolist(), "rotation": c.turn.T.tolist()}
        for i, c in enumerate(cameras)
    ]  # fmt: skip


def quaternion(turn: np.ndarray) -> np.ndarray:
    """Return a rotation as w, x, y, z: the first axis of a matrix made of it."""
    found = np.zeros((4, 4))
    found[0, 0] = np.trace(turn)
    off = turn[2, 1] - turn[1, 2], turn[0, 2] - turn[2, 0], turn[1, 0] - turn[0, 1]
    found[0, 1:] = found[1:, 0] = off
    found[1:, 1:] = turn + turn.T - np.trace(turn) * np.eye(3)
    return np.linalg.eigh(found)[1][:, -1]


def as_json(cameras: list[Camera], at: Path) -> Path:
    (at / "cameras.json").write_text(json.dumps(entries(cameras)))
    return at / "cameras.json"


def as_transforms(cameras: list[Camera], at: Path) -> Path:
    frames = []
    for i, c in enumerate(cameras):
        matrix = np.eye(4)
        matrix[:3, :3], matrix[:3, 3] = (c.turn * [[1], [-1], [-1]]).T, c.place
        frames.append({"file_path": f"{i:03}.png", "transform_matrix": matrix.tolist()})
    first = cameras[0]
    about = {"fl_x": 2 * first.focal, "w": 2 * first.width, "h": 2 * first.height, "frames": frames}
    (at / "transforms.json").write_text(json.dumps(about))
    return at


def as_blender(cameras: list[Camera], at: Path) -> Path:
    """No sizes of pictures, but their middles; a folder's file for training alone."""
    place = as_transforms(cameras, at) / "transforms.json"
    about = json.loads(place.read_text())
    about |= {"cx": about.pop("w") / 2, "cy": about.pop("h") / 2}
    place.unlink()
    (at / "transforms_train.json").write_text(json.dumps(about))
    return at


def as_text(cameras: list[Camera], at: Path) -> Path:
    (at / "sparse" / "0").mkdir(parents=True)
    first = cameras[0]
    lens = f"7 OPENCV {first.width} {first.height} {first.focal} {first.focal} 32 32 .1 0 0 0"
    (at / "sparse/0/cameras.txt").write_text(f"# cameras\n{lens}\n")
    lines = [
        " ".join(map(str, [i, *quaternion(c.turn), *(-c.turn @ c.place), 7, f"{i:03} a.jpg"])) + "\n1 2 -1\n"
        for i, c in enumerate(cameras)
    ]
    (at / "sparse/0/images.txt").write_text("# images\n" + "".join(lines))
    return at


def as_binary(cameras: list[Camera], at: Path) -> Path:
    first = cameras[0]
    lens = struct.pack("<iiQQ3d", 7, 0, first.width, first.height, first.focal, 32, 32)
    (at / "cameras.bin").write_bytes(struct.pack("<Q", 1) + lens)
    images = b"".join(
        struct.pack("<i4d3di", i, *quaternion(c.turn), *(-c.turn @ c.place), 7) + f"{i:03}\0".encode()
        + struct.pack("<Q", 2) + bytes(48)
        for i, c in enumerate(cameras)
    )  # fmt: skip
    (at / "images.bin").write_bytes(struct.pack("<Q", len(cameras)) + images)
    return at


FORMS: list[Callable[[list[Camera], Path], Path]] = [as_json, as_transforms, as_blender, as_text, as_binary]


@pytest.mark.parametrize("form", FORMS)
def test_given_cameras_come_as_they_are_and_damage_is_told(
    form: Callable[[list[Camera], Path], Path], tmp_path: Path
) -> None:
    frame = SceneFrame.of(ball(100, 0))
    cameras = [look_at(frame, 17 * i, 3 * i - 20, SIZE) for i in range(12)]
    place = form(cameras, tmp_path)
    found = read_cameras(place, SIZE)
    for a, b in zip(found, cameras, strict=True):
        assert (a.width, a.height, a.kind) == (SIZE, SIZE, "as given")
        assert np.allclose(a.place, b.place, atol=1e-5) and np.allclose(a.turn, b.turn, atol=1e-6)
        assert a.focal == pytest.approx(b.focal)
    views = Views.given(ball(100, 0), found)
    assert len(views.reported) == 2 and len(views.chosen) == 12 - 2 and HELD_OUT == 8
    draw = np.random.default_rng(0)
    for file in [f for f in tmp_path.rglob("*") if f.is_file()]:
        whole = file.read_bytes()
        for _ in range(60):
            damaged = bytearray(whole[: draw.integers(0, len(whole))] if draw.random() < 0.5 else whole)
            for at in draw.integers(0, max(len(damaged), 1), 3) if damaged else ():
                damaged[at] = draw.integers(0, 256)
            file.write_bytes(bytes(damaged))
            try:
                read_cameras(place, SIZE)
            except InputError as e:
                assert "\n" not in str(e) and str(tmp_path) in str(e)
        file.write_bytes(whole)


WRONG = {
    "no camera in it": "[]",
    "a number that is not finite": [{"fx": float("nan")}],
    "focal lengths of": [{"fx": 0}],
    "or above": [{"position": [1e300, 0, 0]}],
    "a rotation that is none": [{"rotation": np.zeros((3, 3)).tolist()}],
    "'a' has a rotation": {"camera_angle_x": 1, "frames": [{"file_path": "a", "transform_matrix": [0] * 16}]},
    "no angle in radians": {"camera_angle_x": 40, "frames": [{"transform_matrix": np.eye(4).tolist()}]},
    "pictures of 100000 by 2 pixels": [{"width": 1e5, "height": 2}],
    "neither a list": "{}",
    "TypeError": "[1]",
    "RecursionError": "[" * 100_000,
    "JSONDecodeError": "",
}


def test_cameras_that_cannot_be_are_refused_in_a_sentence(tmp_path: Path) -> None:
    (own,) = entries([look_at(SceneFrame.of(ball(9, 0)), 0, 0, SIZE)])
    for told, wrong in WRONG.items():
        merged = [own | part for part in wrong] if isinstance(wrong, list) else wrong
        text = merged if isinstance(merged, str) else json.dumps(merged)
        (tmp_path / "cameras.json").write_text(text)
        with pytest.raises(InputError, match=told):
            read_cameras(tmp_path / "cameras.json", SIZE)
    for missing in (tmp_path / "none.json", tmp_path / "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(InputError, match="cannot read cameras"):
            read_cameras(missing, SIZE)
