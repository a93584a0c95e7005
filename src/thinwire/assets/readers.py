"""The kinds of assets: who says what is in a file or a folder of one.

Whoever adds a kind adds its line here. A reader's module has ``describe(place, check)``, which returns what
is there as JSON values, ``kind``, ``where`` and ``nbytes`` first; lists of objects are shown as tables. With
``check`` it reads everything. It raises ``InputError``, ``PayloadError``, ``LinkError`` or ``OSError``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.assets.splats.delivery import MANIFEST
from thinwire.assets.splats.files.container import is_scene
from thinwire.assets.splats.files.scene_file import FORMS
from thinwire.assets.weights.container import is_model
from thinwire.files.folder import PlainFolder
from thinwire.files.place import Folder

HEAD = 4096  # bytes of a file that its kind is told by
MOST_MANIFEST = 1 << 20  # bytes


class Reader(NamedTuple):
    """Which files are its own, by name and first bytes; the file that tells a folder of it; its module."""

    knows: Callable[[str, bytes], bool]
    manifest: str
    module: str


READERS = (
    Reader(lambda _, head: is_model(head), "thinwire-model.json", "thinwire.assets.weights.about_packed"),
    Reader(lambda _, head: is_scene(head), MANIFEST, "thinwire.assets.splats.about_packed"),
    Reader(
        lambda name, _: name.lower().endswith(tuple(FORMS)), "meta.json", "thinwire.assets.splats.about_scene"
    ),
)


def describe_file(path: Path, check: bool) -> dict[str, Any] | None:
    """Return what the asset in a file is; None where the file is none."""
    with path.open("rb") as file:
        head = file.read(HEAD)
    return next((_describe(r, path, check) for r in READERS if r.knows(path.name, head)), None)


def describe_folder(folder: Folder, check: bool) -> dict[str, Any] | None:
    """Return what the asset in a folder is; None where there is none."""
    return next((_describe(r, folder, check) for r in READERS if _holds(folder, r.manifest)), None)


def _holds(folder: Folder, name: str) -> bool:
    if isinstance(folder, PlainFolder):
        return (folder.path / name).is_file()
    try:
        folder.read(name, MOST_MANIFEST)
    except FileNotFoundError:
        return False
    return True


def _describe(reader: Reader, place: Path | Folder, check: bool) -> dict[str, Any]:
    found: dict[str, Any] = import_module(reader.module).describe(place, check)
    return found
