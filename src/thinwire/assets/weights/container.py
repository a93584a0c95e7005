"""Packed models as safetensors files: a header, a tensor of uint8 for each tensor and each other file.

How each tensor is coded is said of each alone. A hash of all is in the header: damage is told, not unpacked.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from thinwire import zstd
from thinwire.assets.framing import Frame, Head, checked
from thinwire.assets.weights.entry import DTYPES, Entry, check_known, shape_of
from thinwire.assets.weights.tensors import Same
from thinwire.types import PayloadError, require

VERSION = 1
MAX_HEADER = 1 << 26  # bytes
FREE, PER_BYTE = 1 << 28, 1 << 10  # bytes that a file may unpack to, and more for each of its own
DIGEST = 8  # bytes of the hash that damage is noticed by
LEVEL = 19  # of Zstandard, for files
TENSOR, FILE, PADDING = "tensor:", "file:", "padding"
FRAME = Frame("thinwire.model", "model", VERSION, MAX_HEADER)


@dataclass(frozen=True, eq=False)
class PackedModel:
    """A packed model: its tensors by name, and the other files of its folder by theirs.

    Errors: ``PayloadError`` for a file whose name is a path.
    """

    entries: Mapping[str, Entry]
    files: Mapping[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.files:
            plain = PurePosixPath(name).name == name and name not in ("", ".", "..") and "\\" not in name
            require(plain, PayloadError, f"a file called {name!r:.99}, which is no plain name")

    def checked(self) -> PackedModel:
        """Return it, where the twin of each tensor without values of its own is there."""
        for name, entry in self.entries.items():
            if entry.kind == Same.kind:
                other = self.entries.get(entry.about["name"])
                good = other is not None and other.kind != Same.kind
                told = f"{name:.99} is the same as {entry.about['name']!r:.99}, which is not there"
                require(good, PayloadError, told)
        return self


def write_model(model: PackedModel, packed: Mapping[str, bytes] | None = None) -> bytes:
    """Return the file of a packed model; ``packed`` are its other files as ``pack_files`` returns them.

    A file that is tiny for what it holds, as of zeros alone, is padded to what readers accept.
    """
    files = pack_files(model.files) if packed is None else packed
    sizes = {name: len(data) for name, data in model.files.items()}
    tensors = {name: dict(entry.about) for name, entry in model.entries.items()}
    streams = {TENSOR + name: entry.data for name, entry in model.entries.items()}
    streams |= {FILE + name: files[name] for name in sizes}
    least = -(-(_claimed(tensors, sizes) - FREE) // PER_BYTE)
    missing = least - sum(map(len, streams.values()))
    streams |= {PADDING: bytes(missing)} if missing > 0 else {}
    note: dict[str, Any] = {"tensors": tensors, "files": sizes}
    return FRAME.write(note | {"hash": _digest(note, streams.items())}, streams)


def pack_files(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return files at the level that packs text well: a tokenizer takes megabytes."""
    return {name: zstd.compress(np.frombuffer(data, np.uint8), LEVEL) for name, data in files.items()}


def is_model(data: bytes | memoryview) -> bool:
    """Return whether a file, of which ``data`` is the beginning, says that it is a packed model."""
    return FRAME.begins(data)


@checked()
def read_model(data: bytes | memoryview) -> PackedModel:
    """Return the packed model in a file; tensors are still to be unpacked. Errors: ``PayloadError``."""
    head = FRAME.read(data)
    return _model(head.note, _streams(data, head), len(data))


def _streams(data: bytes | memoryview, head: Head) -> dict[str, memoryview]:
    """Return the bytes of each part, which end where the file does."""
    at, whole = head.begin, memoryview(data)
    for name, (_, at) in head.places.items():
        told = f"{len(data)} bytes, and {name!r:.99} ends at {at}: it was cut short"
        require(at <= len(data), PayloadError, told)
    require(at == len(data), PayloadError, f"{len(data) - at} bytes too many behind the last tensor")
    return {name: whole[start:stop] for name, (start, stop) in head.places.items()}


def _model(note: dict[str, Any], streams: dict[str, memoryview], size: int) -> PackedModel:
    tensors, sizes = note["tensors"], note["files"]
    named = [*(FILE + name for name in sizes), *(TENSOR + name for name in tensors)]
    told = "tensors that the header does not tell of, or none"
    require(sorted(named) == sorted(streams.keys() - {PADDING}), PayloadError, told)
    for n in sizes.values():
        require(type(n) is int and n >= 0, PayloadError, f"a file of {n!r:.20} bytes")
    claimed = _claimed(tensors, sizes)
    told = f"{claimed} bytes in a file of {size}, which is more than any packed model has"
    require(claimed <= FREE + PER_BYTE * size, PayloadError, told)
    for name, about in tensors.items():
        check_known(about, name)
    entries = {name: Entry(about, bytes(streams[TENSOR + name])) for name, about in tensors.items()}
    PackedModel(entries).checked()
    told = "its bytes are not those that were written: it is damaged; fetch it anew"
    right = note["hash"] == _digest({"tensors": tensors, "files": sizes}, streams.items())
    require(right, PayloadError, told)
    return PackedModel(entries, {name: _unpack_file(streams[FILE + name], n) for name, n in sizes.items()})


def _digest(note: Mapping[str, Any], streams: Iterable[tuple[str, bytes | memoryview]]) -> str:
    """Return a hash of what the header says and of all behind it."""
    found = hashlib.blake2b(json.dumps(note, sort_keys=True).encode(), digest_size=DIGEST)
    for name, data in streams:
        found.update(json.dumps([name, len(data)]).encode())
        found.update(data)
    return found.hexdigest()


def _claimed(tensors: Mapping[str, Any], sizes: Mapping[str, int]) -> int:
    """Return the bytes that tensors and files claim to unpack to. Errors: ``PayloadError``."""
    return sum(sizes.values()) + sum(_nbytes(name, about) for name, about in tensors.items())


def _nbytes(name: str, about: Mapping[str, Any]) -> int:
    if about.get("kind") == Same.kind:
        return 0
    dtype = DTYPES.get(about["dtype"])
    size = 8 if dtype is None else dtype.itemsize
    return size * math.prod(max(1, n) for n in shape_of(about, name))


def _unpack_file(data: memoryview, n: int) -> bytes:
    size = zstd.content_size(data)
    require(size == n, PayloadError, f"a file of {size} bytes, expected {n}")
    return zstd.decompress(data)
