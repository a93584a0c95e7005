"""System calls that Python 3.11 has no functions for: namespaces, process control, timers (Linux)."""

from __future__ import annotations

import ctypes
import os
from functools import cache

INSTEAD = "or use the in-process shaped link (train --link without --emulate), which has no TCP dynamics"
TUN = "/dev/net/tun"

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000  # linux/sched.h
PR_SET_PDEATHSIG, PR_SET_TIMERSLACK = 1, 29  # linux/prctl.h
CLOCK_MONOTONIC, TFD_TIMER_ABSTIME = 1, 1  # linux/time.h, linux/timerfd.h


def unshare(flags: int) -> None:
    """Move this thread into new namespaces."""
    _call("unshare", ctypes.c_int(flags))


def setns(fd: int, kind: int) -> None:
    """Move this thread into the namespace behind a descriptor."""
    _call("setns", ctypes.c_int(fd), ctypes.c_int(kind))


def prctl(option: int, value: int) -> None:
    """Set an attribute of this thread."""
    _call("prctl", ctypes.c_int(option), *(ctypes.c_ulong(v) for v in (value, 0, 0, 0)))


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


class Timer:
    """A descriptor that becomes readable at a given time; finer than epoll's milliseconds."""

    def __init__(self) -> None:
        flags = os.O_NONBLOCK | os.O_CLOEXEC  # the same bits as TFD_NONBLOCK and TFD_CLOEXEC
        self._fd = _call("timerfd_create", ctypes.c_int(CLOCK_MONOTONIC), ctypes.c_int(flags))
        self._spec = (ctypes.c_long * 4)()  # interval: s, ns; first: s, ns
        self._settime = _libc().timerfd_settime

    def fileno(self) -> int:
        return self._fd

    def set(self, time: float) -> None:
        """Arm it for ``time`` seconds on ``time.monotonic``'s clock, in place of what was set before."""
        nanoseconds = max(1, int(time * 1e9))
        self._spec[2], self._spec[3] = divmod(nanoseconds, 1_000_000_000)
        self._settime(self._fd, TFD_TIMER_ABSTIME, self._spec, None)

    def clear(self) -> None:
        """Take note that it has fired."""
        try:
            os.read(self._fd, 8)
        except BlockingIOError:  # it was set anew meanwhile
            pass


def _call(name: str, *arguments: ctypes._SimpleCData[int]) -> int:
    result: int = getattr(_libc(), name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
