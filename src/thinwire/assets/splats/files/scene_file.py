"""Scenes at a path: read and written by what its name ends in."""

from __future__ import annotations

from pathlib import Path

from thinwire.assets.splats.files.foreign import packed_folder, read_foreign, write_foreign
from thinwire.assets.splats.files.ply import read_ply, write_ply
from thinwire.assets.splats.scene import Splats
from thinwire.types import InputError, PayloadError, require

FORMS = {".compressed.ply": "compressed.ply", ".ply": "ply", ".spz": "spz", ".sog": "sog"}
READABLE = "a .ply, .compressed.ply, .spz or .sog, or a folder of SOG"
WRITABLE = "a .ply, .compressed.ply or .spz"


def form_of(path: Path) -> str:
    """Return the form of a scene file, ``sog folder`` for a folder; empty where it is none of them."""
    if path.is_dir() or path.name == "meta.json":
        return "sog folder"
    return next((form for end, form in FORMS.items() if path.name.lower().endswith(end)), "")


def read_scene_file(path: Path) -> tuple[Splats, int]:
    """Return the scene at a path, and the bytes it takes there. Errors: ``InputError`` naming the path."""
    form = form_of(path)
    require(bool(form), InputError, f"{path} is no scene that can be read; give {READABLE}")
    try:
        if form == "sog folder":
            folder = path if path.is_dir() else path.parent
            require((folder / "meta.json").is_file(), PayloadError, f"no meta.json; give {READABLE}")
            data = packed_folder(folder)
            return read_foreign(data, "sog"), sum(f.stat().st_size for f in folder.iterdir())
        data = path.read_bytes()
        return (read_ply(data) if form == "ply" else read_foreign(data, form)), len(data)
    except PayloadError as e:
        raise InputError(f"cannot read {path}: {e}") from e


def scene_bytes(splats: Splats, path: Path) -> bytes:
    """Return a scene in the form that a path's name asks for. Errors: ``InputError``."""
    form = form_of(path)
    good = form not in ("", "sog folder")
    require(good, InputError, f"{path} is no scene that can be written; name {WRITABLE}")
    require(form != "sog", InputError, f"{path}: SOG takes minutes to write on a CPU; name {WRITABLE}")
    try:
        return write_ply(splats) if form == "ply" else write_foreign(splats, form)
    except PayloadError as e:
        raise InputError(f"cannot write {path}: {e}") from e
