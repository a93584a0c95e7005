"""Scenes at a path: read and written by what its name ends in."""

from __future__ import annotations

import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np

from thinwire.types import InputError, PayloadError, require
from thinwire.uses.scenes.files.bounds import GZIP, MAGIC, NOTHING
from thinwire.uses.scenes.files.foreign import packed_folder, read_foreign, write_foreign
from thinwire.uses.scenes.files.ply import MAX_HEADER, read_ply, write_ply
from thinwire.uses.scenes.scene import Splats
from thinwire.uses.scenes.view.harmonics import CONSTANT

ROW = np.dtype([("place", "<f4", 3), ("scale", "<f4", 3), ("rgba", "u1", 4), ("turn", "u1", 4)])


def read_splat(data: bytes | memoryview) -> Splats:
    """Return the scene in a ``.splat``. Errors: ``PayloadError``.

    >>> read_splat(bytes(24) + bytes([128, 128, 128, 255, 255, 128, 128, 128])).count
    1
    """
    told = f"{len(data)} bytes are no whole number of splats of {ROW.itemsize}: it was cut short"
    require(len(data) % ROW.itemsize == 0, PayloadError, told)
    rows = np.frombuffer(data, ROW)
    shown = rows["rgba"] / 255.0
    alpha = np.clip(shown[:, 3], 0.5 / 255, 1 - 0.5 / 255)  # 0 and 255 are within half a step of it
    with np.errstate(divide="ignore", invalid="ignore"):  # sizes of zero are flat, others below it damaged
        scales = np.log(rows["scale"])
    return Splats.of(
        rows["place"],
        log_scales=scales,
        rotations=(rows["turn"].astype(np.float32) - 128) / 128,
        opacities=np.log(alpha / (1 - alpha)),
        colours=(shown[:, :3] - 0.5) / CONSTANT,
    )


FORMS = {".compressed.ply": "compressed.ply", ".ply": "ply", ".spz": "spz", ".sog": "sog", ".splat": "splat"}
READABLE = "a .ply, .compressed.ply, .spz, .splat or .sog, or a folder of SOG"
WRITABLE = "a .ply, .compressed.ply or .spz"
ZIP, PACKED = b"PK\x03\x04", b"packed_position"
READERS = {"ply": read_ply, "splat": read_splat}


def form_of(path: Path) -> str:
    """Return the form of a scene file, ``sog folder`` for a folder; empty where it is none of them."""
    if path.is_dir() or path.name == "meta.json":
        return "sog folder"
    return next((form for end, form in FORMS.items() if path.name.lower().endswith(end)), "")


def form_in(data: bytes, named: str) -> str:
    """Return the form that a file's first bytes tell, or else what it is ``named``. Errors: ``PayloadError``.

    >>> form_in(b"NGSP and more", "ply")
    'spz'
    """
    require(bool(data), PayloadError, "it is empty")
    if data[:3] == b"ply":
        return "compressed.ply" if PACKED in data[:MAX_HEADER].partition(b"end_header")[0] else "ply"
    if data[:2] == GZIP:
        packed = zlib.decompressobj(31)
        with suppress(zlib.error):
            told = "it is packed by gzip; unpack it first"
            require(packed.decompress(data[:MAX_HEADER], 4) == MAGIC, PayloadError, told)
        return "spz"
    return "spz" if data[:4] == MAGIC else "sog" if data[:4] == ZIP else named


def read_scene_file(path: Path) -> tuple[Splats, int]:
    """Return the scene at a path, and the bytes it takes there. Errors: ``InputError`` naming the path."""
    form = form_of(path)
    require(bool(form), InputError, f"{path} is no scene that can be read; give {READABLE}")
    try:
        if form == "sog folder":
            folder = path if path.is_dir() else path.parent
            require((folder / "meta.json").is_file(), PayloadError, f"no meta.json; give {READABLE}")
            data, nbytes = packed_folder(folder), sum(f.stat().st_size for f in folder.iterdir())
            form = "sog"
        else:
            data = path.read_bytes()
            form, nbytes = form_in(data, form), len(data)
        splats = READERS[form](data) if form in READERS else read_foreign(data, form)
        require(splats.count > 0, PayloadError, NOTHING)
        return splats, nbytes
    except PayloadError as e:
        raise InputError(f"cannot read {path}: {e}") from e


def scene_bytes(splats: Splats, path: Path) -> bytes:
    """Return a scene in the form that a path's name asks for. Errors: ``InputError``."""
    form = form_of(path)
    good = form not in ("", "sog folder", "splat")
    require(good, InputError, f"{path} is no scene that can be written; name {WRITABLE}")
    require(form != "sog", InputError, f"{path}: SOG takes minutes to write on a CPU; name {WRITABLE}")
    try:
        return write_ply(splats) if form == "ply" else write_foreign(splats, form)
    except PayloadError as e:
        raise InputError(f"cannot write {path}: {e}") from e
