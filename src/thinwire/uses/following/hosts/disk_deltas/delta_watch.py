"""Read a delta folder as its run writes it: a copy of the base, brought forward version by version."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.files import REST
from thinwire.files.local_folder import PlainFolder, open_folder
from thinwire.files.watch import LOOK, RETRY, Watch
from thinwire.state.values import Bits
from thinwire.types import InputError, PayloadError, require
from thinwire.uses.following.follower_base import POLL
from thinwire.uses.following.hosts.disk_deltas.delta_entries import DELTA, DeltaEntry, DeltaFormat, Stamp
from thinwire.uses.following.hosts.disk_deltas.indexed_deltas import SLIME, VERSION
from thinwire.uses.following.hosts.disk_deltas.sparse_deltas import ANCHORS, DELTAS, TRL

if TYPE_CHECKING:
    from torch import Tensor

Cast = Callable[["dict[str, Tensor]"], "dict[str, Tensor]"]
HEADERS = 1 << 27  # bytes of a file besides twice the state


class DeltaWatch:
    """The deltas in the folder or store at ``url`` against the checkpoint ``base``, which is version 0.

    It does what ``Watch`` does for a checkpoint: ``changed`` looks, ``take`` returns all tensors of the
    newest version that can be reached, or None. A version counts once it is whole; one that stays half
    written, lacks its base or does not fit is refused when the folder has rested for ``rest`` seconds, and
    the version before stays. ``cast`` makes the base's floats what is published, for a format that writes
    these alone. For one thread. It holds the state once, in the host's memory.
    """

    def __init__(self, base: Path, url: str, rest: float | None = None, cast: Cast | None = None) -> None:
        self._base, self._rest, self._cast = Watch(base, rest), REST if rest is None else rest, cast
        self._folder = open_folder(url)
        self.path = self._folder.where
        plain = isinstance(self._folder, PlainFolder)
        told = f"{self.path} is a file; give the folder that the trainer writes deltas to"
        require(not (plain and Path(self.path).is_file()), InputError, told)
        self._pause = LOOK if plain else POLL
        self._form: DeltaFormat | None = None
        self._held: dict[str, Bits] = {}
        self.number = 0  # of the version that is held
        self._taken: dict[int, Stamp] = {}  # of the versions that were there when it was taken
        self._entries: list[DeltaEntry] = []
        self._seen: tuple[tuple[str, Stamp], ...] | None = None
        self._done: tuple[tuple[str, Stamp], ...] | None = None
        self._since, self._next = 0.0, 0.0
        self.trouble = ""

    @property
    def notes(self) -> dict[str, int]:
        """What goes along with the version that is held."""
        return {"step": self.number, DELTA: self.number}

    def stamp(self) -> tuple[tuple[str, int, int, int], ...]:
        """Return what tells one state of the base from another; empty where it is not there."""
        return self._base.stamp()

    def await_files(self, seconds: float) -> None:
        """Wait for the base. Errors: those of ``Watch``."""
        self._base.await_files(seconds)

    def first(self, patience: float = 0.0) -> dict[str, Tensor]:
        """Return the tensors of the newest version that is whole, or of the base where there is none.

        Errors: those of ``Watch.first``, and ``InputError`` for what ``take`` refuses.
        """
        from thinwire.state.intake import bits_of

        tensors = self._base.first(patience)
        self._held = {name: bits_of(x) for name, x in tensors.items()}
        while self._look() and self.take() is None:
            time.sleep(LOOK)
        return self._tensors()

    def changed(self) -> bool:
        """Look once; return whether there may be a version to take, or to refuse."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._pause
        return self._look()

    def _look(self) -> bool:
        try:
            self._entries = self._listed()
        except (InputError, PayloadError, OSError) as e:
            self._next = time.monotonic() + RETRY
            raise self._refused(e) from e
        seen = tuple((entry.name, entry.stamp) for entry in self._entries)
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        return bool(seen) and seen != self._done

    def _listed(self) -> list[DeltaEntry]:
        if self._form is None:
            self._form = self._detected()
        return [] if self._form is None else self._form.entries(self._folder, self.number)

    def _detected(self) -> DeltaFormat | None:
        """Return the format of the folder; None as long as nothing in it tells."""
        names = [name for name, size in self._folder.sizes("").items() if size is None]
        sparse = [name for name in names if name in (ANCHORS, DELTAS)]
        indexed = [name for name in names if VERSION.fullmatch(name)]
        told = f"{self.path} holds {' and '.join(sparse[:1] + indexed[:1])}, of two formats"
        require(not (sparse and indexed), InputError, f"{told}; give each run a folder of its own")
        if sparse and self._cast is not None:
            self._held = self._as_published(self._cast)
        return TRL if sparse else SLIME if indexed else None  # of modelexpress it differs in names alone

    def _as_published(self, cast: Cast) -> dict[str, Bits]:
        from thinwire.state.intake import bits_of

        return {name: bits_of(x) for name, x in cast(self._tensors()).items()}

    def take(self) -> dict[str, Tensor] | None:
        """Return all tensors of the newest version that can be reached; None where that is the one held.

        Errors: ``InputError`` for a folder that has rested and in which a version does not fit: then the copy
        is what the versions before have made it. ``trouble`` is then what it says, until the folder changes.
        """
        before, rested = self.number, time.monotonic() - self._since >= self._rest
        try:
            self._check_own()
            while (entry := self._following()) is not None:
                self._apply(entry)
            self._check_reached()
        except (InputError, PayloadError, OSError) as e:
            if self.number != before:
                return self._tensors()  # and the next look comes here again
            self._next = time.monotonic() + (RETRY if rested else self._pause)
            if not rested:
                return None
            self._done = self._seen if isinstance(e, InputError) else None
            raise self._refused(e) from e
        self._done, self.trouble = self._seen, ""
        return self._tensors() if self.number != before else None

    def _refused(self, error: Exception) -> InputError:
        where = "" if isinstance(error, InputError) else f"cannot read {self.path}: "
        self.trouble = f"{where}{error}"
        return InputError(self.trouble)

    def _rewritten(self) -> str:
        """Return the name of a version that was written again since it, or a newer one, was taken."""
        own = {entry.number: entry for entry in self._entries if entry.number <= self.number}
        for number, entry in sorted(own.items()):
            before = self._taken.get(number)
            if before is None or (before and entry.stamp and before != entry.stamp):
                return entry.name
        gone = bool(own) and self.number not in own
        return min(own.values(), key=lambda entry: entry.number).name if gone else ""

    def _check_own(self) -> None:
        name = self._rewritten() if self.number else ""
        told = f"{name} in {self.path} was written anew, and version {self.number} is here already"
        require(not name, InputError, f"{told}: two runs share it, or one began again; give each a folder")

    def _following(self) -> DeltaEntry | None:
        """Return what comes next: the newest whole version, or a delta against the one held."""
        new = [entry for entry in self._entries if entry.number > self.number and not entry.lacks]
        whole = [entry for entry in new if entry.base is None]
        if whole:
            return max(whole, key=lambda entry: entry.number)
        return min((e for e in new if e.base == self.number), key=lambda e: e.number, default=None)

    def _apply(self, entry: DeltaEntry) -> None:
        form = self._form
        if form is None:
            return
        limit = HEADERS + 2 * sum(bits.words.nbytes for bits in self._held.values())
        self._held = self._held | form.read(self._folder, entry, self._held, limit)
        self.number = entry.number
        self._taken = {own.number: own.stamp for own in self._entries if own.number <= entry.number}

    def _check_reached(self) -> None:
        """Raise ``InputError`` where newer versions than the one held cannot be reached."""
        new = sorted((e for e in self._entries if e.number > self.number), key=lambda entry: entry.number)
        if not new:
            return
        require(not new[0].lacks, InputError, new[0].lacks)
        raise InputError(
            f"{new[0].name} in {self.path} builds on version {new[0].base}, and what is here is version "
            f"{self.number}; bring the versions between back, or let the run write a whole one"
        )

    def _tensors(self) -> dict[str, Tensor]:
        from thinwire.state.devices.tensor_words import tensor_of

        return {name: tensor_of(*bits) for name, bits in self._held.items()}
