"""The documents of text files and of files of JSON lines."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import lzma
import string
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.files.lfs import HEAD, MEANING
from thinwire.types import InputError, MissingExtra, require

RECORDS = ".jsonl"  # a document a line
# What texts in other encodings may begin with: no text in UTF-8 does. The longer marks come first.
MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}
MARKS |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
ZSTD_WINDOW = 1 << 31  # the largest that the format has


class Empty(InputError):
    """A file without text: no data alone, and no harm beside others."""


@dataclass(frozen=True)
class Document:
    """A text to learn, and what stands before it and is not learnt."""

    text: str
    prompt: str = ""

    def __len__(self) -> int:
        """Return the characters of both."""
        return len(self.prompt) + len(self.text)

    def digest(self) -> bytes:
        """Return a digest that copies share, whatever their blanks and line ends are."""
        found = hashlib.blake2b(digest_size=16)
        for text in (self.prompt, "\0", self.text):
            found.update(text.encode().translate(None, string.whitespace.encode()))
        return found.digest()


def unpacked(path: Path) -> Path:
    """Return a file's name, in lower case, without the suffix of its compression.

    >>> unpacked(Path("A.TXT.xz")).name
    'a.txt'
    """
    name = Path(path.name.lower())
    return name.with_suffix("") if name.suffix in UNPACKERS else name


def has_records(path: Path) -> bool:
    """Return whether a file's name says that each of its lines is a JSON object."""
    return unpacked(path).suffix == RECORDS


def read_documents(path: Path, field: str, prompt: str = "") -> list[Document]:
    """Return the documents of a file: one, or of JSON lines one each, its text ``field`` after ``prompt``.

    Lines whose text is blank are left out. ``InputError`` with the line's number for one that lacks a field,
    and for a file that is missing or binary; ``Empty`` for one without text.
    """
    is_json = unpacked(path).suffix == ".json"
    require(not is_json, InputError, f"{path} is JSON; write one object a line, into a {RECORDS} file")
    content = read_text(path)
    if not has_records(path):
        return [Document(content)]
    found = [
        Document(text, _field(record, prompt, "--prompt-field", where) if prompt else "")
        for where, record in _records(path, content, field)
        if (text := _field(record, field, "--text-field", where)).strip()
    ]
    require(bool(found), Empty, f"{path} is empty: all its texts are; give a file with text in it")
    return found


def read_text(path: Path) -> str:
    """Return the text of a file in UTF-8, or with a mark in UTF-16 or UTF-32, unpacked by its suffix.

    ``InputError`` for any other file, ``Empty`` unless there is text in it.

    ``MissingExtra`` for ``.zst`` without zstandard.
    """
    try:
        data = path.read_bytes()
    except OSError as e:
        raise InputError(f"cannot read {path} ({e.strerror}); check the path and its permissions") from e
    require(not data.startswith(HEAD), InputError, f"{path} is {MEANING}")
    unpack = UNPACKERS.get(path.suffix.lower()) if data else None  # no bytes at all are no damaged archive
    try:
        data = unpack(data) if unpack else data
        marked = next((name for mark, name in MARKS.items() if data.startswith(mark)), "utf-8-sig")
        text = data.decode(marked)
    except UnicodeDecodeError as e:
        raise InputError(f"{path} is not UTF-8 text; convert it, or give another file") from e
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as e:
        raise InputError(f"{path} cannot be unpacked ({e}); it is cut off or damaged, fetch it anew") from e
    require("\0" not in text, InputError, f"{path} is a binary file; give a UTF-8 text")
    require(bool(text.strip()), Empty, f"{path} is empty; give a file with text in it")
    return _unix(text)


def _unzstd(data: bytes) -> bytes:
    try:
        import zstandard
    except ImportError as e:
        raise MissingExtra("reading .zst needs zstandard; run pip install 'thinwire[entropy]'") from e
    parts = []
    while data:  # a file may hold several frames
        frame = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW).decompressobj()
        try:
            parts.append(frame.decompress(data))
        except zstandard.ZstdError as e:
            raise OSError(e) from e
        if not frame.eof:
            raise EOFError("it ends within a frame")
        data = frame.unused_data
    return b"".join(parts)


UNPACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".xz": lzma.decompress,
    ".gz": gzip.decompress,
    ".zst": _unzstd,
}


def _records(path: Path, content: str, field: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield where each object of a file is, in words, and the object."""
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise InputError(f"{where} is not JSON ({e}); a {RECORDS} file has one object a line") from e
        is_object = isinstance(record, dict)
        require(is_object, InputError, f'{where} is no object; write it like {{"{field}": "..."}}')
        yield where, record


def _field(record: dict[str, Any], name: str, option: str, where: str) -> str:
    text = record.get(name)
    if not isinstance(text, str):
        if name in record:
            raise InputError(f"{where}: {name!r} is {json.dumps(text)[:40]}, not text; mend or drop the line")
        has = ", ".join(sorted(record)[:8]) or "nothing"
        raise InputError(f"{where} has no text in the field {name!r}, but {has}; name another as {option}")
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise InputError(
            f"{where} holds half a character ({e.reason}); mend it, or leave the line out"
        ) from e
    return _unix(text)


def _unix(text: str) -> str:
    return text.replace("\r\n", "\n")
