"""The two kinds of safetensors files that hold bytes.

A patch of a store is one tensor of bytes (``wrap``, ``unwrap``). A packed asset is tensors of bytes, one
behind the other, with a note of JSON in the header (``PackedFormat``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from thinwire.state.disk.tensor_header import METADATA, PREFIX, end_of, fields, header
from thinwire.types import WRONG_VALUES, PayloadError, require

TENSOR, MAX_HEADER = "patch", 1 << 16  # of a patch's file: the tensor, and the bytes of a header
TOLD_BY = 256  # bytes that a packed file's kind is told by


def wrap(body: bytes, notes: Mapping[str, str]) -> bytes:
    """Return a safetensors file of the uint8 tensor ``patch`` [len(body)], with ``notes`` as metadata."""
    return header(notes, [(TENSOR, "U8", [len(body)], len(body))]) + body


def unwrap(data: bytes) -> memoryview:
    """Return the body of a file that ``wrap`` made, without copying; ``PayloadError`` for any other."""
    try:
        told, begin = fields(data, MAX_HEADER)
        tensor, body = told[TENSOR], memoryview(data)[begin:]
        fits = tensor["dtype"] == "U8" and tensor["data_offsets"] == [0, len(body)]
    except (*WRONG_VALUES, RecursionError) as e:
        raise PayloadError(f"a safetensors file without a tensor {TENSOR!r}") from e
    if not fits:
        raise PayloadError(f"a safetensors file whose tensor {TENSOR!r} is not its {len(body)} bytes")
    return body


@contextmanager
def checked() -> Iterator[None]:
    """Raise ``PayloadError`` where what a header says is of no use in the block."""
    try:
        yield
    except WRONG_VALUES as e:
        raise PayloadError(f"a damaged header: {str(e)[:80]}") from e


class FileHead(NamedTuple):
    """What the header of a file says: the note, where each stream is, and where the header ends."""

    note: dict[str, Any]
    places: dict[str, tuple[int, int]]  # from the beginning of the file, in order
    begin: int


@dataclass(frozen=True)
class PackedFormat:
    """One kind of file: the ``key`` of its note, what it holds, its version, and its longest header.

    A note may name an older version that says all there is to say; files are read from ``oldest`` on.

    >>> packed = PackedFormat("thinwire.example", "example", 1, most=1000)
    >>> data = packed.write({"of": 2}, {"a": b"12", "b": b"3"})
    >>> head = packed.read(data)
    >>> head.note["of"], [data[slice(*place)] for place in head.places.values()]
    (2, [b'12', b'3'])
    """

    key: str
    what: str
    version: int
    most: int  # bytes
    oldest: int | None = None  # version, where it is another one

    def write(self, note: Mapping[str, Any], streams: Mapping[str, bytes]) -> bytes:
        """Return the file of streams by name, and of a note, which gets the version."""
        text = json.dumps({"version": self.version, **note}, separators=(",", ":"))
        told = [(name, "U8", [len(data)], len(data)) for name, data in streams.items()]
        return b"".join([header({self.key: text}, told), *streams.values()])

    def begins(self, data: bytes | memoryview) -> bool:
        """Return whether a file, of which ``data`` is the beginning, says that it is of this kind."""
        return self.key.encode() in bytes(data[PREFIX.size : TOLD_BY])

    @checked()
    def read(self, data: bytes | memoryview) -> FileHead:
        """Return what the header says; ``data`` may end before the streams do. Errors: ``PayloadError``."""
        begin = end_of(data)
        require(len(data) > PREFIX.size, PayloadError, f"{len(data)} bytes are no packed {self.what}")
        good = begin <= PREFIX.size + self.most and self.begins(data)
        require(good, PayloadError, f"it does not begin as a packed {self.what} does")
        told = f"{len(data)} bytes of a header of {begin}: it was cut short"
        require(begin <= len(data), PayloadError, told)
        streams, _ = fields(data, self.most)
        note = json.loads(streams.pop(METADATA)[self.key])
        version = note["version"]
        told = f"a {self.what} of version {version!r:.20}, and this thinwire reads version {self.version}"
        oldest = self.version if self.oldest is None else self.oldest
        require(oldest <= version <= self.version, PayloadError, f"{told}; update thinwire")
        return FileHead(note, _places(streams, begin), begin)


def _places(streams: Mapping[str, Any], begin: int) -> dict[str, tuple[int, int]]:
    found, at = dict[str, tuple[int, int]](), begin
    for name, field in streams.items():
        start, stop = field["data_offsets"]
        good = field["dtype"] == "U8" and field["shape"] == [stop - start] and begin + start == at
        good = good and type(stop) is int and stop >= start
        require(good, PayloadError, f"{name!r:.99} is not where the header says")
        found[name] = at, begin + stop
        at = begin + stop
    return found
