"""What tests wait with: limits, ports that nobody takes by chance, and a wait that names what it is for."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from time import monotonic, sleep

HOST = "127.0.0.1"
LONG = 60.0  # seconds; a limit, not an expectation
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 4
PORTS = iter(range(20_000 + 3000 * WORKER + os.getpid() % 2000, 23_000 + 3000 * WORKER))  # each its own


def until(done: Callable[[], object], what: object = "in vain", timeout: float = LONG) -> None:
    """Wait until ``done()`` is true."""
    end = monotonic() + timeout
    while not done():
        assert monotonic() < end, what
        sleep(0.01)


def free_port() -> int:
    """Return another port that nobody listens at, of those that the system gives to nobody by itself.

    Whoever closes such a port finds it free again, also where others dial it meanwhile.
    """
    for port in PORTS:
        with suppress(OSError), socket.create_server((HOST, port)):
            return port
    raise AssertionError("no port is free")


def two_free_ports() -> int:
    """Return such a port with the next one free too, which is as much the caller's."""
    for port, after in pairwise(PORTS):
        with suppress(OSError), socket.create_server((HOST, port)), socket.create_server((HOST, after)):
            return port
    raise AssertionError("no two ports in a row are free")


def threads() -> int:
    """Count this process's threads, without the one that pyzmq starts for all that it sends uncopied."""
    return sum(type(thread).__name__ != "GarbageCollectorThread" for thread in threading.enumerate())
