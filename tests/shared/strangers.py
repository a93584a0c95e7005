"""Bytes that strangers throw at a port, and what of a process must not grow by them."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

from waiting import HOST, LONG

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
HUGE = b"\x02" + (1 << 62).to_bytes(8, "big") + b"x" * 100


def throw(port: int, blobs: int, *more: bytes) -> None:
    """Send so many random blobs, and ``more``, each over a connection of its own."""
    rng = random.Random(0)
    noise = [rng.randbytes(rng.randrange(1, 3000)) for _ in range(blobs)]
    for blob in (*noise, GREETING, GREETING + READY + HUGE, *more):
        with socket.create_connection((HOST, port), timeout=LONG) as s, suppress(OSError):
            s.sendall(blob)
            s.settimeout(0.05)
            s.recv(64)


def descriptors() -> int:
    """Return how many descriptors this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))
