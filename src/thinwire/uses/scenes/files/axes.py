"""Which way the axes of a scene point: a ``.ply`` has right, down and front; others turn some of them over.

Source: https://github.com/nianticlabs/spz: an SPZ has right, up and back, or what an extension record names.
"""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np

from thinwire.types import PayloadError, require
from thinwire.uses.scenes.scene import Splats

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
