"""Scene files of others, by gaussforge: SPZ, SOG and compressed ``.ply``.

Writing SOG on a CPU takes minutes in every tool tried, so it is not offered.
"""

from __future__ import annotations

import ctypes
import io
import os
import struct
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from thinwire.types import MissingExtra, PayloadError, require
from thinwire.uses.scenes.files.bounds import check_claims
from thinwire.uses.scenes.files.ply import read_ply
from thinwire.uses.scenes.scene import COEFFICIENTS, Array, Splats

PLY, SPZ = "RDF", "RUB"
# Of the record: those that turn axes over, by its number, and from 9 on those that swap two as well.
NAMED = dict(enumerate(("LDB", "RDB", "LUB", "RUB", "LDF", "RDF", "LUF", "RUF"), 1))
_KIND, _EXTENDED = 0xADBE0003, 2  # the record's, and the flag of a header with records
_RECORD, _HEAD = struct.Struct("<II"), 32  # its kind and bytes; where the first one is
# The axes that each harmonic is odd in.
ODD_IN = ("y", "z", "x", "xy", "yz", "", "xz", "", "y", "xyz", "y", "z", "x", "z", "x")


def turned(splats: Splats, axes: str) -> Splats:
    """Return a scene with ``axes`` as one with those of a ``.ply``; and the other way round.

    >>> turned(Splats.of([[1, 2, 3]]), "RUB").positions.tolist()
    [[1.0, -2.0, -3.0]]
    """
    sign = dict(zip("xyz", (1 if a == b else -1 for a, b in zip(axes, PLY, strict=True)), strict=True))
    x, y, z = sign.values()
    odd = [np.prod([sign[axis] for axis in which]) for which in ODD_IN[: splats.harmonics.shape[1]]]
    return replace(
        splats,
        positions=splats.positions * np.array([x, y, z], np.float32),
        rotations=splats.rotations * np.array([1, y * z, x * z, x * y], np.float32),
        harmonics=splats.harmonics * np.array(odd, np.float32)[:, None],
    )


def axes_of_spz(data: bytes) -> str:
    """Return the axes of an SPZ whose claims were checked. Errors: ``PayloadError`` for those not read."""
    if data[:4] != b"NGSP" or not data[14] & _EXTENDED:
        return SPZ
    (end,), at, axes = struct.unpack_from("<I", data, 16), _HEAD, SPZ
    while at + _RECORD.size <= end:
        kind, nbytes = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        if kind == _KIND:
            found = int.from_bytes(data[at : at + nbytes], "little")
            told = f"an SPZ whose axes are those of number {found}; write it with right, up, back"
            require(found in (0, *NAMED), PayloadError, told)
            axes = NAMED.get(found, SPZ)
        at += nbytes
    return axes


READS, WRITES = ("compressed.ply", "spz", "sog"), ("compressed.ply", "spz")
SPZ_VERSION = 4
FIELDS = {"positions": 3, "log_scales": 3, "rotations": 4, "opacities": 1, "colours": 3}
NAMES = {"log_scales": "scales", "opacities": "alphas", "colours": "colors"}  # gaussforge's own


def read_foreign(data: bytes, form: str) -> Splats:
    """Return the scene in a file of ``form``. Errors: ``PayloadError``, ``MissingExtra``."""
    check_claims(data, form)
    found = _read(data, form)
    return turned(found, axes_of_spz(data)) if form == "spz" else found


def _read(data: bytes, form: str) -> Splats:
    """Return what gaussforge reads, along the axes of the file."""
    forge = _forge()
    with _silent():
        found = forge.read(data, form)
        if str(found.get("error")).endswith("bad_cast"):  # 0.6.0 cannot hand over that there are no harmonics
            plain = forge.convert(data, form, "ply")
            found = plain if "error" in plain else {"ply": plain["data"]}
    if "ply" in found:
        return read_ply(found["ply"])
    require("error" not in found, PayloadError, f"no {form} that can be read: {found.get('error')}")
    ir = found["data"]
    n = int(ir["numPoints"])
    arrays = {name: _array(ir[NAMES.get(name, name)], n, width, name) for name, width in FIELDS.items()}
    sh = np.frombuffer(ir["sh"], np.float32)
    good = not sh.size or (sh.size % (3 * n) == 0 and sh.size // (3 * n) in COEFFICIENTS)
    require(good, PayloadError, f"{sh.size} coefficients for {n} splats")
    positions, opacities = arrays.pop("positions"), arrays.pop("opacities")
    harmonics = sh.reshape(n, -1, 3) if sh.size else np.zeros((n, 0, 3), np.float32)
    return Splats.of(positions, opacities=opacities[:, 0], harmonics=harmonics, **arrays)


def _array(data: bytes, n: int, width: int, name: str) -> Array:
    found = np.frombuffer(data, np.float32)
    require(found.size == n * width, PayloadError, f"{found.size} numbers of {name}, expected {n * width}")
    return found.reshape(n, width)


def write_foreign(splats: Splats, form: str) -> bytes:
    """Return a scene as a file of ``form``. Errors: ``PayloadError``, ``MissingExtra``."""
    splats = turned(splats, SPZ) if form == "spz" else splats
    # 0.6.0 writes harmonics of a compressed .ply as given, and reads them colour by colour, as others do.
    sh = splats.harmonics.transpose(0, 2, 1) if form == "compressed.ply" else splats.harmonics
    ir: dict[str, Any] = {"numPoints": splats.count, "sh": sh.tobytes(), "extras": {}}
    ir |= {NAMES.get(name, name): getattr(splats, name).tobytes() for name in FIELDS}
    ir["meta"] = {"shDegree": splats.bands, "sourceFormat": "ply"}
    forge = _forge()
    with _silent():
        found = forge.write(ir, form, False, SPZ_VERSION)
    require("error" not in found, PayloadError, f"cannot write {form}: {found.get('error')}")
    data: bytes = found["data"]
    return data


def packed_folder(folder: Path) -> bytes:
    """Return a folder of SOG as the zip that a ``.sog`` is."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        for file in sorted(folder.iterdir()):
            if file.suffix in (".json", ".webp"):
                archive.writestr(file.name, file.read_bytes())
    return whole.getvalue()


@contextmanager
def _silent() -> Iterator[None]:
    """Let nothing be printed: gaussforge tells of files on stdout, where commands print their results."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        with suppress(AttributeError, OSError, TypeError):
            ctypes.CDLL(None).fflush(None)  # what C still holds back
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _forge() -> Any:
    try:
        import gaussforge
    except ImportError as e:
        needs = "SPZ, SOG and compressed .ply need gaussforge: pip install 'thinwire[assets]'"
        raise MissingExtra(needs) from e
    return gaussforge.GaussForge()
