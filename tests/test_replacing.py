"""Files that are replaced whole, or left as they were."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from thinwire.replacing import LEFT, PART, replacing, sweep


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_a_reader_finds_the_old_file_until_the_new_one_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    target.write_text("old")
    with replacing(target) as part:
        part.write_text("half")
        assert target.read_text() == "old"
        assert part.parent == tmp_path and part.name.startswith(".run.json.") and part.name.endswith(PART)
        part.write_text("new")
    assert target.read_text() == "new" and names(tmp_path) == ["run.json"]


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt()])
def test_whatever_ends_the_block_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, error: BaseException
) -> None:
    target = tmp_path / "run.json"
    target.write_text("old")
    with pytest.raises(type(error)), replacing(target) as part:
        part.write_text("half")
        raise error
    assert target.read_text() == "old" and names(tmp_path) == ["run.json"]


def test_a_file_that_cannot_take_the_place_is_not_left(tmp_path: Path) -> None:
    (tmp_path / "taken" / "within").mkdir(parents=True)
    with pytest.raises(OSError), replacing(tmp_path / "taken") as part:
        part.write_text("new")
    assert names(tmp_path) == ["taken"]


def test_others_may_read_what_the_umask_lets_them(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with replacing(tmp_path / "state") as part:
            part.touch(0o600)  # as safetensors does
            part.write_bytes(b"new")
    finally:
        os.umask(before)
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o644


def test_two_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    with replacing(tmp_path / "a") as one, replacing(tmp_path / "a") as other:
        assert one != other
        one.write_text("1")
        other.write_text("2")
    assert (tmp_path / "a").read_text() == "1" and names(tmp_path) == ["a"]


def rest(file: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(file, (then, then))


def test_what_a_killed_writer_left_is_swept_once_it_has_rested(tmp_path: Path) -> None:
    dies = "import os, sys; from thinwire.replacing import replacing as r\n"
    dies += "with r(sys.argv[1]) as part: part.write_text('half'); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", dies, str(tmp_path / "run.json")]).returncode == 9
    (left,) = tmp_path.iterdir()
    sweep(tmp_path / "run.json")
    assert left.exists()  # another writer may be at it
    rest(left, LEFT + 10)
    sweep(tmp_path / "run.json")
    assert names(tmp_path) == []


def test_nothing_but_what_writers_of_the_file_leave_is_swept(tmp_path: Path) -> None:
    others = [
        "run.json",
        ".run.json",
        "run.json.01234567.part",
        ".run.json.0123456.part",
        ".run.json.012345678.part",
        ".run.json.0123456G.part",
        ".run.json.01234567.part~",
        ".runxjson.01234567.part",
        ".run.json.bak.01234567.part",
    ]
    for name in others:
        (tmp_path / name).write_text("somebody's")
        rest(tmp_path / name, 10 * LEFT)
    (tmp_path / ".run.json.00000000.part").mkdir()
    rest(tmp_path / ".run.json.00000000.part", 10 * LEFT)
    sweep(tmp_path / "run.json")
    assert names(tmp_path) == sorted([*others, ".run.json.00000000.part"])
    sweep(tmp_path / "gone" / "run.json")  # it is not there: writing will say so
