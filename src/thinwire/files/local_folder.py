"""Where the files of a store lie: a plain folder, a web server, or any store that fsspec reaches.

A folder knows nothing of what is in its files. Each write is whole or not there: a plain folder takes a
temporary name and renames it, an object store one put. Sizes are bounded before anything is read.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from urllib.parse import urlsplit

from thinwire.files.base import Folder, at_home, check_size
from thinwire.replacing import replacing
from thinwire.types import PayloadError

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)(::|://)")  # one letter is a drive, not a scheme


def open_folder(url: str | Path, **options: object) -> Folder:
    """Return the folder at a path, an ``http(s)://`` address (to read), or any URL that fsspec knows.

    ``options`` go to fsspec's file system (credentials, endpoints). Errors: ``InputError`` for a URL that
    nothing reads, ``MissingExtra`` where fsspec, or what it needs for the URL, is not installed.

    >>> open_folder("https://user:secret@host/a/b/").where
    'https://host/a/b'
    """
    text = os.fspath(url)
    found = SCHEME.match(text)
    if not text or found is None:
        return PlainFolder(Path(text or "."))
    if found[0] in ("http://", "https://") and not options:
        from thinwire.files.web_folder import WebFolder

        return WebFolder(text)
    if found[0] == "file://" and not urlsplit(text).netloc:
        return PlainFolder(Path(text.removeprefix("file://")))
    from thinwire.files.remote_folder import RemoteFolder

    return RemoteFolder(text, options)


class PlainFolder:
    """A folder of this machine, or one that is mounted here; made at the first write."""

    def __init__(self, path: Path) -> None:
        self.path = at_home(path)
        self.where = str(path)

    def read(self, name: str, limit: int) -> bytes:
        where = f"{self.where}/{name}"
        with open(self.path / name, "rb", opener=_unblocked) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise PayloadError(f"{where} is not a file")
            check_size(found.st_size, limit, where)
            return file.read(found.st_size)

    def write(self, name: str, data: bytes) -> None:
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as temporary:
            temporary.write_bytes(data)

    def delete(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def sizes(self, folder: str) -> dict[str, int | None]:
        try:
            with os.scandir(self.path / folder) as entries:
                return {f"{folder}/{entry.name}".lstrip("/"): _size(entry) for entry in entries}
        except FileNotFoundError:
            return {}


def _size(entry: os.DirEntry[str]) -> int | None:
    try:
        return entry.stat().st_size if entry.is_file() else None
    except FileNotFoundError:  # gone since it was listed
        return None


def _unblocked(path: str, flags: int) -> int:
    """Open a file without waiting: a pipe under its name must not hold the reader up."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
