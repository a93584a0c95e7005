"""Notice when a checkpoint on disk has changed and is whole: its files have stopped growing and changing."""

from __future__ import annotations

import time
from pathlib import Path

from torch import Tensor

from thinwire.engines.sync.checkpoint import INDEX, files_of, read_checkpoint
from thinwire.types import InputError, require

REST = 0.5  # seconds without a change after which a file counts as written
LOOK = 0.1  # seconds between two looks
ATTEMPTS = 600  # looks at a checkpoint that does not come to rest, or changes while it is read
Stamp = tuple[
    tuple[str, int, int, int], ...
]  # of each file: name, bytes, time of its last change [ns], inode


class Watch:
    """A checkpoint at ``path``, a file or a folder. A change is told once, when it has rested ``rest`` s.

    For one thread. Reading takes as much memory as the files have bytes.
    """

    def __init__(self, path: Path, rest: float = REST) -> None:
        self.path, self._rest = path, rest
        self._seen: Stamp = ()
        self._since = 0.0
        self._taken: Stamp = ()

    def stamp(self) -> Stamp:
        """Return what tells one state of the files from another; empty where they are not there."""
        try:
            files = files_of(self.path)
            files += [index] if (index := self.path / INDEX).is_file() else []
            found = [(file.name, file.stat()) for file in files]
        except (OSError, InputError):
            return ()
        return tuple((name, s.st_size, s.st_mtime_ns, s.st_ino) for name, s in found)

    def changed(self) -> bool:
        """Look once; return whether there is a checkpoint that was not taken yet, and it rests."""
        stamp, now = self.stamp(), time.monotonic()
        if stamp != self._seen:
            self._seen, self._since = stamp, now
        return bool(stamp) and stamp != self._taken and now - self._since >= self._rest

    def take(self) -> dict[str, Tensor] | None:
        """Return the tensors by name; None where the files changed meanwhile: look again.

        Errors: ``InputError`` for files that rest and are no checkpoint; they count as taken.
        """
        before = self.stamp()
        try:
            found = read_checkpoint(self.path)
        except (InputError, OSError):
            if self.stamp() != before:
                return None
            self._taken = before
            raise
        if not before or self.stamp() != before:
            return None
        self._taken = before
        return found

    def first(self) -> dict[str, Tensor]:
        """Wait until the checkpoint rests, and return its tensors.

        Errors: ``InputError`` where it is not there, is no checkpoint, lacks a file that its index names, or
        is written to without an end.
        """
        files_of(self.path)
        for _ in range(ATTEMPTS):
            if self.changed() and (found := self.take()) is not None:
                return found
            time.sleep(LOOK)
        for file in files_of(self.path):
            told = f"{file} is not there, but the index names it; save the model again"
            require(file.is_file(), InputError, told)
        raise InputError(f"{self.path} changes all the time; publish a file that is written now and then")
