"""This machine's side of the network: addresses, ways out, TCP settings, and what blocks a connection."""

from __future__ import annotations

import ipaddress
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from thinwire.links.address import shown
from thinwire.links.names import interface_names, own_address, resolve
from thinwire.links.security import mechanism, read_greeting
from thinwire.links.tcp.congestion import IDLE, KEEPING
from thinwire.types import AuthError, InputError, LinkError, require

CONNECT, GREET = 5.0, 3.0  # seconds
REOPEN = 0.5  # seconds
SETTINGS = ("tcp_congestion_control", IDLE, "tcp_wmem", "tcp_rmem")
_SIOCGIFADDR = 0x8915  # linux/sockios.h


@dataclass(frozen=True)
class Interface:
    """A network interface and one of its addresses."""

    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.address} ({self.name})"


def interfaces() -> list[Interface]:
    """Return this machine's addresses by interface, loopback and link-local IPv6 left out."""
    found = [Interface(name, at) for name in interface_names() if (at := _ipv4(name))]
    found += _ipv6()
    if not found:  # not Linux
        infos = resolve(socket.gethostname(), 0)
        found = [Interface("?", str(info[4][0])) for info in infos]
    return [i for i in dict.fromkeys(found) if not _inner(i.address)]


def _inner(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    return ip.is_loopback or (ip.version == 6 and ip.is_link_local)


def _ipv4(name: str) -> str | None:
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            answer = fcntl.ioctl(s, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:  # it has none, or this is another system
            return None
    return socket.inet_ntoa(answer[20:24])


def _ipv6() -> list[Interface]:
    try:
        rows = Path("/proc/net/if_inet6").read_text("ascii").splitlines()
    except OSError:
        return []
    fields = [row.split() for row in rows]
    return [Interface(f[-1], str(ipaddress.IPv6Address(bytes.fromhex(f[0])))) for f in fields if len(f) == 6]


def way_out(host: str, port: int) -> Interface | None:
    """Return the interface and address that packets to ``host`` leave by; None where there is no route."""
    own = own_address(host, port)
    if own is None:
        return None
    return next((i for i in interfaces() if i.address == own), Interface("loopback", own))


def tcp_settings() -> dict[str, str]:
    """Return the kernel's settings that bear on long links, by name; empty where it does not tell."""
    found = {}
    for name in SETTINGS:
        try:
            found[name] = " ".join(Path("/proc/sys/net/ipv4", name).read_text("ascii").split())
        except OSError:
            continue
    return found


def restarts(control: str | None, settings: Mapping[str, str]) -> bool | None:
    """Return whether TCP slow starts after each pause; ``settings``: those of the sender's kernel.

    None where the system does not tell.

    >>> restarts("cubic", {"tcp_slow_start_after_idle": "1"})
    True
    """
    if control in KEEPING or settings.get(IDLE) == "0":
        return False
    return True if control is not None and IDLE in settings else None


def check_own(host: str) -> None:
    """Raise ``InputError`` unless ranks here can listen at ``host``: an address, name or interface of ours.

    Takes 10 s at most.
    """
    host = host.strip("[]")
    if host in interface_names():
        return
    infos, remedy = resolve(host, 0), "give an address of this machine"
    require(bool(infos), InputError, f"--host {host}: this name cannot be resolved; {remedy}")
    family, kind, _, _, address = infos[0]
    with socket.socket(family, kind) as s:
        try:
            s.bind(address)
        except OSError as e:
            raise InputError(f"cannot listen at --host {host} ({e.strerror}); {remedy}") from e


def check_listener(host: str, port: int, has_token: bool, command: str = "doctor --listen") -> None:
    """Raise an error that says what blocks the way to a thinwire ``command`` that listens there, if anything.

    Takes 27 s at most. Errors, ``LinkError`` all: the name is unknown, no route, no answer, nothing listens,
    something else listens; ``AuthError`` where one end has a token and the other has none.
    """
    infos, at = resolve(host, port), shown(host, port)
    if not infos:
        raise LinkError(f"the name {host!r} cannot be resolved; check its spelling, or give an address")
    try:
        named = mechanism(_greeting(host, port))
    except OSError as e:
        raise LinkError(_blocked(e, host, at, command)) from e
    if named is None:
        raise LinkError(
            f"something listens at {at}, but it is not thinwire; see what runs there, or choose another port"
        )
    secure = named == "CURVE"
    if secure != has_token:
        one, other = ("the listener", "this end") if secure else ("this end", "the listener")
        raise AuthError(
            f"{one} has a token and {other} has none ({at}); set THINWIRE_TOKEN or give --token-file, "
            "the same text at both ends"
        )


def _greeting(host: str, port: int) -> bytes:
    """Return what a listener says first; asked twice, as one that is done with a peer opens its port anew."""
    with suppress(ConnectionRefusedError, ConnectionResetError):
        if greeting := read_greeting(host, port, CONNECT, CONNECT + GREET):
            return greeting
    time.sleep(REOPEN)
    return read_greeting(host, port, CONNECT, CONNECT + GREET)


def _blocked(error: OSError, host: str, at: str, command: str) -> str:
    out = way_out(host, 9)
    leave = f" (packets leave here by {out})" if out is not None else ""
    leave += f" ({error.strerror})" if len(resolve(host)) > 1 else ""  # what came of each address
    if isinstance(error, ConnectionRefusedError):
        return (
            f"nothing listens at {at}{leave}; start thinwire {command} there, at an address that is "
            "not loopback, and look for a firewall that rejects the port"
        )
    if isinstance(error, TimeoutError):
        return (
            f"no answer from {at} within {CONNECT:g} s{leave}; the machine is down, the address is another "
            "network's, or a firewall drops the packets: open the TCP port there"
        )
    if isinstance(error, ConnectionResetError):
        return f"something at {at} ends the connection at once; see what listens there, and at firewalls"
    return f"there is no way to {at}: {error.strerror or error}; check the address and the routes{leave}"
