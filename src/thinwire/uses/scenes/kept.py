"""What has come of a scene, in a file until all of it has: a reader that is cut off goes on from there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from thinwire.uses.scenes.delivery import Piece, held_of

SUFFIX = ".part.tw"


def beside(out: Path) -> Path:
    """Return where what has come is kept for a file that is made of it.

    >>> beside(Path("scene.ply")).name
    'scene.ply.part.tw'
    """
    return out.with_name(out.name + SUFFIX)


class Kept:
    """The first layers of a scene in a file: whole ones only, so it is the beginning of a packed scene.

    What an earlier run left counts as far as its hashes are right. ``data`` are the bytes of ``held`` layers.
    """

    def __init__(self, path: Path, pieces: Sequence[Piece]) -> None:
        self._path = path
        found = path.read_bytes() if path.is_file() else b""
        self.held = held_of(found, pieces)
        self.data = bytearray(found[: sum(piece.nbytes for piece in pieces[: self.held])])

    def add(self, layer: bytes) -> None:
        """Take the next layer in. Errors: ``OSError``; then the file holds what it held."""
        before = len(self.data)
        try:
            with self._path.open("r+b" if self._path.exists() else "wb") as file:
                file.seek(before)
                file.write(layer)
                file.truncate()
        except OSError:
            with suppress(OSError):
                _shorten(self._path, before)
            raise
        self.data += layer
        self.held += 1

    def remove(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)


def _shorten(path: Path, nbytes: int) -> None:
    """Cut what was half written off a file; where nothing else is in it, it goes."""
    if not nbytes:
        path.unlink(missing_ok=True)
        return
    with path.open("r+b") as file:
        file.truncate(nbytes)
