"""Publish a state through a folder, a share or an object store, for followers that nobody can connect to."""

from __future__ import annotations

import hashlib
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from thinwire.files.base import Folder, refusal
from thinwire.files.local_folder import open_folder
from thinwire.files.safetensors import wrap
from thinwire.links.inbox import renewed
from thinwire.state.history import History
from thinwire.state.layout import Bounds, Dtypes, Layout
from thinwire.state.patch_code.patch_stream import check_coder
from thinwire.state.patches import body
from thinwire.state.patches.patch import Meta, Patch, Version
from thinwire.types import Closing, InputError, LinkError, PayloadError, ThinwireError, require
from thinwire.uses.following.published_tensors import Names, Source, notes_of, tensors_of
from thinwire.uses.following.pull.claim import (
    LONGEST,
    check_still_ours,
    claim,
    files_in,
    highest,
    left_behind,
)
from thinwire.uses.following.pull.keyframe import Keyframe
from thinwire.uses.following.pull.manifest import (
    KEYFRAMES,
    LAYOUT,
    PATCHES,
    STATE,
    File,
    Manifest,
    Proof,
    StoredVersion,
    check_names,
)
from thinwire.uses.following.pull.retention import RetentionPolicy
from thinwire.uses.following.pull.store_fetching import resume

LEASE = 60.0  # seconds that a silent publisher keeps others out
TIMEOUT = 60.0  # seconds
RETRY = 2.0  # seconds after which a write that failed is tried again
LATE = 0.6  # of its lease that a manifest may age before another thread renews it
BEATS = 3  # times within its lease that a manifest is written, whether there is news or not


@dataclass(frozen=True)
class WriterStatus:
    """Where a writer stands: newest version in the store, bytes written, files there, the last error.

    ``failures``: attempts at the newest version that failed, one after another.
    """

    version: int
    nbytes: int
    files: int
    error: str | None
    failures: int = 0


