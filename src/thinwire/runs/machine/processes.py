"""Processes that have to end: asked first, and killed where they do not."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

GRACE = 10.0  # seconds to end by oneself once asked to
POLL = 0.05  # seconds


def stop(processes: Sequence[subprocess.Popen[Any]], *asking: signal.Signals) -> None:
    """Send the signals in turn, until all have ended; kill what has not in time, or at an interrupt."""
    try:
        for number in asking:
            for p in processes:
                p.send_signal(number)  # which spares those that have ended
                if hasattr(signal, "SIGCONT"):  # one that is frozen would not hear it
                    p.send_signal(signal.SIGCONT)
            end = time.monotonic() + GRACE
            while None in [p.poll() for p in processes] and time.monotonic() < end:
                time.sleep(POLL)
    finally:
        for p in processes:
            p.kill()
        for p in processes:
            p.wait()
            if p.stdin is not None:
                with suppress(OSError):  # something that it did not read
                    p.stdin.close()
