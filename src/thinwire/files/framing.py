"""The files of packed assets: safetensors files of uint8, with a note of JSON in the header.

Each stream is a tensor, one behind the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from thinwire.files.header import METADATA, PREFIX, end_of, fields, header
from thinwire.types import WRONG_VALUES, PayloadError, require

TOLD_BY = 256  # bytes that a file's kind is told by


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
        told = [(name, "U8", [len(data)], len(data)) for name, data in streams.items()]
        return b"".join([header({self.key: text}, told), *streams.values()])

    def begins(self, data: bytes | memoryview) -> bool:
        """Return whether a file, of which ``data`` is the beginning, says that it is of this kind."""
        return self.key.encode() in bytes(data[PREFIX.size : TOLD_BY])

    @checked()
    def read(self, data: bytes | memoryview) -> Head:
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
        return Head(note, _places(streams, begin), begin)


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
