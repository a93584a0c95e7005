"""Notice when a checkpoint on disk has changed and is whole: its files have stopped growing and changing."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

from torch import Tensor

from thinwire.files import PART_REST, REST
from thinwire.files.checkpoint import INDEX, SUFFIX, files_of, folder_of, read_checkpoint
from thinwire.types import InputError, require

LOOK = 0.1  # seconds between two looks
ATTEMPTS = 600  # looks at a checkpoint that does not come to rest, or changes while it is read
# Seconds before files that could not be read are read again: at first, and, twice as long each time, at last.
RETRY, SLOWEST = 1.0, 60.0
Stamp = tuple[
    tuple[str, int, int, int], ...
]  # of each file: name, bytes, time of its last change [ns], inode


class Watch:
    """A checkpoint at ``path``, a file or a folder. A change is told once, when it has rested.

    That takes ``rest`` seconds; without it ``REST``, or ``PART_REST`` as long as some of several files are
    those that were taken last: half of the next checkpoint, and half of the last one. One that is lost after
    it was taken counts as changed once, when it has been away for ``PART_REST``, or a longer ``rest``. One
    that cannot be read is read again after a pause, also unchanged: its stamp does not tell of a lease that
    is back, of permission or of free descriptors. For one thread.
    Reading takes as much memory as the files have bytes.
    """

    def __init__(self, path: Path, rest: float | None = None) -> None:
        self.path, self._rest = path, rest
        self._seen: Stamp = ()
        self._since = 0.0
        self._failed: Stamp = ()  # the last that could not be read
        self._pause, self._again = 0.0, 0.0  # seconds until it is read again, and when that is
        self._taken: Stamp = ()
        self.trouble = ""  # why the last attempt failed; empty where there is nothing to mend
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
        if stamp and stamp == self._taken:
            self._mended()
        due = bool(stamp) and stamp != self._taken and (stamp != self._failed or now >= self._again)
        return due and now - self._since >= self._needed(stamp)

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
        ``OSError``. ``trouble`` is then what they say, until the files can be read.
        """
        before = self.stamp()
        found: dict[str, Tensor] | None = None
        try:
            if before:
                found = read_checkpoint(self.path)
            elif self._told:
                self._check_there()
        except (InputError, OSError) as e:
            if self.stamp() != before:
                return None
            self._fails(before, str(e))
            raise
        if found is None or self.stamp() != before:
            return None
        self._taken = before
        self._mended()
        return found

    def _fails(self, stamp: Stamp, why: str) -> None:
        self._pause = min(2 * self._pause, SLOWEST) if stamp == self._failed else RETRY
        self._failed, self._again = stamp, time.monotonic() + self._pause
        self.trouble = why

    def _mended(self) -> None:
        self._failed, self.trouble = (), ""

    def await_files(self, seconds: float) -> None:
        """Wait until there is a checkpoint, whole or not yet, for at most ``seconds``.

        Errors: ``InputError`` where there is none then.
        """
        end = time.monotonic() + seconds
        while not self.stamp() and time.monotonic() < end:
            time.sleep(LOOK)
        files_of(self.path)

    def first(self, patience: float = 0.0) -> dict[str, Tensor]:
        """Wait until the checkpoint rests, and return its tensors.

        Errors: ``InputError`` where it is not there, is no checkpoint, lacks a file that its index names, or
        is written to without an end; for what cannot be read, once that has been so for ``patience`` seconds.
        ``OSError``.
        """
        files_of(self.path)
        until = time.monotonic() + patience
        resting = (self._rest or 0.0) + patience
        for _ in range(ATTEMPTS + (math.ceil(resting / LOOK) if resting else 0)):
            try:
                if self.changed() and (found := self.take()) is not None:
                    return found
            except (InputError, OSError):
                if time.monotonic() >= until:
                    raise
            time.sleep(LOOK)
        self._check_there()
        raise InputError(f"{self.path} changes all the time; publish a file that is written now and then")

    def _check_there(self) -> None:
        for file in files_of(self.path):
            told = f"{file} is not there, but the index names it; save the model again"
            require(file.is_file(), InputError, told)


def _stamp(found: list[tuple[str, os.stat_result]]) -> Stamp:
    return tuple((name, s.st_size, s.st_mtime_ns, s.st_ino) for name, s in found)
