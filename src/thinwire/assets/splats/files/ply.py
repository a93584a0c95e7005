"""``.ply`` files as 3D Gaussian Splatting saves them: binary of either byte order, or text.

Source: the header as in the format's own description (G. Turk, 1994); the names of properties as in "3D
Gaussian Splatting for Real-Time Radiance Field Rendering", arXiv 2308.04079 [quoted from files].
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from thinwire.assets.splats.scene import COEFFICIENTS, Splats
from thinwire.types import PayloadError, require

TYPES = {"char": "i1", "uchar": "u1", "short": "i2", "ushort": "u2", "int": "i4", "uint": "u4"}
TYPES |= {"int8": "i1", "uint8": "u1", "int16": "i2", "uint16": "u2", "int32": "i4", "uint32": "u4"}
TYPES |= {"float": "f4", "double": "f8", "float32": "f4", "float64": "f8"}
ORDERS = {"binary_little_endian": "<", "binary_big_endian": ">", "ascii": ""}
MAX_HEADER = 1 << 16  # bytes
MAX_LINE = 1 << 16  # characters
LINES = 1024  # of text that are numbers at a time
POSITIONS, COLOURS = ("x", "y", "z"), ("f_dc_0", "f_dc_1", "f_dc_2")
SCALES, ROTATIONS = ("scale_0", "scale_1", "scale_2"), ("rot_0", "rot_1", "rot_2", "rot_3")
NORMALS = ("nx", "ny", "nz")
CUT = "it was cut short, or its header is wrong"


class Header(NamedTuple):
    """What a header says of the vertices: byte order, number, properties; and where their data begin."""

    order: str
    splats: int
    properties: tuple[tuple[str, str], ...]
    begin: int


def read_ply(data: bytes | memoryview) -> Splats:
    """Return the scene in a ``.ply``, columns that no splat has left out. Errors: ``PayloadError``."""
    header = read_header(data)
    names = [name for name, _ in header.properties]
    missing = [name for name in COLOURS if name not in names]
    told = f"there is no {missing[0] if missing else ''}: a mesh or a point cloud, not a scene of Gaussians"
    require(not missing, PayloadError, f"{told}; train one on it, or export it with spherical harmonics")
    rest = sum(name.startswith("f_rest_") for name in names)
    require(
        rest % 3 == 0 and rest // 3 in COEFFICIENTS,
        PayloadError,
        f"{rest} f_rest columns; 0, 9, 24 or 45 are",
    )
    own = [*POSITIONS, *SCALES, *ROTATIONS, "opacity", *COLOURS, *(f"f_rest_{i}" for i in range(rest))]
    missing = [name for name in own if name not in names]
    require(not missing, PayloadError, f"there is no {', '.join(missing[:3])}, which every Gaussian has")
    whole = [n for n, kind in header.properties if n in own and kind[0] != "f"]
    require(not whole, PayloadError, f"{', '.join(whole[:3])} of whole numbers, expected floats")
    table = _text(data, header, own) if not header.order else _binary(data, header, own)
    return _scene(table, rest)


def read_header(data: bytes | memoryview) -> Header:
    """Return what the header says. Errors: ``PayloadError``."""
    head = bytes(data[:MAX_HEADER])
    require(head[:4] in (b"ply\n", b"ply\r"), PayloadError, "it does not begin as a .ply does")
    stop = head.find(b"end_header")
    end = head.find(b"\n", stop)
    require(0 < stop < end, PayloadError, "a header without an end")
    order, elements = "?", list[tuple[str, int, list[tuple[str, str]]]]()
    for line in head[:stop].decode("latin-1").splitlines()[1:]:
        words = line.split()
        if words[:1] == ["format"] and len(words) > 1:
            order = ORDERS.get(words[1], "?")
        elif words[:1] == ["element"] and len(words) == 3 and words[2].isdigit() and len(words[2]) < 19:
            elements.append((words[1], int(words[2]), []))
        elif words[:1] == ["property"]:
            known = len(words) == 3 and words[1] in TYPES and bool(elements)
            require(known, PayloadError, f"a property that cannot be read: {line[:60]!r}")
            elements[-1][2].append((words[2], TYPES[words[1]]))
        else:
            require(
                words[:1] in ([], ["comment"], ["obj_info"]), PayloadError, f"a wrong line: {line[:60]!r}"
            )
    require(order != "?", PayloadError, f"a format that is none of {', '.join(ORDERS)}")
    first = bool(elements) and elements[0][0] == "vertex"
    require(
        first, PayloadError, f"the first element is {elements[0][0] if elements else 'missing'!r}, not vertex"
    )
    names = [name for name, _ in elements[0][2]]
    require(len(set(names)) == len(names), PayloadError, "two columns of one name")
    return Header(order, elements[0][1], tuple(elements[0][2]), end + 1)


def _binary(data: bytes | memoryview, header: Header, own: list[str]) -> npt.NDArray[np.float32]:
    kind = np.dtype([(name, header.order + type_) for name, type_ in header.properties])
    left = len(data) - header.begin
    told = f"{header.splats} splats of {kind.itemsize} bytes in {left} bytes: {CUT}"
    require(header.splats * kind.itemsize <= left, PayloadError, told)
    rows = np.frombuffer(data, kind, header.splats, header.begin)
    table = np.empty((header.splats, len(own)), np.float32)
    with np.errstate(over="ignore"):
        for i, name in enumerate(own):
            table[:, i] = rows[name]
    return table


def _text(data: bytes | memoryview, header: Header, own: list[str]) -> npt.NDArray[np.float32]:
    left, width = len(data) - header.begin, len(header.properties)
    told = f"{header.splats} splats of {width} numbers in {left} bytes: {CUT}"
    require(header.splats * width * 2 <= left + 1, PayloadError, told)  # a digit and a space each
    at = [[name for name, _ in header.properties].index(name) for name in own]
    table, lines = np.empty((header.splats, len(own)), np.float32), iter(_lines(data, header.begin))
    for start in range(0, header.splats, LINES):
        rows = [line.split() for line in islice(lines, min(LINES, header.splats - start))]
        whole = len(rows) == min(LINES, header.splats - start) and all(len(row) == width for row in rows)
        require(whole, PayloadError, f"fewer than {header.splats} lines of {width} numbers: {CUT}")
        try:
            table[start : start + len(rows)] = np.array(rows, dtype=np.float64)[:, at]
        except ValueError as e:
            raise PayloadError(f"what is no number: {str(e)[:80]}") from e
    return table


def _lines(data: bytes | memoryview, begin: int) -> Iterator[str]:
    """Yield the lines of a text that are not empty, a piece of it at a time."""
    rest = ""
    for start in range(begin, len(data), MAX_LINE):
        *whole, rest = (rest + bytes(data[start : start + MAX_LINE]).decode("latin-1")).split("\n")
        require(len(rest) < MAX_LINE, PayloadError, f"a line of {MAX_LINE} characters or more")
        yield from filter(str.strip, whole)
    if rest.strip():
        yield rest


def _scene(table: npt.NDArray[np.float32], rest: int) -> Splats:
    """Return the scene of columns in the order of ``read_ply``; a file has harmonics colour by colour."""
    positions, scales, rotations, opacity, colours, harmonics = np.split(table, [3, 6, 10, 11, 14], axis=1)
    by_colour = harmonics.reshape(len(table), 3, rest // 3).transpose(0, 2, 1)
    return Splats.of(
        positions,
        log_scales=scales,
        rotations=rotations,
        opacities=opacity[:, 0],
        colours=colours,
        harmonics=by_colour,
    )


def write_ply(splats: Splats) -> bytes:
    """Return a scene as a binary ``.ply``, normals of zero included, as other programs expect.

    >>> write_ply(Splats.of(np.zeros((1, 3))))[:38]
    b'ply\\nformat binary_little_endian 1.0\\nel'
    """
    rest = 3 * splats.harmonics.shape[1]
    names = [
        *POSITIONS,
        *NORMALS,
        *COLOURS,
        *(f"f_rest_{i}" for i in range(rest)),
        "opacity",
        *SCALES,
        *ROTATIONS,
    ]
    lines = ["ply", "format binary_little_endian 1.0", f"element vertex {splats.count}"]
    head = "\n".join([*lines, *(f"property float {name}" for name in names), "end_header\n"]).encode()
    by_colour = splats.harmonics.transpose(0, 2, 1).reshape(splats.count, rest)
    columns = [splats.positions, np.zeros((splats.count, 3), np.float32), splats.colours, by_colour]
    columns += [splats.opacities[:, None], splats.log_scales, splats.rotations]
    return head + np.concatenate(columns, axis=1).astype("<f4").tobytes()
