"""A keyframe that is made and written beside the patches, so that these need not wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from thinwire.state.history import History
from thinwire.state.patches.draft import Draft
from thinwire.state.patches.patch import Patch, Version
from thinwire.uses.following.pull.manifest import File


class Keyframe:
    """One keyframe of a version on its way to a store, by a thread of its own."""

    def __init__(
        self, history: History, version: Version, put: Callable[[Patch], File], then: Callable[[], None]
    ) -> None:
        self._history, self._put, self._then = history, put, then
        self.version, self.begun = version, False  # begun: the history need not know it for this any more
        self._file: File | None = None
        self._error: Exception | None = None
        self._ended = False
        self._unwanted = threading.Event()
        self._thread = threading.Thread(target=self._run, name="thinwire keyframe", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return not self._ended

    def result(self) -> File | None:
        """Return the file, once the thread has ended; None where the version was gone.

        Errors: what went wrong.
        """
        if self._error is not None:
            raise self._error
        return self._file

    def join(self, timeout: float) -> None:
        """Wait until it is written, or went wrong, for ``timeout`` seconds at most."""
        self._thread.join(min(timeout, threading.TIMEOUT_MAX))

    def drop(self, timeout: float) -> File | None:
        """Begin no writing any more; return the file that is written, if it is within ``timeout`` seconds."""
        self._unwanted.set()
        self.join(timeout)
        return self._file if self._ended else None

    def _note(self, _draft: Draft) -> None:
        self.begun = True

    def _run(self) -> None:
        try:
            patch = self._history.recall(self.version, self._note)
            if patch is not None and not self._unwanted.is_set():
                self._file = self._put(patch)
        except Exception as e:  # told by ``result``, on the thread that asks
            self._error = e
        self._ended = True
        self._then()
