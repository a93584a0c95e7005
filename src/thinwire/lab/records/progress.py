"""The progress display of a run, on stderr: a live bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

EVERY = 10.0  # seconds between plain lines


def megabytes(n: float) -> str:
    """Return bytes in words a person reads, decimal units.

    >>> megabytes(2_359_296)
    '2.36 MB'
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n:.0f} B"


class Progress:
    """Show loss, step time, bytes a step and the time left; rank 0 of a run owns one.

    On a terminal with Rich installed it is a live bar; elsewhere a plain line at the first step, at
    the last, and every ten seconds between them. ``quiet`` shows nothing but notes.
    """

    def __init__(self, name: str, steps: int, quiet: bool = False) -> None:
        self.name, self.steps, self.quiet = name, steps, quiet
        self._done = 0
        self._last_line = -EVERY
        self._seconds: list[float] = []
        self._bar = None if quiet else _bar(name, steps)

    def phase(self, text: str) -> None:
        """Say what is happening outside the steps: loading, evaluating, saving."""
        if self._bar is not None:
            self._bar.update(status=text)
        elif not self.quiet:
            self._print(f"{self.name}: {text}")

    def note(self, text: str) -> None:
        """Print a sentence above the bar; shown even when quiet, because it is a warning."""
        if self._bar is not None:
            self._bar.print(f"note: {text}")
        else:
            self._print(f"{self.name}: note: {text}")

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Show one finished step: ``step``, ``loss``, ``seconds``, ``bytes`` by stream."""
        self._done = int(metrics["step"])
        self._seconds = [*self._seconds[-19:], float(metrics["seconds"])]
        text = self._describe(metrics)
        if self._bar is not None:
            self._bar.update(completed=self._done, status=text)
        elif not self.quiet and (self._done >= self.steps or time.monotonic() - self._last_line >= EVERY):
            self._last_line = time.monotonic()
            self._print(f"{self.name}: step {self._done}/{self.steps}  {text}")

    def close(self) -> None:
        """Stop the display. Safe to call twice."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            self.quiet = True

    def _describe(self, metrics: Mapping[str, Any]) -> str:
        mean = sum(self._seconds) / len(self._seconds)
        left = max(0, self.steps - self._done) * mean
        sent = sum(metrics["bytes"].values())
        return (
            f"loss {metrics['loss']:.4f}  {metrics['seconds']:.2f} s/step  {megabytes(sent)}/step  "
            f"{int(left // 60)}:{int(left % 60):02d} left"
        )

    def _print(self, text: str) -> None:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


class _Bar:
    """A Rich progress bar with one task."""

    def __init__(self, name: str, steps: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._rich = RichProgress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            console=Console(stderr=True),
            refresh_per_second=4,
        )
        self._task = self._rich.add_task(name, total=steps, status="starting")
        self._rich.start()

    def update(self, **fields: Any) -> None:
        self._rich.update(self._task, **fields)

    def print(self, text: str) -> None:
        self._rich.console.print(text, style="yellow", markup=False, highlight=False)

    def stop(self) -> None:
        self._rich.stop()


def _bar(name: str, steps: int) -> _Bar | None:
    if not sys.stderr.isatty():
        return None
    try:
        return _Bar(name, steps)
    except ImportError:
        return None
