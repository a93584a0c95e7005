"""``.ply`` files as 3D Gaussian Splatting saves them: binary of either byte order, or text.

Source: the names of properties as in "3D Gaussian Splatting for Real-Time Radiance Field Rendering", arXiv
2308.04079 [quoted from files]; other programs write colours as red, green and blue, or disks of two scales.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from thinwire.types import PayloadError, require
from thinwire.uses.scenes.scene import COEFFICIENTS, Splats
from thinwire.uses.scenes.view.harmonics import CONSTANT

TYPES = {"char": "i1", "uchar": "u1", "short": "i2", "ushort": "u2", "int": "i4", "uint": "u4"}
TYPES |= {"int8": "i1", "uint8": "u1", "int16": "i2", "uint16": "u2", "int32": "i4", "uint32": "u4"}
TYPES |= {"float": "f4", "double": "f8", "float32": "f4", "float64": "f8"}
ORDERS = {"binary_little_endian": "<", "binary_big_endian": ">", "ascii": ""}
MAX_HEADER = 1 << 16  # bytes
CUT = "it was cut short, or its header is wrong"
_CODES = {"i1": "b", "u1": "B", "i2": "h", "u2": "H", "i4": "i", "u4": "I"}  # of struct


class Property(NamedTuple):
    """A column of an element; ``length`` is the type of a list's length, empty where it is no list."""

    name: str
    kind: str
    length: str = ""


class Element(NamedTuple):
    """Rows that have the same columns."""

    name: str
    rows: int
    properties: list[Property]

    @property
    def has_lists(self) -> bool:
        """Whether rows differ in bytes."""
        return any(p.length for p in self.properties)


class Header(NamedTuple):
    """What a header says: byte order, empty for text; vertices; what is before them; where data begin."""

    order: str
    vertices: Element
    before: list[Element]
    begin: int


def read_header(data: bytes | memoryview) -> Header:
    """Return what the header says. Errors: ``PayloadError``."""
    head = bytes(data[:MAX_HEADER])
    require(bool(head), PayloadError, "it is empty")
    require(head[:4] in (b"ply\n", b"ply\r"), PayloadError, "it does not begin as a .ply does")
    mark = b"\r" if head[3:4] == b"\r" and head[4:5] != b"\n" else b"\n"
    order, elements, at = "?", list[Element](), 4
    while True:
        end = head.find(mark, at)
        require(end >= 0, PayloadError, "a header without an end")
        line = head[at:end].decode("latin-1")
        words, at = line.split(), end + 1
        if words == ["end_header"]:
            break
        if words[:1] == ["format"] and len(words) > 1:
            order = ORDERS.get(words[1], "?")
        elif words[:1] == ["element"] and len(words) == 3 and words[2].isdecimal() and len(words[2]) < 19:
            elements.append(Element(words[1], int(words[2]), []))
        elif words[:1] == ["property"] and elements:
            elements[-1].properties.append(_property(words, line))
        else:
            good = words[:1] in ([], ["comment"], ["obj_info"])
            require(good, PayloadError, f"a wrong line: {line[:60]!r}")
    require(order != "?", PayloadError, f"a format that is none of {', '.join(ORDERS)}")
    return _checked(Header(order, *_around(elements), at))


def _property(words: list[str], line: str) -> Property:
    listed = words[1:2] == ["list"]
    kinds = words[2:-1] if listed else words[1:-1]
    good = len(kinds) == 1 + listed and all(kind in TYPES for kind in kinds)
    good = good and (not listed or TYPES[kinds[0]] in _CODES)
    require(good, PayloadError, f"a property that cannot be read: {line[:60]!r}")
    return Property(words[-1], TYPES[kinds[-1]], TYPES[kinds[0]] if listed else "")


def _around(elements: list[Element]) -> tuple[Element, list[Element]]:
    """Return the vertices, and what is before them."""
    names = [element.name for element in elements]
    told = f"its elements are {', '.join(names)[:60] or 'none'}, and there is no vertex"
    require("vertex" in names, PayloadError, told)
    at = names.index("vertex")
    return elements[at], elements[:at]


def _checked(header: Header) -> Header:
    names = [p.name for p in header.vertices.properties]
    require(len(set(names)) == len(names), PayloadError, "two columns of one name")
    require(not header.vertices.has_lists, PayloadError, "vertices with lists, which no splat has")
    return header


def skipped(data: bytes | memoryview, header: Header) -> int:
    """Return where the vertices of a binary file begin. Errors: ``PayloadError``."""
    at = header.begin
    for element in header.before:
        if not element.has_lists:
            at += element.rows * sum(np.dtype(p.kind).itemsize for p in element.properties)
            continue
        for _ in range(element.rows):
            for p in element.properties:
                at += _nbytes(data, at, p, header.order)
            require(at <= len(data), PayloadError, f"its {element.name} end behind its bytes: {CUT}")
    require(at <= len(data), PayloadError, f"what is before its vertices ends behind its bytes: {CUT}")
    return at


def _nbytes(data: bytes | memoryview, at: int, p: Property, order: str) -> int:
    """Return the bytes that a property takes in a row."""
    width = np.dtype(p.kind).itemsize
    if not p.length:
        return width
    own = struct.Struct(order + _CODES[p.length])
    require(at + own.size <= len(data), PayloadError, f"a list without its length: {CUT}")
    (count,) = own.unpack_from(data, at)
    require(count >= 0, PayloadError, f"a list of {count} numbers: it is damaged")
    return own.size + int(count) * width


