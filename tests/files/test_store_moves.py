"""Stores that move a written file in: what fails on the way leaves the old file."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from thinwire.files.base import Folder
from thinwire.files.local_folder import open_folder

pytest.importorskip("zstandard")
fsspec = pytest.importorskip("fsspec")
from fsspec.implementations.local import LocalFileSystem  # noqa: E402


class Stubborn(LocalFileSystem):
    """A server whose files are written by moving them, which moves onto no file that is there.

    ``answers``: what the next moves end in, None for what they would; ``ends``: the connection along with it.
    """

    protocol = "stubborn"
    answers: ClassVar[list[Exception | None]] = []
    ends: ClassVar[bool] = False
    ended: Exception | None = None

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        found: str = super()._strip_protocol(path.removeprefix("stubborn://"))
        return found

    def rm_file(self, path: str) -> None:
        if self.ended is not None:
            raise self.ended
        super().rm_file(path)

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        error = self.answers.pop(0) if self.answers else None
        self.ended = self.ended or (error if self.ends else None)
        if (failure := self.ended or error) is not None:
            raise failure
        if self.exists(path2):
            raise FileExistsError(errno.EEXIST, "File exists", path2)
        super().mv(path1, path2)


@pytest.fixture
def stubborn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    fsspec.register_implementation("stubborn", Stubborn, clobber=True)
    monkeypatch.setattr(Stubborn, "answers", [])
    folder = open_folder(f"stubborn://{tmp_path}")
    folder.write("state.json", b"old")
    yield folder


TROUBLES = [
    OSError(errno.ENOSPC, "No space left on device"),
    OSError("Socket is closed"),
    PermissionError(errno.EACCES, "Permission denied"),
    ConnectionResetError(),
]
LOST = [OSError("Socket is closed"), ConnectionResetError()]
FULL = [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EDQUOT, "Disk quota exceeded")]


def test_a_server_that_moves_onto_no_file_has_its_files_replaced(stubborn: Folder) -> None:
    stubborn.write("state.json", b"new")
    assert stubborn.read("state.json", 10) == b"new"
    assert [*stubborn.sizes("")] == ["state.json"]


@pytest.mark.parametrize("moved", [0, 1, 2])
@pytest.mark.parametrize(
    ("error", "ends"), [*((e, False) for e in TROUBLES), *((e, True) for e in LOST)], ids=repr
)
def test_what_cannot_be_moved_in_leaves_the_old_file(
    stubborn: Folder, monkeypatch: pytest.MonkeyPatch, error: Exception, moved: int, ends: bool
) -> None:
    """It is moved in, which is refused, then the old one aside, then it once more: each of these may fail."""
    Stubborn.answers[:] = [None] * moved + [error, error][moved > 0 :]
    monkeypatch.setattr(Stubborn, "ends", ends)
    with pytest.raises(type(error)):
        stubborn.write("state.json", b"new")
    assert stubborn.read("state.json", 10) == b"old"
    assert ends or [*stubborn.sizes("")] == ["state.json"]
    Stubborn.answers.clear()
    monkeypatch.setattr(Stubborn, "ends", False)
    stubborn.write("state.json", b"new")
    assert stubborn.read("state.json", 10) == b"new"


@pytest.mark.parametrize("error", [*FULL, ConnectionResetError(), TimeoutError()], ids=repr)
def test_a_full_disk_or_a_lost_line_is_no_file_in_the_way(stubborn: Folder, error: Exception) -> None:
    Stubborn.answers[:] = [error]
    with pytest.raises(type(error)):
        stubborn.write("state.json", b"new")
    assert stubborn.read("state.json", 10) == b"old"
