"""The files of packed assets: safetensors files of uint8, with a note of JSON in the header.

Format: the number of bytes of a JSON object, the object, the bytes. Each stream is a tensor, one behind
the other. Source: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from thinwire.types import WRONG_VALUES, PayloadError, require

METADATA = "__metadata__"
TOLD_BY = 256  # bytes that a file's kind is told by
_LENGTH = struct.Struct("<Q")


@contextmanager
def checked() -> Iterator[None]:
    """Raise ``PayloadError`` where what a header says is of no use in the block."""
    try:
        yield
    except WRONG_VALUES as e:
        raise PayloadError(f"a damaged header: {str(e)[:80]}") from e


class Head(NamedTuple):
    """What the header of a file says: the note, where each stream is, and where the header ends."""

    note: dict[str, Any]
    places: dict[str, tuple[int, int]]  # from the beginning of the file, in order
    begin: int


@dataclass(frozen=True)
class Frame:
    """One kind of file: the ``key`` of its note, what it holds, its version, and its longest header.

    A note may name an older version that says all there is to say; files are read from ``oldest`` on.

    >>> frame = Frame("thinwire.example", "example", 1, most=1000)
    >>> data = frame.write({"of": 2}, {"a": b"12", "b": b"3"})
    >>> head = frame.read(data)
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
        fields: dict[str, Any] = {METADATA: {self.key: text}}
        at = 0
        for name, data in streams.items():
            end = at + len(data)
            fields[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, end]}
            at = end
        head = json.dumps(fields, separators=(",", ":")).encode()
        head += b" " * (-len(head) % 8)
        return b"".join([_LENGTH.pack(len(head)), head, *streams.values()])

    def begins(self, data: bytes | memoryview) -> bool:
        """Return whether a file, of which ``data`` is the beginning, says that it is of this kind."""
        return self.key.encode() in bytes(data[_LENGTH.size : TOLD_BY])

    @checked()
    def read(self, data: bytes | memoryview) -> Head:
        """Return what the header says; ``data`` may end before the streams do. Errors: ``PayloadError``."""
        require(len(data) > _LENGTH.size, PayloadError, f"{len(data)} bytes are no packed {self.what}")
        (length,) = _LENGTH.unpack_from(data)
        good = 2 <= length <= self.most and self.begins(data)
        require(good, PayloadError, f"it does not begin as a packed {self.what} does")
        begin = _LENGTH.size + length
        told = f"{len(data)} bytes of a header of {begin}: it was cut short"
        require(begin <= len(data), PayloadError, told)
        fields = json.loads(bytes(data[_LENGTH.size : begin]))
        note = json.loads(fields.pop(METADATA)[self.key])
        version = note["version"]
        told = f"a {self.what} of version {version!r:.20}, and this thinwire reads version {self.version}"
        oldest = self.version if self.oldest is None else self.oldest
        require(oldest <= version <= self.version, PayloadError, f"{told}; update thinwire")
        return Head(note, _places(fields, begin), begin)


def _places(fields: Mapping[str, Any], begin: int) -> dict[str, tuple[int, int]]:
    found, at = dict[str, tuple[int, int]](), begin
    for name, field in fields.items():
        start, stop = field["data_offsets"]
        good = field["dtype"] == "U8" and field["shape"] == [stop - start] and begin + start == at
        good = good and type(stop) is int and stop >= start
        require(good, PayloadError, f"{name!r:.99} is not where the header says")
        found[name] = at, begin + stop
        at = begin + stop
    return found
