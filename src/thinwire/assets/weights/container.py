"""Packed models as safetensors files: a header, a tensor of uint8 for each tensor and each other file.

How each tensor is coded is said of each alone. Source: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from thinwire import zstd
from thinwire.assets.weights.entry import DTYPES, Entry, shape_of
from thinwire.assets.weights.tensors import Same
from thinwire.types import WRONG_VALUES, PayloadError, require

KEY, METADATA = "thinwire.model", "__metadata__"
VERSION = 1
MAX_HEADER = 1 << 26  # bytes
FREE, PER_BYTE = (
    1 << 20,
    256,
)  # bytes that a file may unpack to whatever its size, and more for each of its own
LEVEL = 19  # of Zstandard, for files
TENSOR, FILE = "tensor:", "file:"
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, eq=False)
class PackedModel:
    """A packed model: its tensors by name, and the other files of its folder by theirs."""

    entries: Mapping[str, Entry]
    files: Mapping[str, bytes] = field(default_factory=dict)


def write_model(model: PackedModel) -> bytes:
    """Return the file of a packed model."""
    sizes = {name: len(data) for name, data in model.files.items()}
    tensors = {name: dict(entry.about) for name, entry in model.entries.items()}
    note = json.dumps({"version": VERSION, "tensors": tensors, "files": sizes}, separators=(",", ":"))
    fields: dict[str, Any] = {METADATA: {KEY: note}}
    at, streams = 0, list[bytes]()
    parts = {FILE + name: _pack_file(data) for name, data in model.files.items()}
    parts |= {TENSOR + name: entry.data for name, entry in model.entries.items()}
    for name, data in parts.items():
        fields[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
        streams.append(data)
    head = json.dumps(fields, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return b"".join([_LENGTH.pack(len(head)), head, *streams])


def is_model(data: bytes | memoryview) -> bool:
    """Return whether a file, of which ``data`` is the beginning, says that it is a packed model."""
    return KEY.encode() in bytes(data[8:256])


def read_model(data: bytes | memoryview) -> PackedModel:
    """Return the packed model in a file; tensors are still to be unpacked. Errors: ``PayloadError``."""
    require(
        len(data) > _LENGTH.size and is_model(data), PayloadError, "it does not begin as a packed model does"
    )
    (length,) = _LENGTH.unpack_from(data)
    begin = _LENGTH.size + length
    told = f"{len(data)} bytes of a file whose header ends at byte {begin}: it was cut short"
    require(length <= MAX_HEADER and begin <= len(data), PayloadError, told)
    try:
        fields = json.loads(bytes(data[_LENGTH.size : begin]))
        note = json.loads(fields.pop(METADATA)[KEY])
        version = note["version"]
        told = (
            f"a model of version {version!r:.20}, and this thinwire reads version {VERSION}; update thinwire"
        )
        require(version == VERSION, PayloadError, told)
        streams = _streams(data, fields, begin)
        return _model(note, streams, len(data))
    except (*WRONG_VALUES, RecursionError) as e:
        raise PayloadError(f"a damaged header: {str(e)[:80]}") from e


def _streams(data: bytes | memoryview, fields: dict[str, Any], begin: int) -> dict[str, memoryview]:
    """Return the bytes of each part, which lie one behind the other up to the end."""
    found, at, whole = dict[str, memoryview](), begin, memoryview(data)
    for name, about in fields.items():
        start, stop = about["data_offsets"]
        good = about["dtype"] == "U8" and about["shape"] == [stop - start] and begin + start == at
        require(
            good and type(stop) is int and stop >= start,
            PayloadError,
            f"{name!r:.99} is not where it should be",
        )
        at = begin + stop
        require(
            at <= len(data),
            PayloadError,
            f"{len(data)} bytes, and {name!r:.99} ends at {at}: it was cut short",
        )
        found[name] = whole[begin + start : at]
    require(at == len(data), PayloadError, f"{len(data) - at} bytes too many behind the last tensor")
    return found


def _model(note: dict[str, Any], streams: dict[str, memoryview], size: int) -> PackedModel:
    tensors, sizes = note["tensors"], note["files"]
    named = [*(FILE + name for name in sizes), *(TENSOR + name for name in tensors)]
    require(
        sorted(named) == sorted(streams), PayloadError, "tensors that the header does not tell of, or none"
    )
    for name, n in sizes.items():
        plain = PurePosixPath(name).name == name and name not in ("", ".", "..") and "\\" not in name
        require(plain, PayloadError, f"a file called {name!r:.99}, which is no plain name")
        require(type(n) is int and n >= 0, PayloadError, f"a file of {n!r:.20} bytes")
    claimed = sum(sizes.values()) + sum(_nbytes(name, about) for name, about in tensors.items())
    told = f"{claimed} bytes in a file of {size}, which is more than any packed model has"
    require(claimed <= FREE + PER_BYTE * size, PayloadError, told)
    entries = {name: Entry(about, bytes(streams[TENSOR + name])) for name, about in tensors.items()}
    for name, entry in entries.items():
        if entry.kind == Same.kind:
            other = entries.get(entry.about["name"])
            good = other is not None and other.kind != Same.kind
            require(
                good,
                PayloadError,
                f"{name:.99} is the same as {entry.about['name']!r:.99}, which is not there",
            )
    return PackedModel(entries, {name: _unpack_file(streams[FILE + name], n) for name, n in sizes.items()})


def _nbytes(name: str, about: dict[str, Any]) -> int:
    """Return the bytes that a tensor claims to unpack to. Errors: ``PayloadError``."""
    if about.get("kind") == Same.kind:
        return 0
    dtype = DTYPES.get(about["dtype"])
    size = 8 if dtype is None else dtype.itemsize
    return size * math.prod(max(1, n) for n in shape_of(about, name))


def _pack_file(data: bytes) -> bytes:
    """Return a file's bytes at the level that packs text well: a tokenizer takes megabytes."""
    return zstd.compress(np.frombuffer(data, np.uint8), LEVEL)


def _unpack_file(data: memoryview, n: int) -> bytes:
    size = zstd.content_size(data)
    require(size == n, PayloadError, f"a file of {size} bytes, expected {n}")
    return zstd.decompress(data)
