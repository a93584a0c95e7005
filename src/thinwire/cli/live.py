"""A line about what is going on, on stderr: kept fresh on a terminal, a plain one now and then elsewhere."""

from __future__ import annotations

import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

FRESH = 0.5  # seconds between two looks on a terminal
EVERY = 1.0  # seconds between two plain lines at least


class Live:
    """Shows what ``text`` returns: always on a terminal, else at ``tick``, and the last one at the end.

    ``quiet`` shows nothing but notes.
    """

    def __init__(self, text: Callable[[], str], quiet: bool = False) -> None:
        self._text, self._quiet = text, quiet
        self._terminal = sys.stderr.isatty()
        self._lock = threading.Lock()
        self._told, self._told_at = "", -EVERY
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        if self._terminal and not quiet:
            self._thread = threading.Thread(target=self._run, name="live line", daemon=True)
            self._thread.start()

    def tick(self) -> None:
        """Say that there is news."""
        if not self._terminal and time.monotonic() - self._told_at >= EVERY:
            self._plain()

    def note(self, text: str) -> None:
        """Print a line for people, above the live one."""
        with self._lock:
            sys.stderr.write(f"{self._clear()}{text}\n")
            sys.stderr.flush()

    def close(self) -> None:
        """Show the last line, and stop. Harmless twice."""
        if self._over.is_set():
            return
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            sys.stderr.write("\n")
        else:
            self._plain()

    def __enter__(self) -> Live:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _plain(self) -> None:
        self._told_at = time.monotonic()
        text = self._text()
        if text != self._told and not self._quiet:
            self._told = text
            self.note(text)

    def _run(self) -> None:
        while True:
            text = self._text()[: shutil.get_terminal_size().columns - 1]
            with self._lock:
                sys.stderr.write(f"{self._clear()}{text}")
                sys.stderr.flush()
            if self._over.wait(FRESH):
                return

    def _clear(self) -> str:
        return "\r\x1b[K" if self._thread is not None else ""


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does; for commands that run until somebody ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
