"""Reports of packed scenes: pictures with their credit, true figures, several runs on one page."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scenes import ball, small_pictures
from typer.testing import CliRunner

from thinwire.cli.app import app
from thinwire.uses.kinds import load_run, load_runs, show_of
from thinwire.uses.scenes.files.ply import write_ply
from thinwire.uses.scenes.run.left_pictures import credit_of, labelled, packaged
from thinwire.uses.scenes.run.record import SceneRecord

pytest.importorskip("zstandard")
LICENCE = "* title: BALL\n* author: A. Person\n* license type: CC-BY-4.0 (http://example.org)\n"


def invoke(*arguments: object):
    return CliRunner(env={"NO_COLOR": "1", "TERM": "dumb"}).invoke(app, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the runs ``small`` and ``large`` of one scene, beside its licence."""
    folder = tmp_path_factory.mktemp("scenes")
    scene = folder / "ball.ply"
    scene.write_bytes(write_ply(ball(2100, 1)))
    (folder / "LICENSE.txt").write_text(LICENCE)
    asked = {"small": ["--seconds", 1, "--link", "320kbit"], "large": ["--target", "45kB"]}
    with pytest.MonkeyPatch.context() as patch:
        small_pictures(patch)
        for name, options in asked.items():
            report = folder / "runs" / name
            found = invoke("pack", scene, "-o", folder / f"{name}.tw", "--report", report, *options)
            assert found.exit_code == 0, found.output
    return folder / "runs"


def test_pack_leaves_a_run_whose_pictures_bear_the_credit(runs: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    record, folder = load_run(runs / "small"), runs / "small"
    assert isinstance(record, SceneRecord) and record.status == "done" and record.totals["seconds"] > 0
    assert record.credit == '"BALL" by A. Person, CC-BY-4.0'
    assert [p.name for p in record.pictures][:2] == ["source", "layer 1"]
    named = {p.file for p in record.pictures} | {p.difference for p in record.pictures[1:]}
    assert named == {p.name for p in folder.glob("*.png")}
    strips = [np.asarray(image.open(folder / name))[96:] for name in sorted(named)]
    assert all(len(strip) and strip[-14:].std() > 10 for strip in strips)  # letters in the last line
    page = (folder / "report.html").read_text("utf-8")
    assert page.count("data:image/png;base64,") == len(named)
    assert "A. Person" in page and f"Amplified {record.stronger:g} times" in page
    assert f"{record.packed_nbytes:,}" in page and "PSNR over seconds" in page


def test_seconds_are_predicted_for_the_link_asked_for(runs: Path) -> None:
    record = load_run(runs / "small")
    assert isinstance(record, SceneRecord) and record.link.rate_bytes_s == 40000
    expected = [layer.seconds_predicted for layer in record.layers]
    assert expected == sorted(expected) and expected[-1] == pytest.approx(record.packed_nbytes / 40000)
    assert all(layer.seconds_measured is None for layer in record.layers)
    assert [r.seconds_predicted for r in record.rivals] == [r.nbytes / 40000 for r in record.rivals]


def test_several_runs_share_a_page(runs: Path, tmp_path: Path) -> None:
    found = invoke("report", runs / "small", runs / "large", "--out", tmp_path / "both.html")
    assert found.exit_code == 0, found.output
    page = (tmp_path / "both.html").read_text("utf-8")
    assert "Layers of thinwire (small)" in page and "Pictures of thinwire (large)" in page
    assert "do not compare" not in page
    many = [load_run(runs / name).to_dict() for name in ("small", "large")]
    (tmp_path / "compare.json").write_text(json.dumps(many))
    loaded = load_runs([tmp_path])  # without the folders: the page says what is missing
    assert "picture-source.png is not beside the record" in "".join(show_of(loaded).cards(loaded))


def test_other_scenes_are_said_not_to_compare(runs: Path, tmp_path: Path) -> None:
    other = load_run(runs / "small").to_dict() | {"source": "cube.ply", "rivals": [], "layers": []}
    (tmp_path / "run.json").write_text(json.dumps(other))
    found = invoke("report", runs / "small", tmp_path, "--json", "--out", tmp_path / "both.html")
    assert found.exit_code == 0, found.output
    assert "differ in scene (ball.ply of 2100 splats, cube.ply of 2100 splats)" in (
        tmp_path / "both.html"
    ).read_text("utf-8")


def test_words_under_a_picture_leave_it_as_it_is() -> None:
    pytest.importorskip("PIL")
    pixels = np.random.default_rng(0).integers(0, 256, (40, 200, 3), np.uint8)
    short, long = labelled(pixels, "layer 1", ""), labelled(pixels, "layer 1", "by somebody " * 10)
    assert np.array_equal(np.asarray(short)[:40], pixels) and np.array_equal(np.asarray(long)[:40], pixels)
    assert short.width == long.width == 200 and long.height > short.height + 17  # in several lines


def test_a_licence_says_whose_scene_it_is(tmp_path: Path) -> None:
    assert credit_of(packaged()) == '"PLAYBOT" by Stephane Agullo (https://sa3d.fr), CC-BY-4.0'
    scene = tmp_path / "level"
    scene.mkdir()
    (tmp_path / "LICENSE").write_text("MIT\n\nPermission is hereby granted")
    assert credit_of(scene) == ""  # it names no author
    (tmp_path / "LICENCE-scene.md").write_text("author: B\n")
    assert credit_of(scene) == "by B"
    assert credit_of(scene / "other.ply") == ""  # of a file, only what lies beside it


def test_what_is_packaged_is_small_and_has_its_licence() -> None:
    folder = packaged().parent
    assert {f.name for f in folder.iterdir()} == {"3_0.sog", "LICENSE-playbot.txt"}
    assert sum(f.stat().st_size for f in folder.iterdir()) < 900_000


def test_wrong_options_are_refused_in_a_sentence(runs: Path, tmp_path: Path) -> None:
    scene, out = runs.parent / "ball.ply", tmp_path / "out.tw"
    (tmp_path / "file").write_text("mine")
    wrong = {
        "--credit is for pictures": ["--credit", "me"],
        "is a file; choose another --report": ["--report", tmp_path / "file"],
    }
    for told, options in wrong.items():
        found = invoke("pack", scene, "-o", out, "--target", "30kB", *options)
        assert found.exit_code == 2 and told in found.stderr, found.output
        assert not out.exists()
