"""The demo of scenes with a small one: what its receiver measures is what the link allows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scenes import ball, small_pictures
from typer.testing import CliRunner

from thinwire.cli.app import app
from thinwire.uses.scenes.files.packed_scene import read_scene
from thinwire.uses.scenes.files.ply import write_ply
from thinwire.uses.scenes.run.demo_program import PACKED, RIVAL, pieces_of
from thinwire.uses.scenes.run.record import SceneRecord

pytest.importorskip("zstandard")


def invoke(*arguments: object):
    return CliRunner(env={"NO_COLOR": "1", "TERM": "dumb"}).invoke(
        app, ["demo", "scenes", *map(str, arguments)]
    )


def test_layers_and_spz_are_seen_when_the_link_has_carried_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gaussforge")
    small_pictures(monkeypatch)
    out, rate = tmp_path / "out", 80_000
    (tmp_path / "ball.ply").write_bytes(write_ply(ball(2100, 1)))
    found = invoke("--scene", tmp_path / "ball.ply", "--link", "640kbit", "--seconds", 0.5, "--out", out,
                   "--credit", "nobody's", "--json")  # fmt: skip
    assert found.exit_code == 0, found.output
    record = SceneRecord.from_dict(json.loads(found.stdout))
    assert record.to_dict() == json.loads((out / "run.json").read_text()) and record.credit == "nobody's"
    data = (out / PACKED).read_bytes()
    assert 0.96 * 40000 <= len(data) == record.packed_nbytes <= 40000
    pieces = pieces_of(PACKED, data)
    assert b"".join(pieces) == data and len(pieces) == len(record.layers) == len(read_scene(data)) > 1
    sent = 0
    for piece, layer in zip(pieces, record.layers, strict=True):
        sent += len(piece)
        assert layer.seconds_predicted == pytest.approx(sent / rate)
        assert layer.seconds_measured is not None and layer.seconds_measured >= sent / rate
    (spz,) = record.rivals
    assert spz.nbytes == (out / RIVAL).stat().st_size
    assert spz.seconds_measured is not None and spz.seconds_measured >= spz.nbytes / rate
    assert "SPZ shows nothing for" in (out / "report.html").read_text("utf-8")


WRONG = {
    "has no rate": ["--link", "none"],
    "carries 1250 bytes in --seconds 0.01": ["--seconds", "0.01"],
    "there is no --scene": ["--scene", "nowhere.ply"],
    "--seconds is 0": ["--seconds", "0"],
}


@pytest.mark.parametrize("told", WRONG)
def test_what_cannot_be_shown_is_refused(told: str, tmp_path: Path) -> None:
    found = invoke("--out", tmp_path / "out", *WRONG[told])
    assert found.exit_code == 2 and told in found.stderr, found.output
    assert not (tmp_path / "out").exists()


def test_a_demo_that_fails_does_not_leave_the_record_of_another(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "bad.ply").write_bytes(b"no scene")
    found = invoke("--out", tmp_path, "--scene", tmp_path / "bad.ply")
    assert found.exit_code == 2 and "bad.ply" in found.stderr and not (tmp_path / "run.json").exists()
