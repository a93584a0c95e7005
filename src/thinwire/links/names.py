"""What a host's name leads to: the one place where names are looked up."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from ipaddress import ip_address

RESOLVE = 10.0  # seconds
Info = tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int]]


def resolve(host: str, port: int = 0, timeout: float = RESOLVE) -> list[Info]:
    """Return ``getaddrinfo``'s answer, IPv4 first; empty for an unknown name, or when none came in time.

    >>> [info[4][0] for info in resolve("[::1]")]
    ['::1']
    """
    host, found = host.strip("[]"), list[Info]()

    def ask() -> None:
        with suppress(OSError, UnicodeError):
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            found.extend(sorted(infos, key=lambda info: info[0] != socket.AF_INET))  # type: ignore[arg-type]

    try:
        ip_address(host)
    except ValueError:
        asking = threading.Thread(target=ask, daemon=True)  # a server of names has no deadline of its own
        asking.start()
        asking.join(timeout)
    else:
        ask()
    return list(found)


def needs_ipv6(infos: list[Info]) -> bool:
    """Return whether a host that was looked up has no IPv4 address."""
    return bool(infos) and infos[0][0] == socket.AF_INET6
