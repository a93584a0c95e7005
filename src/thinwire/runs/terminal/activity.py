"""What a command is doing and for how long: a bar on a terminal, once it takes a while."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import ExitStack
from typing import Any

from thinwire.runs.machine.interrupts import stopped_by_signals
from thinwire.runs.machine.processor import cores
from thinwire.runs.machine.standard_streams import draws, tell

SOON = 2.0  # seconds before which nobody needs to be told
BUSY = 0.5  # load a core above which a measurement is suspect


class Activity(ExitStack):
    """Show what ``tell`` was last told on stderr: on a terminal a bar, from two seconds on, that goes again.

    Elsewhere nothing, or with ``lines`` each text as a line; ``quiet`` shows nothing.
    """

    def __init__(self, quiet: bool = False, lines: bool = False) -> None:
        super().__init__()
        terminal = draws(sys.stderr)
        self._lines, self._text = lines and not quiet and not terminal, ""
        self._bar: Any = None
        self._over = False
        self._changing = threading.Lock()
        self._timer = threading.Timer(SOON, self._begin)
        self._timer.daemon = True
        if terminal and not quiet:
            self._timer.start()
        self.callback(self._end)

    def tell(self, text: str, passing: bool = False) -> None:
        """Say what is being done from now on; ``passing`` is for the bar alone, and no line."""
        with self._changing:
            self._text = text
            if self._bar is not None:
                self._bar.update(self._bar.task_ids[0], description=text)
            elif self._lines and not passing:
                sys.stderr.write(f"{text}\n")
                sys.stderr.flush()

    def _begin(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=28),
            TimeElapsedColumn(),
        )
        with self._changing:
            if self._over:
                return
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4)
            self._bar.add_task(self._text, total=None)
            self._bar.start()

    def _end(self) -> None:
        self._timer.cancel()
        with self._changing:
            if self._bar is not None:
                self._bar.stop()
            self._bar, self._lines, self._over = None, False, True


def fetch_needs(*names: str | None, quiet: bool = False) -> None:
    """Fetch the data and models of these names that are known and absent, once, with a bar on a terminal.

    Names that are unknown here, a user's files say, are left to who reads them. Errors: those of the fetch;
    ``KeyboardInterrupt`` once nothing half-fetched is left, after a Ctrl-C, SIGTERM or SIGHUP.
    """
    from thinwire.runs.models.fetch import fetch_missing

    with stopped_by_signals(), Activity(quiet, lines=True) as doing:
        fetch_missing((name for name in names if name), doing.tell)


def load_average() -> float:
    """Return how many processes wanted a core of late; 0 where the system does not say, as on Windows."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def warn_if_busy(load: float) -> None:
    """Say so where others took this machine's time while it was measured; ``load`` is that from before."""
    if load > BUSY * cores():
        tell(f"this machine was busy (load {load:.1f} on {cores()} cores), so it was measured too slow")
