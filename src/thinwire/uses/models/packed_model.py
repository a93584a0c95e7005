"""Packed models as safetensors files: a header, a tensor of uint8 for each tensor and each other file.

How each tensor is coded is said of each alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np

from thinwire.codecs import zstd
from thinwire.files.safetensors import FileHead, PackedFormat, checked
from thinwire.types import PayloadError, require
from thinwire.uses.models.companions import SMALL, check_names
from thinwire.uses.models.entry import DTYPES, PackedTensor, shape_of
from thinwire.uses.models.tensors import Plain, Tied

VERSION, OLDEST = 2, 1
NEWER = frozenset({"power", "scales"})  # words about a tensor that version 1 does not have
MAX_HEADER = 1 << 26  # bytes
FREE, PER_BYTE = 1 << 28, 256  # bytes that a file may unpack to, and more for each of its own
DECODING = 16  # bytes a weight that decoding codes takes, whatever type comes of it
CHECK = 8  # bytes of a hash
LEVEL = 19  # of Zstandard, for files
TENSOR, FILE, PADDING = "tensor:", "file:", "padding"
FRAME = PackedFormat("thinwire.model", "model", VERSION, MAX_HEADER, OLDEST)


@dataclass(frozen=True, eq=False)
class PackedModel:
    """A packed model: its tensors by name, and the other files of its folder by theirs.

    Errors: ``PayloadError`` for a file whose name leads elsewhere, or is none on some systems.
    """

    entries: Mapping[str, PackedTensor]
    files: Mapping[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_names(self.files)

    def checked(self) -> PackedModel:
        """Return it, where the twin of each tensor without values of its own is there."""
        for name, entry in self.entries.items():
            if entry.kind == Tied.kind:
                other = self.entries.get(entry.about["name"])
                good = other is not None and other.kind != Tied.kind
                told = f"{name:.99} is the same as {entry.about['name']!r:.99}, which is not there"
                require(good, PayloadError, told)
        return self


def write_model(model: PackedModel) -> bytes:
    """Return the file of a packed model, padded to what readers accept where it is tiny for what it holds."""
    sizes = {name: len(data) for name, data in model.files.items()}
    tensors = {name: dict(entry.about) for name, entry in model.entries.items()}
    streams = {FILE + name: _pack_file(data) for name, data in model.files.items()}
    streams |= {TENSOR + name: entry.data for name, entry in model.entries.items()}
    least = -(-(_claimed(tensors, sizes) - FREE) // PER_BYTE)
    missing = least - sum(map(len, streams.values()))
    streams |= {PADDING: bytes(missing)} if missing > 0 else {}
    note = {"version": version_of(model), "tensors": tensors, "files": sizes}
    return FRAME.write({**note, "check": digest(note, streams.values())}, streams)


def version_of(model: PackedModel) -> int:
    """Return the oldest version that has words for all that a model holds."""
    newer = any("/" in name for name in model.files)
    newer = newer or any(NEWER & entry.about.keys() for entry in model.entries.values())
    return VERSION if newer else OLDEST


def digest(note: Mapping[str, Any], streams: Iterable[bytes | memoryview]) -> str:
    """Return a hash of what a header says of tensors and files, and of all streams in order."""
    found = blake2b(json.dumps([note["tensors"], note["files"]]).encode(), digest_size=CHECK)
    for data in streams:
        found.update(data)
    return found.hexdigest()


def is_model(data: bytes | memoryview) -> bool:
    """Return whether a file, of which ``data`` is the beginning, says that it is a packed model."""
    return FRAME.begins(data)


@checked()
def read_model(data: bytes | memoryview) -> PackedModel:
    """Return the packed model in a file; tensors are still to be unpacked. Errors: ``PayloadError``."""
    head = FRAME.read(data)
    streams = _streams(data, head)
    model = _model(head.note, streams, len(data))
    same = head.note["check"] == digest(head.note, streams.values())
    require(same, PayloadError, "its bytes are not those that were written: it is damaged; get it again")
    return model


def _streams(data: bytes | memoryview, head: FileHead) -> dict[str, memoryview]:
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
        told = f"a file of {n!r:.20} bytes, at most {SMALL} are taken"
        require(type(n) is int and 0 <= n <= SMALL, PayloadError, told)
    claimed = _claimed(tensors, sizes)
    told = f"{claimed} bytes in a file of {size}, which is more than any packed model has"
    require(claimed <= FREE + PER_BYTE * size, PayloadError, told)
    entries = {name: PackedTensor(about, bytes(streams[TENSOR + name])) for name, about in tensors.items()}
    files = {name: _unpack_file(streams[FILE + name], n) for name, n in sizes.items()}
    return PackedModel(entries, files).checked()


def _claimed(tensors: Mapping[str, Any], sizes: Mapping[str, int]) -> int:
    return sum(sizes.values()) + sum(_nbytes(name, about) for name, about in tensors.items())


def _nbytes(name: str, about: dict[str, Any]) -> int:
    """Return the bytes that a tensor claims to unpack to. Errors: ``PayloadError``."""
    if about.get("kind") == Tied.kind:
        return 0
    dtype = DTYPES.get(about["dtype"])
    size = 8 if dtype is None else dtype.itemsize
    size = size if about.get("kind") == Plain.kind else max(size, DECODING)
    return size * math.prod(max(1, n) for n in shape_of(about, name))


@lru_cache(maxsize=32)  # a search asks again and again what the whole file takes
def _pack_file(data: bytes) -> bytes:
    """Return a file's bytes at the level that packs text well: a tokenizer takes megabytes."""
    return zstd.compress(np.frombuffer(data, np.uint8), LEVEL)


def _unpack_file(data: memoryview, n: int) -> bytes:
    size = zstd.content_size(data)
    require(size == n, PayloadError, f"a file of {size} bytes, expected {n}")
    return zstd.decompress(data)
