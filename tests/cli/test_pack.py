"""``thinwire pack`` and ``unpack``: targets, refusals in a sentence, nothing half-written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from scenes import ball, small_pictures
from typer.testing import CliRunner

from thinwire.cli.app import app
from thinwire.uses.packing import PackConfig
from thinwire.uses.scenes import importance_coder
from thinwire.uses.scenes.files.ply import read_ply, write_ply
from thinwire.uses.scenes.run.record import SceneRecord
from thinwire.uses.scenes.scene import Splats
from thinwire.uses.scenes.view.cameras import SceneFrame, look_at

pytest.importorskip("zstandard")


def invoke(*arguments: object):
    return CliRunner(env={"NO_COLOR": "1", "TERM": "dumb"}).invoke(app, [str(a) for a in arguments])


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a small scene, whose pictures are small as well."""
    small_pictures(monkeypatch)
    path = tmp_path / "scene.ply"
    path.write_bytes(write_ply(ball(900, 1)))
    return path


def one_sentence(result, code: int) -> str:
    assert result.exit_code == code, result.output
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("thinwire: ")
    return line


def test_a_scene_goes_there_and_back(source: Path, tmp_path: Path) -> None:
    packed, back = tmp_path / "scene.tw", tmp_path / "back.ply"
    result = invoke("pack", source, "-o", packed, "--target", "15kB", "--json")
    assert result.exit_code == 0, result.output
    record = SceneRecord.from_dict(json.loads(result.stdout))
    assert 0.98 * 15000 <= packed.stat().st_size == record.packed_nbytes <= 15000
    assert record.source_nbytes == source.stat().st_size and record.target_nbytes == 15000
    assert 0 < record.packed_nbytes - sum(record.streams.values()) < 2000
    assert set(record.streams) == {"positions", "classes", *importance_coder.CHANNELS, "harmonics"}
    assert record.psnr_db is not None and record.psnr_db > 25
    assert invoke("unpack", packed, "-o", back).exit_code == 0
    assert read_ply(back.read_bytes()).count == record.splats == 900


def test_a_time_over_a_link_is_a_target(source: Path, tmp_path: Path) -> None:
    packed = tmp_path / "scene.tw"
    result = invoke("pack", source, "-o", packed, "--seconds", 1, "--link", "160kbit,100ms", "--json")
    assert result.exit_code == 0, result.output
    *_, layer = json.loads(result.stdout)["layers"]
    assert 0.97 <= layer["seconds_predicted"] <= 1 and layer["seconds_measured"] is None
    assert packed.stat().st_size <= 0.9 * 20000


def camera(place: list[float], scene: Splats, turn: int) -> dict[str, object]:
    """Return a camera of ``cameras.json`` that looks at a scene from an angle and from ``place`` more."""
    own = look_at(SceneFrame.of(scene), turn, 5, 96)
    size = {"width": 96, "height": 96, "fx": own.focal, "fy": own.focal}
    return size | {"position": (own.place + place).tolist(), "rotation": own.turn.T.tolist()}


def test_cameras_that_are_given_say_from_where_a_scene_is_judged(source: Path, tmp_path: Path) -> None:
    scene, places = read_ply(source.read_bytes()), tmp_path / "cameras.json"
    command = "pack", source, "-o", tmp_path / "scene.tw", "--quality", "32dB", "--cameras", places
    places.write_text(json.dumps([camera([1.2, 0, 0], scene, turn) for turn in range(0, 20, 2)]))
    result = invoke(*command, "--json")
    assert result.exit_code == 0, result.output
    record = SceneRecord.from_dict(json.loads(result.stdout))
    (view,) = record.views
    assert (view.name, view.chosen, view.reported, record.cameras) == ("as given", 8, 2, str(places))
    assert record.psnr_db is not None and view.psnr_db == record.psnr_db >= 32
    assert 0.05 * 900 < record.unseen < 0.9 * 900  # what lies on the far side
    said = invoke(*command, "--force")
    assert f"{record.unseen} of 900 splats" in said.output and "seen by none of the 8 cameras" in said.output
    places.write_text(json.dumps([camera([0, 0, -1000], scene, 0)]))
    assert "no camera of" in one_sentence(invoke(*command, "--force"), 2)
    places.write_text("[]")
    assert "there is no camera in it" in one_sentence(invoke(*command, "--force"), 2)


