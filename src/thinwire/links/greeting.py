"""Whether one that asks for a token listens at an address: its greeting says so before anything is proved.

ZeroMQ tells a connector only that a handshake broke off. Whoever listens may have refused the token; or there
is just a tunnel or a load balancer, whose server is away. Source: ZMTP 3.1 (RFC 37), "Framing Layer".
"""

from __future__ import annotations

import socket
from contextlib import suppress
from time import monotonic

SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
MECHANISM = b"CURVE".ljust(20, b"\0")
GREETING = (SIGNATURE + b"\x03\x00" + MECHANISM).ljust(64, b"\0")  # version 3.0: all who know 3.1 know it
_AT = len(SIGNATURE) + 2  # where the mechanism is


def asks_for_token(host: str, port: int, timeout: float = 2.0) -> bool:
    """Return whether a ZeroMQ socket with CURVE greets at ``host``:``port`` within ``timeout`` seconds.

    >>> asks_for_token("127.0.0.1", 1)
    False
    """
    end, found = monotonic() + timeout, b""
    with suppress(OSError), socket.create_connection((host.strip("[]"), port), timeout) as sock:
        sock.sendall(GREETING)
        while len(found) < _AT + len(MECHANISM):
            sock.settimeout(max(end - monotonic(), 1e-3))
            piece = sock.recv(len(GREETING) - len(found))
            if not piece:
                break
            found += piece
    fits = found[:1] == SIGNATURE[:1] and found[9:10] == SIGNATURE[9:]
    return fits and found[_AT : _AT + len(MECHANISM)] == MECHANISM
