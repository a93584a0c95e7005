"""``thinwire view``: a page of any scene, refusals in a sentence, nothing half-written."""

from __future__ import annotations

from pathlib import Path

import pytest
from scenes import ball
from typer.testing import CliRunner

from thinwire.cli.app import app
from thinwire.uses.scenes import importance_coder
from thinwire.uses.scenes.files.packed_scene import write_scene
from thinwire.uses.scenes.files.ply import write_ply
from thinwire.uses.scenes.part import Layer

CREDIT = "PLAYBOT by Stephane Agullo, CC-BY-4.0"


def view(*arguments: object):
    command = ["view", *map(str, arguments)]
    return CliRunner(env={"NO_COLOR": "1", "TERM": "dumb"}).invoke(app, command)


def one_sentence(result, code: int) -> str:
    assert result.exit_code == code, result.output
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("thinwire: ")
    return line


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """Return a small packed scene of one layer."""
    pytest.importorskip("zstandard")
    path = tmp_path / "scene.tw"
    path.write_bytes(
        write_scene([Layer(importance_coder.encode(importance_coder.Analysis.of(ball(200), 48), 1e-6))])
    )
    return path


def test_packed_and_other_scenes_become_pages(packed: Path, tmp_path: Path) -> None:
    page, other = tmp_path / "page.html", tmp_path / "other.html"
    result = view(packed, "-o", page, "--credit", CREDIT)
    assert result.exit_code == 0, result.output
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and "<title>scene</title>" in text and CREDIT in text
    assert f"{page.stat().st_size} bytes" in result.stderr + result.stdout
    (tmp_path / "ball.ply").write_bytes(write_ply(ball(200)))
    assert view(tmp_path / "ball.ply", "-o", other, "--title", "a ball").exit_code == 0
    assert "<title>a ball</title>" in other.read_text(encoding="utf-8")


def test_pages_are_not_written_over_unless_forced(packed: Path, tmp_path: Path) -> None:
    there = tmp_path / "page.html"
    there.write_text("mine")
    assert "give --force" in one_sentence(view(packed, "-o", there), 2)
    assert there.read_text() == "mine"
    assert view(packed, "-o", there, "--force").exit_code == 0
    assert there.read_text(encoding="utf-8") != "mine"


def test_what_is_no_scene_is_told_and_nothing_is_written(packed: Path, tmp_path: Path) -> None:
    page, wrong = tmp_path / "page.html", tmp_path / "wrong.ply"
    wrong.write_text("ply\n")
    packed.write_bytes(packed.read_bytes()[:-1])
    assert "it was cut short" in one_sentence(view(packed, "-o", page), 3)
    assert "cannot read" in one_sentence(view(wrong, "-o", page), 2)
    assert "does not begin as a packed scene" in one_sentence(view(__file__, "-o", page), 3)
    assert "No such file" in one_sentence(view(tmp_path / "none.tw", "-o", page), 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scene.tw", "wrong.ply"]