class ShelfWriter(Closing):
    """Keep a store at ``url`` up to date with a history, from a thread of its own.

    The newest version wins: all that is published while a file is being written goes into the next patch.
    Nothing is written before the first ``publish``, ``offer`` or ``flush``, because a version that the
    history already has may be older than those of the readers.

    - ``name``: the name of the state.
    - ``token``: signs all files.
    - ``keeping``: what the store keeps.
    - ``lease``: seconds after which a silent publisher counts as gone. A new publisher waits for as long,
      with a warning, unless the last one said goodbye.
    - ``instance``: this publisher's name, 8 to 64 hexadecimal digits. A publisher that restarts under its
      old name does not wait.
    - ``options``: for fsspec.

    Errors: ``InputError`` if the folder cannot be written, holds another state, or belongs to a publisher
    that is alive; ``AuthError`` if it was signed with another token.
    """

    def __init__(
        self,
        url: str | Path,
        history: History,
        *,
        name: str = "state",
        token: bytes | None = None,
        keeping: RetentionPolicy | None = None,
        lease: float = LEASE,
        instance: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        check_coder()
        require(0 < lease <= LONGEST, InputError, f"lease={lease} s is not in 0..{LONGEST:g}, without 0")
        instance = uuid4().hex if instance is None else instance
        check_names(name, instance)
        self.history = history
        self.source: Source | None = None
        self._names: Names | None = None
        folder = open_folder(url, **(options or {}))
        self.where = folder.where
        kept, proof = keeping or RetentionPolicy(), Proof(token)
        self._turn = threading.Condition()
        known = (folder, history, name, instance, proof, kept, lease, self._wake)
        try:
            self._writing = StoreWriting(*known, tell=self._warn)
        except OSError as e:
            raise refusal(e, self.where) from e
        self._beat = lease / (2 * BEATS)
        self._offered, self._closing, self._ended = True, False, False
        self._ends = 0.0  # by the monotonic clock: when whoever closes waits no longer
        self._error: ThinwireError | None = None
        self._failures = 0
        self._fatal: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"thinwire store {self.where}", daemon=True)
        self._over = threading.Event()
        self._heart = threading.Thread(target=self._live, name=f"thinwire lease {self.where}", daemon=True)
        self._thread.start()
        self._heart.start()

    @classmethod
    def of(
        cls,
        url: str | Path,
        source: Source,
        *,
        dtype: Dtypes = None,
        bounds: Bounds = None,
        names: Names | None = None,
        strict: bool = False,
        **options: Any,
    ) -> ShelfWriter:
        """Return a writer with a history of its own, of a module's or a mapping's tensors, for ``publish``.

        ``dtype``, ``bounds``, ``names`` and ``strict`` are those of ``Publisher``, ``options`` those of the
        class. It first reads the state in the store, so that its readers need a patch and no keyframe.
        """
        history = History(Layout.of(tensors_of(source, names), dtype, bounds))
        history.overflows.strict = strict
        store = options.get("token"), options.get("name", "state"), options.get("options")
        resume(history, url, *store)
        writer = cls(url, history, **options)
        writer.source, writer._names = source, names
        return writer

    def publish(
        self, step: int | None = None, tensors: Source | None = None, **meta: str | int | float
    ) -> Version:
        """Make the source's tensors the newest version, and return at once: the thread writes them.

        ``tensors``: published in place of the source's. The version carries ``step`` and ``meta``. Errors:
        ``InputError`` for tensors that no longer fit, after ``close``, or if another publisher has taken
        over.
        """
        self._raise_fatal()
        require(not self._closing, InputError, "this writer is closed: nobody would get the version")
        source = self.source if tensors is None else tensors
        if source is None:
            raise InputError(
                "this writer has no tensors of its own; give some, or offer() those of its history"
            )
        version = self.history.publish(tensors_of(source, self._names), notes_of(step, meta))
        self.offer()
        return version

    def offer(self) -> None:
        """Ask the thread to write the history's newest version. Errors: as ``publish``."""
        self._raise_fatal()
        self._writing.offers = True
        self._wake()

    def _warn(self, seconds: float) -> None:
        warnings.warn(
            f"the last publisher at {self.where} did not say goodbye; this one begins in {seconds:.0f} s, "
            "unless the last one gives a sign of life",
            stacklevel=5,  # whoever makes the writer
        )

    def _wake(self) -> None:
        with self._turn:
            self._offered = True
            self._turn.notify_all()

    def flush(self, timeout: float = TIMEOUT) -> None:
        """Wait until the history's newest version is in the store.

        Errors: after ``timeout`` seconds, the error that prevented it from being written, or ``LinkError``.
        """
        self.offer()
        with self._turn:
            patience = min(timeout, threading.TIMEOUT_MAX)
            done = self._turn.wait_for(lambda: self._up_to_date() or self._ended, patience)
        self._raise_fatal()
        if not done or not self._up_to_date():
            raise self._error or LinkError(f"{self.where} did not take the newest version in {timeout:.0f} s")

    @property
    def status(self) -> WriterStatus:
        manifest, error = self._writing.manifest, self._fatal or self._error
        newest = manifest.newest.number if manifest.newest else 0
        told = str(error) if error else None
        return WriterStatus(newest, self._writing.nbytes, len(manifest.files), told, self._failures)

    def close(self, timeout: float = TIMEOUT) -> None:
        """Write what is new, say goodbye to readers, and stop. Safe to call twice. Errors: as ``flush``."""
        if self._thread.is_alive() and not self._fatal:
            try:
                if self._writing.offers:
                    self.flush(timeout)
            finally:
                self._stop(timeout)
        self._raise_fatal()

    def _leave(self, error: BaseException | None) -> None:
        if error is None:
            self.close()
        else:
            self._stop(1.0)

    def _stop(self, timeout: float) -> None:
        with self._turn:
            self._closing, self._ends = True, time.monotonic() + timeout
            self._turn.notify_all()
        self._thread.join(min(timeout, threading.TIMEOUT_MAX))

    def _up_to_date(self) -> bool:
        newest = self._writing.manifest.newest
        return (newest.number if newest else 0) >= self.history.newest.number

    def _raise_fatal(self) -> None:
        error = self._fatal
        if error is not None:
            raise renewed(error) if isinstance(error, ThinwireError) else error

    def _run(self) -> None:
        try:
            while not self._wait():
                self._step()
            self._writing.end_keyframe(self._left())
            self._rest()
            self._writing.leave()
        except OSError as e:
            self._error = refusal(e, self.where)
        except Exception as e:  # told to whoever publishes, waits or closes
            self._fatal = e
        self._rest()
        self._writing.drop_keyframe(self._left())
        with self._turn:
            self._ended = True
            self._turn.notify_all()

    def _live(self) -> None:
        """Renew the lease while an upload takes longer than it; the other thread tells what goes wrong."""
        while not self._over.wait(self._beat):
            with suppress(OSError, ThinwireError):
                self._writing.beat()

    def _left(self) -> float:
        return max(0.0, self._ends - time.monotonic())

    def _rest(self) -> None:
        self._writing.release()
        self._over.set()
        self._heart.join(TIMEOUT)

    def _wait(self) -> bool:
        """Wait for news, or until it is time for a sign of life or another attempt; return whether to end."""
        with self._turn:
            # After an error not before the pause is over: a full disk is not asked a thousand times a second.
            self._turn.wait_for(
                lambda: self._closing or (self._offered and self._error is None), self._pause()
            )
            self._offered = False
            return self._closing

    def _pause(self) -> float:
        return self._beat if self._error is None else min(RETRY, self._beat)

    def _step(self) -> None:
        try:
            while self._writing.write() and not self._closing:
                self._writing.tend()  # also where there is always something new
                self._told()
            self._writing.tend()
            self._error, self._failures = None, 0
        except OSError as e:
            self._error, self._failures = refusal(e, self.where), self._failures + 1
            self._writing.sweep()  # which may be what a full disk needs
        self._told()

    def _told(self) -> None:
        with self._turn:
            self._turn.notify_all()


