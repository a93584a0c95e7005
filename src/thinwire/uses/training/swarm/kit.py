"""What a member needs to build the model: config and tokenizer, and frozen weights, as one message.

Little-endian: magic "TK", format u8 (1), files u16; each file: name (u16 length, UTF-8), bytes u64, contents.
"""

from __future__ import annotations

import hashlib
import re
import struct
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from thinwire.types import ByteCursor, PayloadError, require

MAGIC, FORMAT = b"TK", 1
MOST_FILES = 64
HEAD, NAME, SIZE = struct.Struct("<2sBH"), struct.Struct("<H"), struct.Struct("<Q")
# What is taken of a model's folder: no file that holds code, and none that is hidden.
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}\.(json|jinja|txt|model|safetensors)")


def pack_kit(folder: Path) -> bytes:
    """Return the files of a model's folder as one message."""
    files = sorted(file for file in folder.iterdir() if file.is_file() and _SAFE.fullmatch(file.name))
    parts = [HEAD.pack(MAGIC, FORMAT, len(files))]
    for file in files:
        name, content = file.name.encode(), file.read_bytes()
        parts += [NAME.pack(len(name)), name, SIZE.pack(len(content)), content]
    return b"".join(parts)


def unpack_kit(data: bytes, folder: Path) -> Path:
    """Write the files of a message into ``folder``, and return it.

    Errors: ``PayloadError`` for anything that ``pack_kit`` did not write; then nothing is written.
    """
    files = list(_files(data))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        part = Path(place) / folder.name
        part.mkdir()
        for name, content in files:
            (part / name).write_bytes(content)
        with suppress(OSError):  # another process was sooner, with the same files
            part.rename(folder)
    return folder


def kit_digest(data: bytes) -> str:
    """Return the digest by which a kit is known."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _files(data: bytes) -> Iterable[tuple[str, memoryview]]:
    cursor = ByteCursor(data, "a model's kit")
    magic, form, many = cursor.unpack(HEAD)
    fits = magic == MAGIC and form == FORMAT and many <= MOST_FILES
    require(fits, PayloadError, "what came is no model's kit; update the older end")
    for _ in range(many):
        name = bytes(cursor.take(*cursor.unpack(NAME))).decode("utf-8", "replace")
        require(bool(_SAFE.fullmatch(name)), PayloadError, f"a model's kit has the file {ascii(name)[:60]}")
        yield name, cursor.take(*cursor.unpack(SIZE))
    cursor.close()
