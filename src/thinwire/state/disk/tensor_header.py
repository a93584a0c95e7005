"""The header of safetensors files, which says where each tensor's bytes are.

A file is the length of a JSON object as 8 bytes, little endian, the object, and the bytes of the tensors. So
little needs no package. Source: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from typing import Any

from thinwire.types import PayloadError, require

METADATA = "__metadata__"
PREFIX = struct.Struct("<Q")  # the length of the object
MOST = 100_000_000  # bytes of a header; the format's own limit
ALIGN = 8  # bytes; spaces behind the object fill up to a multiple
KINDS = {  # dtypes as files name them, and as torch does
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2",
}
PACKED = "F4"  # torch counts two of its values as one, the file each
NAMES = {kind: code for code, kind in KINDS.items()}


def ordered(sizes: Mapping[str, int]) -> list[str]:
    """Return names of tensors, whose elements are of so many bytes, in an order that keeps them aligned.

    >>> ordered({"b": 2, "a": 2, "c": 4})
    ['c', 'a', 'b']
    """
    return sorted(sizes, key=lambda name: (-sizes[name], name))


def header(notes: Mapping[str, str], tensors: Iterable[tuple[str, str, list[int], int]]) -> bytes:
    """Return the beginning of a file: notes, and each tensor by name, dtype, shape and bytes, in order.

    >>> fields(header({"of": "two"}, [("a", "U8", [2], 2), ("b", "U8", [1], 1)]))[0]["b"]["data_offsets"]
    [2, 3]
    """
    told: dict[str, Any] = {METADATA: dict(notes)}
    at = 0
    for name, kind, shape, nbytes in tensors:
        told[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGN)
    return PREFIX.pack(len(text)) + text


def end_of(data: bytes | bytearray | memoryview) -> int:
    """Return where the header of a file ends; 0 where ``data``, its beginning, is too short to say."""
    return PREFIX.size + int(PREFIX.unpack_from(data)[0]) if len(data) >= PREFIX.size else 0


def fields(data: bytes | bytearray | memoryview, most: int = MOST) -> tuple[dict[str, Any], int]:
    """Return what a header says, as it stands there, and where it ends; ``data`` may go on.

    Errors: ``PayloadError`` where ``data`` holds no header of at most ``most`` bytes, ``ValueError`` where
    that is no JSON.
    """
    end = end_of(data)
    whole = PREFIX.size < end <= min(PREFIX.size + most, len(data))
    require(whole, PayloadError, f"{len(data)} bytes hold no header: not safetensors, or cut short")
    told = json.loads(bytes(memoryview(data)[PREFIX.size : end]))
    require(isinstance(told, dict), PayloadError, "a header that is no JSON object")
    return told, end
