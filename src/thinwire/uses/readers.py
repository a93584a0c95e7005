"""Who says what is in a file, or in a folder of one: the readers of all uses.

A reader's module has ``KIND``, what it reads, in words; ``knows(name, head)``, whether a file of that name
and beginning is of it; ``MANIFEST``, the file that tells a folder of it; and ``describe(place, check)``. That
returns what is there as JSON values, ``kind``, ``where`` and ``nbytes`` first; lists of objects are shown as
tables. With ``check`` it reads everything. It raises ``InputError``, ``PayloadError``, ``LinkError`` or
``OSError``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from thinwire.files.base import Folder
from thinwire.files.local_folder import PlainFolder
from thinwire.uses import uses

HEAD = 4096  # bytes of a file that its kind is told by
MOST_MANIFEST = 1 << 20  # bytes


def readers() -> list[Any]:
    """Return the modules of all readers."""
    return [use.named(module) for use in uses() for module in use.readers]


def kind_of(path: Path) -> str | None:
    """Return in words what kind of file this is; None for one that no use knows."""
    reader = _reader_of(path)
    return None if reader is None else str(reader.KIND)


def describe_file(path: Path, check: bool) -> dict[str, Any] | None:
    """Return what is in a file that a use knows; None where none does."""
    reader = _reader_of(path)
    return None if reader is None else reader.describe(path, check)


def _reader_of(path: Path) -> Any | None:
    with path.open("rb") as file:
        head = file.read(HEAD)
    return next((r for r in readers() if r.knows(path.name, head)), None)


def describe_folder(folder: Folder, check: bool) -> dict[str, Any] | None:
    """Return what is in a folder that a use knows; None where none does."""
    return next((r.describe(folder, check) for r in readers() if _holds(folder, r.MANIFEST)), None)


def _holds(folder: Folder, name: str) -> bool:
    if isinstance(folder, PlainFolder):
        return (folder.path / name).is_file()
    try:
        folder.read(name, MOST_MANIFEST)
    except FileNotFoundError:
        return False
    return True
