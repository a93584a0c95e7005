"""Notice when a checkpoint on disk has changed and is whole: its files have stopped growing and changing."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

from torch import Tensor

from thinwire.files.checkpoint import INDEX, SUFFIX, files_of, folder_of, read_checkpoint
from thinwire.types import InputError, require

REST = 0.5  # seconds without a change after which a file counts as written
PART_REST = 10.0  # the same where only some of several files have changed: the others may be on their way
LOOK = 0.1  # seconds between two looks
ATTEMPTS = 600  # looks at a checkpoint that does not come to rest, or changes while it is read
Stamp = tuple[
    tuple[str, int, int, int], ...
]  # of each file: name, bytes, time of its last change [ns], inode


class Watch:
    """A checkpoint at ``path``, a file or a folder. A change is told once, when it has rested.

    That takes ``rest`` seconds; without it ``REST``, or ``PART_REST`` as long as some of several files are
    those that were taken last: half of the next checkpoint, and half of the last one. One that is lost after
    it was taken counts as changed once, when it has been away for ``PART_REST``, or a longer ``rest``. For
    one thread.
    Reading takes as much memory as the files have bytes.
    """

    def __init__(self, path: Path, rest: float | None = None) -> None:
        self.path, self._rest = path, rest
        self._seen: Stamp = ()
        self._since = 0.0
        self._tried: Stamp = ()  # the last that was read, a checkpoint or not
        self._taken: Stamp = ()
        self._there = 0.0  # when it was whole, or nothing was taken yet
        self._told = False  # that it is not there

    def stamp(self) -> Stamp:
        """Return what tells one state of the files from another; empty where they are not there."""
        try:
            folder = folder_of(self.path)
            files = files_of(folder)
            files += [index] if (index := folder / INDEX).is_file() else []
            found = [(file.name, file.stat()) for file in files]
        except (OSError, InputError):
            return ()
        return _stamp(found)

    def _parts(self) -> Stamp:
        """Return the same of files in a folder that are still to get their names, as rsync calls them."""
        try:
            entries = sorted(os.scandir(folder_of(self.path)), key=lambda entry: entry.name)
            return _stamp([(e.name, e.stat()) for e in entries if f"{SUFFIX}." in e.name and e.is_file()])
        except OSError:  # it is a file, or one has just gone
            return ()

    def changed(self) -> bool:
        """Look once; return whether there is one that was not taken yet and rests, or none any more."""
        stamp, now = self.stamp(), time.monotonic()
        seen = stamp + self._parts()
        if seen != self._seen:
            self._seen, self._since = seen, now
        if self._lost(stamp, now):
            return True
        new = bool(stamp) and stamp not in (self._tried, self._taken)
        return new and now - self._since >= self._needed(stamp)

    def _lost(self, stamp: Stamp, now: float) -> bool:
        """Return whether what was taken has been away for so long that nobody is just replacing it; once."""
        if stamp or not self._taken:
            self._there, self._told = now, False
        if self._told or now - self._there < max(PART_REST, self._rest or 0.0):
            return False
        self._told = True
        return True

    def _needed(self, stamp: Stamp) -> float:
        """Return the seconds that files have to rest."""
        if self._rest is not None:
            return self._rest
        old = any(file in self._taken for file in stamp if file[0] != INDEX)
        return PART_REST if old else REST

    def take(self) -> dict[str, Tensor] | None:
        """Return the tensors by name; None where the files changed meanwhile: look again.

        Errors: ``InputError`` for files that rest and are no checkpoint, or are lost, naming what is missing;
        they are not told again. ``OSError``.
        """
        before = self.stamp()
        if not before:
            if self._told:
                self._check_there()
            return None
        try:
            found = read_checkpoint(self.path)
        except (InputError, OSError):
            if self.stamp() != before:
                return None
            self._tried = before
            raise
        if self.stamp() != before:
            return None
        self._tried = self._taken = before
        return found

    def await_files(self, seconds: float) -> None:
        """Wait until there is a checkpoint, whole or not yet, for at most ``seconds``.

        Errors: ``InputError`` where there is none then.
        """
        end = time.monotonic() + seconds
        while not self.stamp() and time.monotonic() < end:
            time.sleep(LOOK)
        files_of(self.path)

    def first(self) -> dict[str, Tensor]:
        """Wait until the checkpoint rests, and return its tensors.

        Errors: ``InputError`` where it is not there, is no checkpoint, lacks a file that its index names, or
        is written to without an end.
        """
        files_of(self.path)
        resting = 0 if self._rest is None else math.ceil(self._rest / LOOK)
        for _ in range(ATTEMPTS + resting):
            if self.changed() and (found := self.take()) is not None:
                return found
            time.sleep(LOOK)
        self._check_there()
        raise InputError(f"{self.path} changes all the time; publish a file that is written now and then")

    def _check_there(self) -> None:
        for file in files_of(self.path):
            told = f"{file} is not there, but the index names it; save the model again"
            require(file.is_file(), InputError, told)


def _stamp(found: list[tuple[str, os.stat_result]]) -> Stamp:
    return tuple((name, s.st_size, s.st_mtime_ns, s.st_ino) for name, s in found)
