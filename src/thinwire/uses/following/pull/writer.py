"""Publish a state through a folder, a share or an object store, for followers that nobody can connect to."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from uuid import uuid4

from thinwire.files.base import refusal
from thinwire.files.local_folder import open_folder
from thinwire.links.inbox import renewed
from thinwire.state.code.stream import check_coder
from thinwire.state.history import History
from thinwire.state.layout import Bounds, Dtypes, Layout
from thinwire.state.patches.patch import Version
from thinwire.types import InputError, LinkError, ThinwireError, require
from thinwire.uses.following.pull.claim import LONGEST
from thinwire.uses.following.pull.keeping import Keeping
from thinwire.uses.following.pull.look import resume
from thinwire.uses.following.pull.manifest import check_names
from thinwire.uses.following.pull.proof import Proof
from thinwire.uses.following.pull.writing import BEATS, StoreWriting
from thinwire.uses.following.source import Names, Source, notes_of, tensors_of

LEASE = 60.0  # seconds that a silent publisher keeps others out
TIMEOUT = 60.0  # seconds
RETRY = 2.0  # seconds after which a write that failed is tried again


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


class ShelfWriter:
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
        keeping: Keeping | None = None,
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
        kept, proof = keeping or Keeping(), Proof(token)
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

    def __enter__(self) -> ShelfWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
