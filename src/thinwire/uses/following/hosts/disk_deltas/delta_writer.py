"""Keep a delta folder up to date with a state that is followed, for hosts that read their own format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from thinwire.files.base import Folder
from thinwire.files.checkpoint import SUFFIX, read_bits
from thinwire.files.local_folder import PlainFolder, open_folder
from thinwire.replacing import replacing
from thinwire.state.patches.patch import Version
from thinwire.state.values import Bits
from thinwire.types import WRONG_VALUES, InputError, require
from thinwire.uses.following.hosts.disk_deltas.delta_entries import DELTA, PICKLED, DeltaFormat, Held, Pieces
from thinwire.uses.following.hosts.disk_deltas.indexed_deltas import MODELEXPRESS, SLIME, IndexedDeltas
from thinwire.uses.following.hosts.disk_deltas.sparse_deltas import TRL

FORMATS: Mapping[str, DeltaFormat] = {form.name: form for form in (SLIME, MODELEXPRESS, TRL)}
ANCHOR_EVERY = 20  # versions, of which one is whole
OWN, MAX_OWN = "thinwire.json", 1 << 20  # what a writer notes of itself in its folder, and its bytes at most
MAX_BESIDE = 1 << 26  # bytes of a file that goes along with a whole version: configuration, tokenizer


class DeltaWriter:
    """Write versions of a state to the folder or store at ``url``, in the format of that name.

    Versions are called as in the folder that ``thinwire publish --deltas`` reads; others are numbered from 1
    without gaps, as hosts need them. Each is the difference to the one before. Whole are one of
    ``anchor_every``, the first, one whose predecessor was merged with it on the way, and the first after a
    restart at another version. With the checkpoint ``base``, which the host has as its version 0, the first
    of all is a difference too, and what lies beside that checkpoint goes along with whole versions. What is
    older than the last whole version but one is removed. A file is whole or not there. It holds the state
    once more, in the host's memory.

    Errors: ``InputError`` for a folder that somebody else writes to, or a state that the format cannot hold.
    """

    def __init__(
        self, url: str, form: str = "slime", anchor_every: int = ANCHOR_EVERY, base: Path | None = None
    ) -> None:
        require(form in FORMATS, InputError, f"the format {form!r} is none of {', '.join(FORMATS)}; give one")
        self._form, self._every, self._base = FORMATS[form], anchor_every, base
        self._folder = open_folder(url)
        self._before: Held | None = None
        own = _noted(self._folder)
        every = [other.names(self._folder) for other in FORMATS.values()]
        there = self._form.names(self._folder) if own else next(filter(None, every), {})
        told = f"{self._folder.where} holds {_newest(there)}, which this writer did not write"
        good = own.get("format") == form and max(there, default=0) <= own["newest"] if own else not there
        require(bool(good), InputError, f"{told}; give an empty folder")
        self.number: int = own.get("newest", 0)
        self._most, self._hash = self.number, str(own.get("hash", ""))
        self._anchors: list[int] = own.get("anchors", [])

    @property
    def place(self) -> str:
        """Where the newest version is: a folder or file."""
        name = self._form.place(self.number, self.number in self._anchors)
        where = self._folder
        root = where.path.absolute() if isinstance(where, PlainFolder) else where.where
        return f"{root}/{name}"

    def write(self, bits: Mapping[str, Bits], version: Version) -> bool:
        """Write a version that is not there yet; return whether there was anything to write.

        Errors: those of the class, and ``OSError``; then the next call tries again.
        """
        known, number = f"{version.hash:016x}", self._number_of(version)
        if known == self._hash or not number:  # it is the newest here, or the version 0 that hosts have
            self._before = self._before or _copied(bits)
        if number == self.number:
            return False
        there = self._form.names(self._folder)
        told = f"{self._folder.where} holds {_newest(there)}, which somebody else has written since"
        require(max(there, default=0) <= self._most, InputError, f"{told}; give each follower a folder")
        before = self._base_of(bits) if number == self.number + 1 else None
        last = self._anchors[-1] if self._anchors else 0
        if number - last >= self._every:
            before = None
        anchors = [*self._anchors, number] if before is None else self._anchors
        files = [*self._beside(number, before), *self._form.files(number, before, bits)]
        self._note(number, "", self._anchors)  # who is killed now has perhaps written it
        for name, pieces in files:
            _put(self._folder, name, pieces)
        self.number, self._hash, self._anchors = number, known, anchors
        self._before = _copied(bits)
        self._remove(there)
        self._note(number, known, self._anchors)
        return True

    def _number_of(self, version: Version) -> int:
        """Return what a version is called: as the newest here, where it is that."""
        given, same = version.meta.get(DELTA), f"{version.hash:016x}" == self._hash
        if type(given) is not int:
            return self.number + (0 if same else 1)
        again = given < self.number or (given == self.number and not same)
        told = f"the trainer is at version {given} again, and {self._folder.where} at {self.number}"
        require(not (again and self.number), InputError, f"{told}: it began anew; give an empty folder")
        return given

    def _base_of(self, bits: Held) -> Held | None:
        """Return what the next version is a difference to, None where it has to be whole."""
        if self._before is not None or self._base is None or self.number:
            return self._before
        found = read_bits(self._base)
        heads = [{name: (one.kind, one.shape) for name, one in of.items()} for of in (found, bits)]
        return found if heads[0] == heads[1] else None

    def _beside(self, number: int, before: Held | None) -> list[tuple[str, Pieces]]:
        """Return what lies beside the base, for a whole version that replaces a host's checkpoint."""
        base = self._base
        folders = isinstance(self._form, IndexedDeltas)
        if before is not None or base is None or not folders or not base.is_dir():
            return []
        folder = self._form.place(number, True)
        files = [p for p in sorted(base.iterdir()) if p.is_file() and p.suffix not in PICKLED | {SUFFIX}]
        small = [p for p in files if f"{SUFFIX}." not in p.name and p.stat().st_size <= MAX_BESIDE]
        return [(f"{folder}/{p.name}", (p.read_bytes(),)) for p in small]

    def _note(self, newest: int, known: str, anchors: list[int]) -> None:
        own = {"format": self._form.name, "newest": newest, "hash": known, "anchors": anchors}
        _put(self._folder, OWN, (json.dumps(own).encode(),))
        self._most = newest

    def _remove(self, there: Mapping[int, list[str]]) -> None:
        """Remove what is older than the last whole version but one; what cannot be removed stays."""
        if len(self._anchors) < 2:
            return
        self._anchors = self._anchors[-2:]
        for name in (name for number, own in there.items() if number < self._anchors[0] for name in own):
            with suppress(OSError):
                for file in [name] if name.endswith(SUFFIX) else self._folder.sizes(name):
                    self._folder.delete(file)
                if isinstance(self._folder, PlainFolder) and not name.endswith(SUFFIX):
                    (self._folder.path / name).rmdir()


def _copied(bits: Held) -> Held:
    return {name: one._replace(words=one.words.copy()) for name, one in bits.items()}


def _newest(there: Mapping[int, list[str]]) -> str:
    return there[max(there)][0] if there else "nothing"


def _noted(folder: Folder) -> dict[str, Any]:
    """Return what a writer before noted; nothing where there was none."""
    try:
        told = json.loads(folder.read(OWN, MAX_OWN))
        own = {"newest": int(told["newest"]), "anchors": [int(n) for n in told["anchors"]]}
        return own | {"format": str(told["format"]), "hash": str(told["hash"])}
    except FileNotFoundError:
        return {}
    except WRONG_VALUES as e:
        raise InputError(f"{folder.where}/{OWN} is damaged; give an empty folder") from e


def _put(folder: Folder, name: str, pieces: Pieces) -> None:
    """Write a file, whole or not at all."""
    if not isinstance(folder, PlainFolder):
        folder.write(name, b"".join(bytes(piece) for piece in pieces))
        return
    target = folder.path / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as temporary, temporary.open("xb") as file:
        for piece in pieces:
            file.write(piece if isinstance(piece, bytes) else piece.data)
