"""What a publisher does to its store, a step at a time: patches, keyframes, manifest, and what is deleted.

The order makes it safe at each point to stop: files first, then the manifest that names them, and only later
goes what no manifest names any more.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from thinwire.files.base import Folder
from thinwire.files.safetensors import wrap
from thinwire.replacing import PART
from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.state.patches import body
from thinwire.state.patches.patch import Meta, Patch, Version
from thinwire.types import PayloadError
from thinwire.uses.following.pull.claim import check_still_ours, claim
from thinwire.uses.following.pull.keeping import Keeping
from thinwire.uses.following.pull.keyframe import Keyframe
from thinwire.uses.following.pull.manifest import (
    KEYFRAMES,
    LAYOUT,
    PATCHES,
    STATE,
    WRITTEN,
    File,
    Manifest,
    StoredVersion,
)
from thinwire.uses.following.pull.proof import Proof

_TOP = "|".join(re.escape(name) for name in (STATE, LAYOUT))
# What a file is called until it is whole: a plain folder's name begins with a dot, a store's does not.
_PART = re.compile(
    rf"(({PATCHES}|{KEYFRAMES})/\.?[0-9-]+-[0-9a-f]{{8}}\.safetensors|\.?({_TOP}))"
    rf"\.[0-9a-f]{{8}}{re.escape(PART)}"
)
LATE = 0.6  # of its lease that a manifest may age before another thread renews it
BEATS = 3  # times within its lease that a manifest is written, whether there is news or not
HIGHEST = 1 << 48  # no name of a file moves the numbers of versions above this


class StoreWriting:
    """A history's versions in a folder. For one thread, but for ``beat``; keyframes have one of their own."""

    def __init__(
        self,
        folder: Folder,
        history: History,
        name: str,
        instance: str,
        proof: Proof,
        keeping: Keeping,
        lease: float,
        wake: Callable[[], None],
        clock: Callable[[], float] | None = None,
        sleep: Callable[[float], None] = time.sleep,
        steady: Callable[[], float] | None = None,
        tell: Callable[[float], None] | None = None,
    ) -> None:
        self._folder, self._history, self._proof, self._keeping = folder, history, proof, keeping
        self._lease, self._wake = lease, wake
        # Readers are told the time; what is due goes by a clock that nobody sets. Who gives one means both.
        self._clock, self._steady = clock or time.time, steady or clock or time.monotonic
        now = self._steady()
        self._signed, self._looked = now, now  # when the manifest was written, and files looked for, last
        self._doomed: dict[str, float] = {}  # files that no manifest names any more, and when they go
        self._keyframe: Keyframe | None = None
        self._writing = 0  # the version that a patch leads to which is being written
        # What a history begins with may be older than what readers hold: a base for the next one, no news.
        self.offers = not history.newest.number
        self._committing = threading.RLock()  # the manifest is written by one thread at a time
        self.nbytes = 0  # written, the manifest included
        self._layout = history.layout.to_json()
        file = File(LAYOUT, 0, 0, len(self._layout), proof.of(LAYOUT, self._layout))
        blank = Manifest(name, instance, self._clock(), lease, history.layout.digest, file)
        self.manifest = claim(folder, proof, blank, sleep, tell)
        anew, newest, mine = self.manifest is blank, self.manifest.newest, history.newest
        if anew:
            history.outnumber(self._highest())
        elif newest is not None and (newest.number, newest.hash) != (mine.number, mine.hash):
            history.outnumber(newest.number)
        known = self._keep_layout() or not anew  # then what lies there is of this state
        self._commit(self.manifest, taken=False)
        # Of publishers that start at the same time, the last to write the manifest has the folder.
        check_still_ours(folder, proof, instance)
        self._keep_layout()
        if known:
            self._doom_orphans()
        history.keep(self._in_use)

    def write(self) -> bool:
        """Bring the store up to the history's newest version; return whether it was behind.

        Nothing is written before that is on offer (``offers``): see there.
        Errors: ``InputError`` where another publisher took over, ``OSError`` where a file cannot be written;
        then readers find what they found before.
        """
        patch = self._next() if self.offers else None
        if patch is None:
            return False
        self._writing = patch.version
        try:
            self._add(entry_of(patch), [self._put(patch)], patch.meta)
        finally:
            self._writing = 0
        self._add_span()
        return True

    def tend(self) -> None:
        """Do what is due: take in or begin a keyframe, say that this publisher is alive, delete old files."""
        self._take_keyframe()
        if self._keyframe is None and self.offers:
            self._begin_keyframe()
        now = self._steady()
        if now - self._looked >= self._lease / BEATS:  # also where news come more often than that
            self._commit(self._found())
            self._keep_layout()
            self._looked = now
        self.sweep()

    def beat(self) -> None:
        """Say that this publisher is alive, where a long upload keeps its thread from that; from another."""
        with self._committing:
            late = self._steady() - self._signed >= LATE * self._lease
            if self._lease > 0 and late:
                check_still_ours(self._folder, self._proof, self.manifest.instance)
                self.manifest = self._sign(self.manifest)

    def leave(self) -> None:
        """Tell readers and the next publisher that this one has ended."""
        self.release()
        with self._committing:
            self._lease = 0.0
            self._commit(self.manifest)

    def end_keyframe(self, timeout: float) -> None:
        """Take in a keyframe that is written within ``timeout`` seconds; errors: as ``tend``."""
        if self._keyframe is not None:
            self._keyframe.join(timeout)
            self._take_keyframe()

    def drop_keyframe(self, timeout: float) -> None:
        """Leave no keyframe that no manifest names; wait for its upload for ``timeout`` seconds at most."""
        keyframe, self._keyframe = self._keyframe, None
        file = None if keyframe is None else keyframe.drop(timeout)
        if file is not None:
            with suppress(OSError):  # the next publisher finds it
                self._folder.delete(file.name)

    def release(self) -> None:
        """Let the history keep nothing for this store any more. Harmless twice."""
        self._history.release(self._in_use)

    def _in_use(self) -> list[int]:
        """Return the versions that patches will start from, as the history counts, the most important first.

        What is being written, or is the newest there; what a keyframe is made of; what is needed again if
        writing fails; and where the next patch across a span begins.
        """
        manifest, keyframe = self.manifest, self._keyframe
        ahead = (*manifest.versions, StoredVersion(self._history.newest.number + 1, 0, 0.0))
        base = self._keeping.span_base(replace(manifest, versions=ahead))
        whole = None if keyframe is None or keyframe.begun else keyframe.version
        wanted = (manifest.newest, whole, base)
        newest, recalled, span = (0 if v is None else self._history.find(v.number, v.hash) for v in wanted)
        return [number for number in (self._writing or newest, recalled, newest, span) if number]

    def _next(self) -> Patch | None:
        """Return what leads from the manifest's newest version to the history's, if there is news."""
        history, held, newest = self._history, self.manifest.newest, self._history.newest
        if not newest.number:
            return None
        if held is None:
            return history.patch(None)
        known = history.find(held.number, held.hash)
        if known == newest.number:  # of a version after a restart, the contents alone may be what is held
            return None if known == held.number else _renamed(held, newest, history.layout)
        patch = history.patch(known or None, mark=not known)  # ``_in_use`` says what is needed
        return replace(patch, base=held.number) if patch.base else patch

    def _add(self, entry: StoredVersion | None, files: list[File], meta: Meta | None = None) -> None:
        """Take files, and the version they lead to, into the manifest; with ``meta`` if it is the newest."""
        known = self.manifest
        versions = {v.number: v for v in known.versions}
        if entry is not None:
            versions[entry.number] = entry
        ordered = tuple(versions[n] for n in sorted(versions))
        notes = known.meta if meta is None else meta
        try:
            self._commit(replace(known, versions=ordered, files=known.files + tuple(files), meta=notes))
        except BaseException:
            self._doom(files)
            raise

    def _add_span(self) -> None:
        base, newest, history = self._keeping.span_base(self.manifest), self.manifest.newest, self._history
        if base is None or newest is None or history.find(base.number, base.hash) != base.number:
            return
        if base.number < newest.number == history.newest.number:
            patch = history.patch(base.number, mark=False)
            if (patch.base, patch.version) == (base.number, newest.number):
                self._add(None, [self._put(patch)])

    def _begin_keyframe(self) -> None:
        """Begin a keyframe of the manifest's newest version, if one is due.

        Of that one, and not of the history's, which may be newer at any time: all that is written later leads
        on from it.
        """
        newest = self.manifest.newest
        if newest is None or not self._keeping.keyframe_due(self.manifest):
            return
        if self._history.find(newest.number, newest.hash):
            version = Version(newest.number, newest.hash, newest.published, self.manifest.meta)
            self._keyframe = Keyframe(self._history, version, self._put, self._wake)

    def _take_keyframe(self) -> None:
        """Take a finished keyframe into the manifest."""
        keyframe = self._keyframe
        if keyframe is None or keyframe.running:
            return
        try:
            file = keyframe.result()
        except BaseException:
            self._keyframe = None
            raise
        if file is not None:  # where the manifest cannot be written, it is tried again without an upload
            self._commit(replace(self.manifest, files=(*self.manifest.files, file)))
        self._keyframe = None

    def _put(self, patch: Patch) -> File:
        data = wrap(patch.pack(), _notes(patch))
        kind = PATCHES if patch.base else KEYFRAMES
        numbers = f"{patch.base:08d}-{patch.version:08d}" if patch.base else f"{patch.version:08d}"
        # A hash of the contents in the name: what a name once meant to a reader or a cache, it always means.
        name = f"{kind}/{numbers}-{hashlib.sha256(data).hexdigest()[:8]}.safetensors"
        self._write(name, data)
        return File(name, patch.base, patch.version, len(data), self._proof.of(name, data))

    def _write(self, name: str, data: bytes) -> None:
        self._folder.write(name, data)
        self.nbytes += len(data)

    def _keep_layout(self) -> bool:
        """Write the layout where it is lost, damaged or another's; return whether it was there."""
        try:
            if self._folder.read(LAYOUT, len(self._layout)) == self._layout:
                return True
        except (FileNotFoundError, PayloadError):  # the latter where it is larger
            pass
        self._write(LAYOUT, self._layout)
        return False

    def _commit(self, manifest: Manifest, taken: bool = True) -> None:
        """Make ``manifest``, less what is not to be kept, what readers see."""
        with self._committing:
            self._replace(manifest, taken)

    def _replace(self, manifest: Manifest, taken: bool) -> None:
        if taken:
            check_still_ours(self._folder, self._proof, manifest.instance)
        whole = 0 if self._keyframe is None else self._keyframe.version.number
        manifest = self._sign(self._keeping.trimmed(replace(manifest, lease=self._lease), whole))
        named = {f.name for f in manifest.files}
        self._doom(f for f in self.manifest.files if f.name not in named)
        self._doomed = {name: when for name, when in self._doomed.items() if name not in named}
        self.manifest = manifest

    def _sign(self, manifest: Manifest) -> Manifest:
        """Write ``manifest`` with the time, and return it so."""
        at, signed = self._steady(), replace(manifest, written=self._clock())
        self._write(STATE, signed.pack(self._proof))
        self._signed = at
        return signed

    def _doom(self, files: Iterable[File]) -> None:
        self._doomed |= {f.name: self._steady() + self._keeping.grace for f in files}

    def _found(self) -> Manifest:
        """Return the manifest without files that are lost or cut short: then a keyframe may be due."""
        there = self._sizes()
        whole = tuple(f for f in self.manifest.files if there.get(f.name, -1) in (None, f.nbytes))
        return replace(self.manifest, files=whole)

    def _sizes(self) -> dict[str, int | None]:
        return self._folder.sizes(PATCHES) | self._folder.sizes(KEYFRAMES)

    def _highest(self) -> int:
        """Return the highest version that a file here is called after, 0 where there is none.

        Where the manifest was lost or deleted, readers may hold that one, and take none that is not above it.
        """
        found = (WRITTEN.fullmatch(name) for name in self._sizes())
        numbers = (int(match["version"]) for match in found if match)
        return max((n for n in numbers if n < HIGHEST), default=0)

    def _doom_orphans(self) -> None:
        """Mark for deletion what an earlier publisher of this state left behind when it died.

        Only what this program writes, where the manifest or the layout says that the folder is this state's.
        """
        named = {f.name for f in self.manifest.files}
        for name in [*self._sizes(), *self._folder.sizes("")]:
            if name not in named and (WRITTEN.fullmatch(name) or _PART.fullmatch(name)):
                self._doomed[name] = self._steady() + self._keeping.grace

    def sweep(self) -> None:
        """Delete files that no manifest has named for long enough."""
        now = self._steady()
        for name in [n for n, when in self._doomed.items() if when <= now]:
            with suppress(OSError):  # a file too many does no harm
                self._folder.delete(name)
            del self._doomed[name]


def _renamed(held: StoredVersion, newest: Version, layout: Layout) -> Patch:
    """Return a patch that changes nothing but the version's number, time and meta data."""
    nothing = body.pack_changes(layout, {})
    numbers = (held.number, newest.number, held.hash, newest.hash)
    return Patch(*numbers, newest.published, newest.meta, layout.digest, nothing)


def entry_of(patch: Patch) -> StoredVersion:
    """Return the version that a patch leads to."""
    return StoredVersion(patch.version, patch.hash, patch.published)


def _notes(patch: Patch) -> dict[str, str]:
    known = {"base": patch.base, "version": patch.version, "hash": f"{patch.hash:016x}"}
    return {key: str(value) for key, value in (known | {"published": patch.published}).items()}
