"""Signals that ask a program to end, taken as a Ctrl-C is: what is open is closed and says what happened."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ASKING = ("SIGTERM", "SIGHUP")  # docker stop, SLURM, timeout, torchrun; a terminal that goes away


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Let the first SIGTERM or SIGHUP inside the block do what Ctrl-C does; later ones do nothing.

    One that is handled or ignored already, as under nohup, stays so; and all do outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if not asked:  # timeout tells a process twice, and the second must not break off its closing
            asked = True
            raise KeyboardInterrupt

    known = [getattr(signal, name) for name in ASKING if hasattr(signal, name)]
    taken = [number for number in known if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
