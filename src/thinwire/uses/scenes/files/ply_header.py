"""The header of a ``.ply``: its byte order, what each vertex has, and what stands before the vertices.

Source: the format's own description (G. Turk, 1994).
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from thinwire.types import PayloadError, require

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