MAX_LINE = 1 << 16  # characters
LINES = 1024  # of text that are numbers at a time
POSITIONS, COLOURS = ("x", "y", "z"), ("f_dc_0", "f_dc_1", "f_dc_2")
SCALES, ROTATIONS = ("scale_0", "scale_1", "scale_2"), ("rot_0", "rot_1", "rot_2", "rot_3")
NORMALS, SHOWN = ("nx", "ny", "nz"), ("red", "green", "blue")
WHOLE = {"u1": 255.0, "u2": 65535.0}  # what is full of a shown colour in whole numbers


def read_ply(data: bytes | memoryview) -> Splats:
    """Return the scene in a ``.ply``, columns that no splat has left out. Errors: ``PayloadError``.

    Without ``f_dc_0`` to ``f_dc_2``, colours are ``red``, ``green`` and ``blue``; without a third scale,
    splats are flat. Elements before or behind the vertices are passed over.
    """
    header = read_header(data)
    kinds = {p.name: p.kind for p in header.vertices.properties}
    rest = sum(name.startswith("f_rest_") for name in kinds)
    told = f"{rest} f_rest columns, and a scene has {', '.join(str(3 * k) for k in COEFFICIENTS)}"
    require(rest % 3 == 0 and rest // 3 in COEFFICIENTS, PayloadError, told)
    colours = COLOURS if COLOURS[0] in kinds or SHOWN[0] not in kinds else SHOWN
    scales = SCALES if SCALES[2] in kinds or SCALES[1] not in kinds else SCALES[:2]
    own = [*POSITIONS, *scales, *ROTATIONS, "opacity", *colours, *(f"f_rest_{i}" for i in range(rest))]
    _check(kinds, own)
    table = _text(data, header, own) if not header.order else _binary(data, header, own)
    if scales != SCALES:
        table = np.insert(table, 5, -np.inf, axis=1)
    if colours == SHOWN:
        table[:, 11:14] = (table[:, 11:14] / WHOLE.get(kinds["red"], 1.0) - 0.5) / CONSTANT
    return _scene(table, rest)


def _check(kinds: dict[str, str], own: list[str]) -> None:
    """Raise ``PayloadError`` where columns are missing, or of another type."""
    missing = [name for name in own if name not in kinds]
    if SCALES[0] in missing or COLOURS[0] in missing:
        told = f"there is no {missing[0]}: a mesh or a point cloud, not a scene of Gaussians"
        raise PayloadError(f"{told}; train one on it, or export it with spherical harmonics")
    require(not missing, PayloadError, f"there is no {', '.join(missing[:3])}, which every Gaussian has")
    whole = [n for n in own if kinds[n][0] != "f" and not (n in SHOWN and kinds[n] in WHOLE)]
    require(not whole, PayloadError, f"{', '.join(whole[:3])} of whole numbers, expected floats")
    odd = len({kinds[n] for n in SHOWN if n in own}) > 1
    require(not odd, PayloadError, "red, green and blue of different types, expected one")


def _binary(data: bytes | memoryview, header: Header, own: list[str]) -> npt.NDArray[np.float32]:
    count, begin = header.vertices.rows, skipped(data, header)
    kind = np.dtype([(p.name, header.order + p.kind) for p in header.vertices.properties])
    told = f"{count} splats of {kind.itemsize} bytes in {len(data) - begin} bytes: {CUT}"
    require(count * kind.itemsize <= len(data) - begin, PayloadError, told)
    rows = np.frombuffer(data, kind, count, begin) if count else np.empty(0, kind)
    table = np.empty((count, len(own)), np.float32)
    with np.errstate(over="ignore"):
        for i, name in enumerate(own):
            table[:, i] = rows[name]
    return table


def _text(data: bytes | memoryview, header: Header, own: list[str]) -> npt.NDArray[np.float32]:
    count, names = header.vertices.rows, [p.name for p in header.vertices.properties]
    left, width = len(data) - header.begin, len(names)
    told = f"{count} splats of {width} numbers in {left} bytes: {CUT}"
    require(count * width * 2 <= left + 1, PayloadError, told)  # a digit and a space each
    at = [names.index(name) for name in own]
    table, lines = np.empty((count, len(own)), np.float32), iter(_lines(data, header.begin))
    for _ in range(sum(element.rows for element in header.before)):
        require(next(lines, None) is not None, PayloadError, f"fewer lines than elements: {CUT}")
    for start in range(0, count, LINES):
        rows = [line.split() for line in islice(lines, min(LINES, count - start))]
        whole = len(rows) == min(LINES, count - start) and all(len(row) == width for row in rows)
        require(whole, PayloadError, f"fewer than {count} lines of {width} numbers: {CUT}")
        try:
            table[start : start + len(rows)] = np.array(rows, dtype=np.float64)[:, at]
        except ValueError as e:
            raise PayloadError(f"what is no number: {str(e)[:80]}") from e
    return table


def _lines(data: bytes | memoryview, begin: int) -> Iterator[str]:
    """Yield the lines of a text that are not empty, a piece of it at a time."""
    rest = ""
    for start in range(begin, len(data), MAX_LINE):
        text = rest + bytes(data[start : start + MAX_LINE]).decode("latin-1")
        *whole, rest = text.replace("\r", "\n").split("\n")  # whichever of both ends a line
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
