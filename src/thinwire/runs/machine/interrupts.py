"""Signals that ask a program to end, taken as a Ctrl-C is: what is open is closed and says what happened."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from time import monotonic
from types import FrameType
from typing import Any

ASKING = ("SIGTERM", "SIGHUP")  # docker stop, SLURM, timeout, torchrun; a terminal that goes away
SOON = 0.05  # seconds until a signal that came at a bad time comes again
TWICE = 1.0  # seconds: timeout tells a process twice, and the second must not break off its closing
GRACE = 10.0  # seconds to end by oneself once asked to
POLL = 0.05  # seconds


@contextmanager
def held_back() -> Iterator[None]:
    """Let a Ctrl-C and its like wait for the end of the block; a process started inside begins with that."""
    if sys.platform == "win32":  # which has no such masks
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _endings())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def let_in() -> None:
    """Take what whoever started this process let wait, now that there is somebody to answer it."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _endings())


def _endings() -> set[signal.Signals]:
    return {signal.SIGINT, *_asking()}


def _asking() -> list[signal.Signals]:
    return [getattr(signal, name) for name in ASKING if hasattr(signal, name)]  # Windows has fewer


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Let a SIGTERM or SIGHUP inside the block do what Ctrl-C does; another within a second does nothing.

    One that is handled or ignored already, as under nohup, stays so; and all do outside the main thread. None
    is lost that comes while an object is freed, nor is a Ctrl-C.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = -math.inf

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if _is_held_back(number):  # and was taken by a thread that does not
            signal.raise_signal(number)  # which waits in this one
            return
        if _in_destructor(frame):
            again = threading.Timer(SOON, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
            return
        before, asked = asked, monotonic()
        if asked - before > TWICE or number == signal.SIGINT:
            raise KeyboardInterrupt

    usual = dict.fromkeys(_asking(), signal.SIG_DFL) | {signal.SIGINT: signal.default_int_handler}
    taken = {number: how for number, how in usual.items() if signal.getsignal(number) is how}
    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, how in taken.items():
            signal.signal(number, how)


def _is_held_back(number: int) -> bool:
    return sys.platform != "win32" and number in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def _in_destructor(frame: FrameType | None) -> bool:
    """Return whether some object is being freed: Python prints what is raised there, and goes on."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


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
