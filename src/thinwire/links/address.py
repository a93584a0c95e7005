"""Addresses as users write them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from thinwire.types import InputError, require

MAX_PORT = 65536
RELAY_PORT = 7000  # of a relay, where nobody says otherwise
WORKER_PORT = 29600  # of a worker that makes a host's pictures with it, the same
MAX_RELAYED = 256  # connections at a time through it, the same


def parse_address(text: str) -> tuple[str, int | None]:
    """Split ``HOST`` or ``HOST:PORT``; an IPv6 address with a port stands in brackets.

    >>> parse_address("example.org:5000"), parse_address("::1"), parse_address("[::1]:5000")
    (('example.org', 5000), ('::1', None), ('::1', 5000))
    """
    host, colon, port = text.rpartition(":")
    if not colon or (":" in host and not host.startswith("[")) or text.endswith("]"):
        return text.strip("[]"), None
    require(
        bool(host.strip("[]"))
        and host.startswith("[") == host.endswith("]")
        and port.isdecimal()
        and 0 < int(port) < MAX_PORT,
        InputError,
        f"the address {text!r} is not HOST or HOST:PORT with a port below {MAX_PORT}; write it like "
        "192.0.2.7:5000 or [2001:db8::7]:5000",
    )
    return host.strip("[]"), int(port)


def shown(host: str, port: int) -> str:
    """Return an address as ``parse_address`` reads it.

    >>> shown("::1", 5000), shown("[::1]", 5000), shown("example.org", 5000)
    ('[::1]:5000', '[::1]:5000', 'example.org:5000')
    """
    return f"[{host.strip('[]')}]:{port}" if ":" in host else f"{host}:{port}"


def check_port(port: int) -> None:
    """Raise ``InputError`` for what is no TCP port and not 0; ZeroMQ would take its last 16 bits."""
    require(0 <= port < MAX_PORT, InputError, f"port is {port}; it must be at least 0 and below {MAX_PORT}")


class Address(NamedTuple):
    """Where somebody listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return shown(self.host, self.port)

    @classmethod
    def parse(cls, text: str, named: str = "", *, like: int, port: int | None = None) -> Address:
        """Read ``HOST:PORT``, or ``HOST`` where a ``port`` is given; ``InputError`` for anything else.

        It has the name of what was given so, and an example, at the port that others are ``like``.
        """
        host, own = parse_address(text.strip())
        own = port if own is None else own
        if own is None or not host:
            what = f"{named} {text!r}".strip()
            raise InputError(f"{what} is not HOST:PORT; write it like 192.0.2.7:{like}")
        return cls(host, own)


@dataclass(frozen=True)
class Route:
    """Where a relay is, and the name that keeps this run apart from others through it with the same token.

    >>> Route.parse("relay.example.org:7001/second")
    Route(host='relay.example.org', port=7001, run='second')
    """

    host: str
    port: int = RELAY_PORT
    run: str = ""

    @classmethod
    def parse(cls, text: str) -> Route:
        """Read ``HOST[:PORT][/RUN]``; ``InputError`` for anything else."""
        place, _, run = text.partition("/")
        host, port = parse_address(place.strip())
        require(
            bool(host) and not any(c.isspace() for c in text),
            InputError,
            f"the relay {text!r} is not HOST:PORT or HOST:PORT/RUN; write it like 192.0.2.9:{RELAY_PORT}",
        )
        return cls(host, port or RELAY_PORT, run)

    def __str__(self) -> str:
        return f"relay {shown(self.host, self.port)}"
