"""What a listener says before anything is proved: whether it speaks ZeroMQ, and asks for a token.

ZeroMQ tells a connector only that a handshake broke off. Whoever listens may have refused the token; or there
is just a tunnel or a load balancer, whose server is away. Source: ZMTP 3.1 (RFC 37), "Framing Layer".
"""

from __future__ import annotations

from contextlib import suppress
from time import monotonic

from thinwire.links.names import reach

SIGNATURE = b"\xff" + bytes(8) + b"\x7f"  # only the first and last byte are fixed
LENGTH = 64  # bytes of a greeting; the security mechanism's name is in 12 to 32


def asks_for_token(host: str, port: int, timeout: float = 2.0) -> bool:
    """Return whether a ZeroMQ socket with CURVE greets at ``host``:``port`` within ``timeout`` seconds.

    >>> asks_for_token("127.0.0.1", 1)
    False
    """
    with suppress(OSError):
        return mechanism(read_greeting(host, port, timeout, timeout)) == "CURVE"
    return False


def read_greeting(host: str, port: int, connect: float, timeout: float) -> bytes:
    """Return what a listener says first, all that comes within ``timeout`` seconds, 64 bytes at most.

    ``connect``: the part of it until the connection is there. Errors: ``OSError`` where nothing comes.
    """
    end, greeting = monotonic() + timeout, b""
    with reach(host, port, connect) as sock:
        sock.sendall(SIGNATURE + b"\x03")
        try:
            while len(greeting) < LENGTH:
                sock.settimeout(max(end - monotonic(), 1e-3))
                more = sock.recv(LENGTH - len(greeting))
                if not more:
                    break
                greeting += more
        except OSError:
            if not greeting:
                raise
    return greeting


def mechanism(greeting: bytes) -> str | None:
    """Return the security mechanism that a greeting names; None where it is not a whole one of ZeroMQ."""
    if len(greeting) < LENGTH or (greeting[0], greeting[9]) != (SIGNATURE[0], SIGNATURE[9]):
        return None
    return greeting[12:32].rstrip(b"\0").decode("latin-1")