class StoreWriting:
    """A history's versions in a folder. For one thread, but for ``beat``; keyframes have one of their own."""

    def __init__(
        self,
        folder: Folder,
        history: History,
        name: str,
        instance: str,
        proof: Proof,
        keeping: RetentionPolicy,
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
            history.outnumber(highest(folder))
        elif newest is not None and (newest.number, newest.hash) != (mine.number, mine.hash):
            history.outnumber(newest.number)
        known = self._keep_layout() or not anew  # then what lies there is of this state
        self._commit(self.manifest, taken=False)
        # Of publishers that start at the same time, the last to write the manifest has the folder.
        check_still_ours(folder, proof, instance)
        self._keep_layout()
        if known:
            named = {f.name for f in self.manifest.files}
            self._doom(name for name in left_behind(folder) if name not in named)
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
            self._doom(f.name for f in files)
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
        digest = hashlib.sha256(data).hexdigest()
        name = f"{kind}/{numbers}-{digest[:8]}.safetensors"
        self._write(name, data)
        check = self._proof.of(name, data) if self._proof.keyed else digest  # which would be the same
        return File(name, patch.base, patch.version, len(data), check)

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
        self._doom(f.name for f in self.manifest.files if f.name not in named)
        self._doomed = {name: when for name, when in self._doomed.items() if name not in named}
        self.manifest = manifest

    def _sign(self, manifest: Manifest) -> Manifest:
        """Write ``manifest`` with the time, and return it so."""
        at, signed = self._steady(), replace(manifest, written=self._clock())
        self._write(STATE, signed.pack(self._proof))
        self._signed = at
        return signed

    def _doom(self, names: Iterable[str]) -> None:
        self._doomed |= dict.fromkeys(names, self._steady() + self._keeping.grace)

    def _found(self) -> Manifest:
        """Return the manifest without files that are lost or cut short: then a keyframe may be due."""
        there = files_in(self._folder)
        whole = tuple(f for f in self.manifest.files if there.get(f.name, -1) in (None, f.nbytes))
        return replace(self.manifest, files=whole)

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
