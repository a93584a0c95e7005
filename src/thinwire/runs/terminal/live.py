"""A line about what is going on, on stderr: kept fresh on a terminal, a plain one now and then elsewhere."""

from __future__ import annotations

import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from thinwire.runs.records.progress import Display

LOOK = 0.05  # seconds
LEAST = 100.0  # bytes/s that are more than pings: a state is coming
FRESH = 0.25  # seconds between two looks
EVERY = 1.0  # seconds between two plain lines at least
FIRST = 5.0  # seconds after which there is a plain line, news or not: somebody may wait in vain


def await_coming(done: Callable[[], bool], nbytes: Callable[[], int], patience: float) -> int | None:
    """Wait until ``done``, as long as bytes come; else return how few did in ``patience`` seconds."""
    ends, before = time.monotonic() + patience, 0
    while not done():
        time.sleep(LOOK)
        if time.monotonic() < ends:
            continue
        now = nbytes()
        if now - before < LEAST * patience:
            return now - before
        ends, before = time.monotonic() + patience, now
    return None


def printable(text: str) -> str:
    """Return ``text`` without what would move a terminal's cursor: other ends had a say in it.

    >>> printable("a\\x1b[2Jb")
    'a?[2Jb'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


@contextmanager
def warned(tell: Callable[[str], object] | None = None) -> Iterator[None]:
    """Print, or ``tell``, what the library warns of inside the block, without places in the code."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        if tell is not None:
            tell(f"note: {message}")
        else:
            sys.stderr.write(f"{printable(str(message))}\n")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        yield


class Live(Display):
    """Shows what ``text`` returns: always on a terminal; else after a ``tick``, once early, and at the end.

    ``quiet`` shows nothing but notes.
    """

    def __init__(self, text: Callable[[], str], quiet: bool = False) -> None:
        super().__init__(quiet, EVERY, picture=False)
        self._text = text
        self._lock = threading.Lock()
        self._told, self._news = "", False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live line", daemon=True)
        if not quiet:
            self._thread.start()
            self.callback(self._finish)

    def tick(self) -> None:
        """Say that there is news."""
        self._news = True

    def note(self, text: str) -> None:
        """Print a line for people, above the live one."""
        with self._lock:
            self.write(f"{printable(text)}\n")

    def _finish(self) -> None:
        """Show the last line, and stop."""
        self._over.set()
        self._thread.join()
        self._show("\n", self.terminal)

    def _run(self) -> None:
        began = time.monotonic()
        while not self._over.wait(FRESH):
            if self.terminal:
                self._show("", True)
                continue
            late = not self._told and time.monotonic() - began >= FIRST
            if (late or self._news) and self.due():
                self._news = False
                self._show("\n")

    def _show(self, end: str, again: bool = False) -> None:
        text = printable(self._text()).replace("\n", " ")
        with self._lock:
            if again or text != self._told:
                self._told = text
                room = shutil.get_terminal_size().columns - 1 if self.terminal else len(text)
                self.write(text[:room] + end)

    def write(self, text: str) -> None:
        """Write to stderr; on a terminal, over the live line."""
        super().write(f"\r\x1b[K{text}" if self.terminal else text)


class Trouble:
    """Tell in ``live`` of what goes on failing: once for each reason, and ``over`` once it is."""

    def __init__(self, live: Live, over: str) -> None:
        self._live, self._over, self._told = live, over, ""

    def tell(self, why: str) -> None:
        """Say why it fails now; nothing where it does not."""
        if why != self._told:
            self._live.note(f"note: {why or self._over}")
        self._told = why
