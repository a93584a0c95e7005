"""A keyframe that is made and written beside the patches, so that these need not wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from thinwire.engines.sync.manifest import File, Shelved
from thinwire.state.history import History
from thinwire.state.patch import Patch


class Keyframe:
    """One keyframe of a history's newest version on its way to a shelf, by a thread of its own."""

    def __init__(self, history: History, put: Callable[[Patch], File], then: Callable[[], None]) -> None:
        self._history, self._put, self._then = history, put, then
        self._done: tuple[File, Shelved] | None = None
        self._error: Exception | None = None
        self._ended = False
        self._unwanted = threading.Event()
        self.version = 0  # that it leads to, once that is known: what the patch from there starts from
        self._thread = threading.Thread(target=self._run, name="thinwire keyframe", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return not self._ended

    @property
    def done(self) -> tuple[File, Shelved] | None:
        """The file and the version it leads to; None while it is being made, and where that went wrong."""
        return self._done if self._ended else None

    def result(self) -> tuple[File, Shelved]:
        """Return the file and the version it leads to; raise what went wrong, once the thread has ended."""
        if self._done is None:
            raise self._error or OSError("a keyframe was not written")
        return self._done

    def join(self, timeout: float) -> None:
        """Wait until it is written, or went wrong, for ``timeout`` seconds at most."""
        self._thread.join(min(timeout, threading.TIMEOUT_MAX))

    def drop(self, timeout: float) -> File | None:
        """Begin no writing any more; return the file that is written, if it is within ``timeout`` seconds."""
        self._unwanted.set()
        self.join(timeout)
        return None if self.done is None else self.done[0]

    def _run(self) -> None:
        try:
            patch = self._history.patch(None)
            self.version = patch.version
            if not self._unwanted.is_set():
                self._done = self._put(patch), Shelved(patch.version, patch.hash, patch.published)
        except Exception as e:  # told by ``result``, on the thread that asks
            self._error = e
        self._ended = True
        self._then()
