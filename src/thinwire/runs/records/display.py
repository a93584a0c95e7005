"""What people see of something that goes on: a live picture on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack, suppress
from typing import Any

from thinwire.runs.machine.encoding import draws

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
