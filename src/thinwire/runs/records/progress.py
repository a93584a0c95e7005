"""The progress display of a run: a live bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any

from thinwire.runs.machine.standard_streams import draws

EVERY = 10.0  # seconds between plain lines


class Display(ExitStack):
    """Show, on stderr, a picture on a terminal with Rich installed, else a plain line every so many seconds.

    ``quiet`` shows nothing but notes; ``picture`` is False for a display that draws on a terminal itself.
    """

    def __init__(self, quiet: bool = False, every: float = EVERY, picture: bool = True) -> None:
        super().__init__()
        self.quiet, self.terminal = quiet, draws(sys.stderr)
        self._every, self._last = every, -every
        self._live = _live() if picture and self.terminal and not quiet else None
        self.callback(self._leave)

    def draw(self, picture: Any, line: str | None) -> None:
        """Show what Rich renders of ``picture``; elsewhere write ``line``, if there is one to be seen."""
        if self._live is not None:
            self._live.update(picture)
        elif line is not None and not self.quiet:
            self.write(f"{line}\n")

    def due(self) -> bool:
        """Say whether a plain line may come; if so, the next one may after the usual time."""
        now = time.monotonic()
        if now - self._last < self._every:
            return False
        self._last = now
        return True

    def write(self, text: str) -> None:
        """Write to stderr at once."""
        sys.stderr.write(text)
        sys.stderr.flush()

    def _leave(self) -> None:
        """Stop, with the last picture left."""
        if self._live is not None:
            self._live.stop()
            self._live, self.quiet = None, True


def _live() -> Any:
    with suppress(ImportError):
        from rich.console import Console
        from rich.live import Live

        live = Live(console=Console(stderr=True), refresh_per_second=4)
        live.start()
        return live
    return None


def decibels(value: float | None) -> str:
    """Return a PSNR in words; None is none of error.

    >>> decibels(None), decibels(43.21)
    ('equal', '43.2 dB')
    """
    return "equal" if value is None else f"{value:.1f} dB"


def megabytes(n: float) -> str:
    """Return bytes in words a person reads, decimal units.

    >>> megabytes(2_359_296)
    '2.36 MB'
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n:.0f} B"


class Progress(Display):
    """Show loss, step time, bytes a step and the time left; rank 0 of a run owns one.

    On a terminal with Rich installed it is a live bar; elsewhere a plain line at the first step, at
    the last, and every ten seconds between them. ``quiet`` shows nothing but notes.
    """

    def __init__(self, name: str, steps: int, quiet: bool = False) -> None:
        super().__init__(quiet)
        self.name, self.steps = name, steps
        self._done = 0
        self._seconds: list[float] = []
        self._bar = None if self._live is None else _bar(name, steps)
        self._show("starting", None)

    def phase(self, text: str) -> None:
        """Say what is happening outside the steps: loading, evaluating, saving."""
        self._show(text, f"{self.name}: {text}")

    def note(self, text: str) -> None:
        """Print a sentence above the bar; shown even when quiet, because it is a warning."""
        if self._live is not None:
            self._live.console.print(f"note: {text}", style="yellow", markup=False, highlight=False)
        else:
            self.write(f"{self.name}: note: {text}\n")

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Show one finished step: ``step``, ``loss``, ``seconds``, ``bytes`` by stream."""
        self._done = int(metrics["step"])
        self._seconds = [*self._seconds[-19:], float(metrics["seconds"])]
        text = self._describe(metrics)
        due = self.due() or self._done >= self.steps
        self._show(text, f"{self.name}: step {self._done}/{self.steps}  {text}" if due else None)

    def _show(self, status: str, line: str | None) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done, status=status)
        self.draw(self._bar, line)

    def _describe(self, metrics: Mapping[str, Any]) -> str:
        mean = sum(self._seconds) / len(self._seconds)
        left = max(0, self.steps - self._done) * mean
        sent = sum(metrics["bytes"].values())
        return (
            f"loss {metrics['loss']:.4f}  {metrics['seconds']:.2f} s/step  {megabytes(sent)}/step  "
            f"{int(left // 60)}:{int(left % 60):02d} left"
        )


def _bar(name: str, steps: int) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(bar_width=28), MofNCompleteColumn(), TextColumn("{task.fields[status]}"))
    bar = Bar(TextColumn("[bold]{task.description}"), *columns)
    bar.add_task(name, total=steps, status="")
    return bar
