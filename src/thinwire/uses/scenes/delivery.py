"""Packed scenes where many read them: a file a layer, and a manifest that names them, written last.

The files one behind the other are the packed scene, its header in the first. So what has come whole is always
the beginning of one. Files are named by what is in them: whoever reads a scene while another takes its place
finds the old layers, or none, and never a mixture.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.files.base import Folder, refusal
from thinwire.types import WRONG_VALUES, InputError, LinkError, PayloadError, require
from thinwire.uses.scenes.files.packed_scene import MAX_LAYERS, read_outline

MANIFEST, KIND, VERSION = "scene.json", "thinwire.scene", 1
MOST_MANIFEST, MOST_NBYTES = 1 << 16, 1 << 36  # bytes: of a manifest, of a layer
NAMED = 16  # digits of its hash in a file's name


class LayerFile(NamedTuple):
    """The file of a layer: its name, bytes and SHA-256."""

    name: str
    nbytes: int
    sha256: str

    def fits(self, data: bytes | memoryview) -> bool:
        """Return whether these are its bytes."""
        return len(data) == self.nbytes and hashlib.sha256(data).hexdigest() == self.sha256


def deliver(folder: Folder, data: bytes) -> list[LayerFile]:
    """Write a packed scene to a folder, its manifest last; what an older scene had there goes after that.

    Errors: ``InputError`` where the folder takes no file; then what was there can still be read.
    """
    pieces, at = list[LayerFile](), 0
    old = {piece.name for piece in _found(folder)}
    try:
        for i, layer in enumerate(read_outline(data).layers):
            part = data[at : layer.end]
            digest, at = hashlib.sha256(part).hexdigest(), layer.end
            pieces.append(LayerFile(f"layer-{i + 1}-{digest[:NAMED]}", len(part), digest))
            if pieces[-1].name not in old:
                folder.write(pieces[-1].name, part)
        listed = {"kind": KIND, "version": VERSION, "layers": [piece._asdict() for piece in pieces]}
        folder.write(MANIFEST, json.dumps(listed, indent=1).encode())
    except BaseException as e:
        _remove(folder, {piece.name for piece in pieces} - old)
        if isinstance(e, OSError):
            raise refusal(e, folder.where) from e
        raise
    _remove(folder, old - {piece.name for piece in pieces})
    return pieces


def _found(folder: Folder) -> list[LayerFile]:
    """Return the files of the scene that is there; none where there is none, or a damaged one."""
    with suppress(InputError, PayloadError):
        return read_manifest(folder)
    return []


def _remove(folder: Folder, names: set[str]) -> None:
    for name in names:
        with suppress(OSError):  # a file that stays does no harm
            folder.delete(name)


def is_there(folder: Folder) -> bool:
    """Return whether there is a manifest. Errors: ``LinkError`` where the place cannot be reached."""
    try:
        folder.read(MANIFEST, MOST_MANIFEST)
    except FileNotFoundError:
        return False
    except PayloadError:
        return True
    except OSError as e:
        raise LinkError(f"{folder.where} cannot be reached: {e}") from e
    return True


def read_manifest(folder: Folder) -> list[LayerFile]:
    """Return the files of the scene in a folder, the coarsest layer first.

    Errors: ``InputError`` where there is none, ``LinkError``, ``PayloadError``.
    """
    try:
        told = json.loads(folder.read(MANIFEST, MOST_MANIFEST))
        version, layers = told["version"], told["layers"]
        newer = f"a scene of version {version!r:.20}, and this thinwire reads version {VERSION}"
        require(version == VERSION, PayloadError, f"{newer}; update thinwire")
        require(told["kind"] == KIND and 0 < len(layers) <= MAX_LAYERS, PayloadError, "no list of layers")
        return [_piece(**layer) for layer in layers]
    except FileNotFoundError as e:
        missing = f"{folder.where} holds no scene: there is no {MANIFEST}"
        raise InputError(f"{missing}; pack one with -o {folder.where}/") from e
    except (PayloadError, RecursionError, *WRONG_VALUES) as e:
        raise PayloadError(f"{folder.where}/{MANIFEST} is damaged: {str(e)[:200]}") from e
    except OSError as e:
        raise LinkError(f"{folder.where} cannot be read: {e}") from e


def _piece(name: Any, nbytes: Any, sha256: Any) -> LayerFile:
    good = type(name) is str and name.startswith("layer-") and name.replace("-", "").isalnum()
    good = good and type(nbytes) is int and 0 < nbytes <= MOST_NBYTES and type(sha256) is str
    require(good, PayloadError, f"a wrong layer {name!r:.40}")
    return LayerFile(name, nbytes, sha256)


def first_pieces(pieces: Sequence[LayerFile], nbytes: int | None) -> list[LayerFile]:
    """Return the files of the layers that are whole within the first ``nbytes``, all for None.

    Errors: ``PayloadError`` where that is none.
    """
    ends = list(accumulate(piece.nbytes for piece in pieces))
    found = [piece for piece, end in zip(pieces, ends, strict=True) if nbytes is None or end <= nbytes]
    told = f"{nbytes} bytes of a scene whose first layer ends at byte {ends[0]}; ask for more"
    require(bool(found), PayloadError, told)
    return found


def held_of(data: bytes | memoryview, pieces: Sequence[LayerFile]) -> int:
    """Return how many of the first layers ``data`` holds, by their hashes."""
    at = 0
    for i, piece in enumerate(pieces):
        if not piece.fits(memoryview(data)[at : at + piece.nbytes]):
            return i
        at += piece.nbytes
    return len(pieces)


def fetch(folder: Folder, pieces: Sequence[LayerFile], held: int = 0) -> Iterator[bytes]:
    """Yield the files of a scene's layers in order, but for the first ``held``.

    Errors name the layer: ``PayloadError`` for a damaged one, ``LinkError`` for one that cannot be read.
    """
    for i, piece in enumerate(pieces[held:], held + 1):
        which = f"layer {i} of {len(pieces)} of {folder.where}"
        try:
            data = folder.read(piece.name, piece.nbytes)
        except FileNotFoundError as e:
            raise LinkError(f"{which} is gone: another scene may have taken its place") from e
        except PayloadError as e:
            raise PayloadError(f"{which} is damaged: {e}") from e
        except OSError as e:
            raise LinkError(f"{which} cannot be read: {e}") from e
        require(piece.fits(data), PayloadError, f"{which} is damaged: its checksum is wrong")
        yield data


SUFFIX = ".part.tw"


def beside(out: Path) -> Path:
    """Return where what has come is kept for a file that is made of it.

    >>> beside(Path("scene.ply")).name
    'scene.ply.part.tw'
    """
    return out.with_name(out.name + SUFFIX)


class PartialFile:
    """The first layers of a scene in a file: whole ones only, so it is the beginning of a packed scene.

    What an earlier run left counts as far as its hashes are right. ``data`` are the bytes of ``held`` layers.
    """

    def __init__(self, path: Path, pieces: Sequence[LayerFile]) -> None:
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
