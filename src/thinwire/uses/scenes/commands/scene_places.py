"""Where a packed scene is, or is to be: a file, a web server's file, or a folder or store of its layers."""

from __future__ import annotations

import os
from pathlib import Path

from thinwire.replacing import replacing
from thinwire.runs.terminal.addresses import URL, check_new
from thinwire.types import InputError, LinkError, require

MOST_NBYTES = 1 << 36  # of a packed file on a web server


def is_folder(place: str) -> bool:
    """Return whether a place is one of layers: a folder, a name that ends as one, or a URL of no file.

    >>> [is_folder(x) for x in ("s3://bucket/scene", "new/", "scene.tw", "https://host/scene.tw?key=1")]
    [True, True, False, False]
    """
    if URL.match(place):
        return not place.partition("?")[0].lower().endswith(".tw")
    return place.endswith(("/", os.sep)) or Path(place).is_dir()


class PackedOut:
    """Where a packed scene goes; refused at once where it cannot, or where one is there without ``force``."""

    def __init__(self, place: str, force: bool) -> None:
        self.where, self._folder = place, None
        if not is_folder(place):
            require(not URL.match(place), InputError, f"{place} is a file; give the folder, ending in /")
            check_new(Path(place), force)
            return
        from thinwire.files.local_folder import open_folder
        from thinwire.uses.scenes.delivery import is_there

        self._folder = open_folder(place)
        told = f"a scene is in {self._folder.where}; give --force to put this one in its place"
        require(force or not is_there(self._folder), InputError, told)

    def write(self, data: bytes) -> None:
        """Write a packed scene there, whole or not at all. Errors: ``InputError``, ``OSError``."""
        if self._folder is not None:
            from thinwire.uses.scenes.delivery import deliver

            deliver(self._folder, data)
            return
        with replacing(self.where) as part:
            part.write_bytes(data)


def read_packed(place: str, prefix: int | None = None) -> bytes:
    """Return a packed file, or its first ``prefix`` bytes, of this machine or a web server.

    Errors: ``LinkError``, and ``OSError`` for a file of this machine.
    """
    if not URL.match(place):
        with Path(place).open("rb") as file:
            return file.read() if prefix is None else file.read(prefix)
    from thinwire.files.local_folder import open_folder

    path, mark, query = place.partition("?")
    folder, _, name = path.rpartition("/")
    try:
        return open_folder(folder + mark + query).read(name, MOST_NBYTES)[:prefix]
    except OSError as e:
        raise LinkError(f"cannot read {path}: {e}") from e


def read_pieces(place: str) -> bytes:
    """Return the packed file whose layers are in a folder or store. Errors: ``InputError``, ``LinkError``."""
    from thinwire.files.local_folder import open_folder
    from thinwire.uses.scenes.delivery import fetch, read_manifest

    folder = open_folder(place)
    return b"".join(fetch(folder, read_manifest(folder), 0))