REFUSED = {
    "one target": [],
    "give one target:": ["--target", "1MB", "--quality", "40dB"],
    "--seconds and --link go together": ["--seconds", "4"],
    "'5 parsecs' is no number": ["--target", "5 parsecs"],
    "there is no recipe 'mesong'; did you mean mesongs?": ["--recipe", "mesong", "--target", "1MB"],
    "takes no target": ["--recipe", "mesongs", "--target", "1MB"],
    "prune=2.0 is not a number in 0..0.99": ["--recipe", "mesongs:prune=2"],
    "bytes at least, and 100 are asked for": ["--target", "100b"],
}


@pytest.mark.parametrize("told", REFUSED)
def test_what_cannot_be_is_refused_and_nothing_is_written(source: Path, tmp_path: Path, told: str) -> None:
    assert told in one_sentence(invoke("pack", source, "-o", tmp_path / "scene.tw", *REFUSED[told]), 2)
    assert [path.name for path in tmp_path.iterdir()] == [source.name]


def test_files_are_not_written_over_unless_forced(source: Path, tmp_path: Path) -> None:
    there = tmp_path / "scene.tw"
    there.write_text("mine")
    assert "give --force" in one_sentence(invoke("pack", source, "-o", there, "--target", "15kB"), 2)
    assert "give --force" in one_sentence(invoke("unpack", source, "-o", there), 2)
    assert there.read_text() == "mine"
    assert invoke("pack", source, "-o", there, "--target", "15kB", "--force").exit_code == 0
    assert there.stat().st_size > 10000


def test_what_is_no_packed_scene_is_told(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.ply"
    assert "does not begin as a packed scene" in one_sentence(invoke("unpack", source, "-o", out), 3)
    assert invoke("pack", source, "-o", tmp_path / "scene.tw", "--target", "15kB").exit_code == 0
    cut = one_sentence(invoke("unpack", tmp_path / "scene.tw", "-o", out, "--prefix", 3000), 3)
    assert "first layer ends at byte" in cut and not out.exists()
    wrong = one_sentence(invoke("unpack", tmp_path / "scene.tw", "-o", tmp_path / "out.sog"), 2)
    assert "takes minutes" in wrong
    assert "is no scene that can be read" in one_sentence(
        invoke("pack", __file__, "-o", out, "--target", "1MB"), 2
    )


def test_a_file_whose_name_is_no_text_is_shown_and_reported(source: Path, tmp_path: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/b\xff\xfed.ply"))
    try:
        source.rename(odd)
    except OSError:
        pytest.skip("this file system takes names of text only")
    assert invoke("view", odd, "-o", tmp_path / "page.html").exit_code == 0
    asked = "--target", "15kB", "--report", tmp_path / "report"
    result = invoke("pack", odd, "-o", tmp_path / "scene.tw", *asked)
    assert result.exit_code == 0, result.output
    assert "b??d" in (tmp_path / "report" / "report.html").read_text("utf-8")


def test_options_answer_to_their_old_names_and_the_help_has_the_new(source: Path, tmp_path: Path) -> None:
    (old := tmp_path / "old.toml").write_text('calibrate = "text.md"\nlike = "old.tw"\n')
    assert PackConfig.read_toml(old) == {"calibration_data": "text.md", "base": "old.tw"}
    help_text = invoke("pack", "--help").stdout
    assert "--base" in help_text and "--like" not in help_text and "--calibrate" not in help_text
    for option, new in {"--like": "--base", "--calibrate": "--calibration-data"}.items():
        both = invoke("pack", source, "-o", tmp_path / "x.tw", option, "a", new, "b")
        assert both.exit_code == 2 and f"its old name '{option[2:]}'" in both.stderr
        alone = invoke("pack", source, "-o", tmp_path / "x.tw", option, "a")
        assert "No such option" not in alone.stderr and new in alone.stderr
