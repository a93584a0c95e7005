"""TCP's congestion control of this process's own connections (Linux): what a message costs after a pause.

What crosses these links comes in bursts. After a pause cubic and reno begin slowly again: for each quarter of
a second or so of it they halve their window, down to ten segments, which costs the next message several round
trips. bbr goes on at the rate that it knows, so it is taken where the system lets programs choose it.

Source: slow start after idle, RFC 2861 and Linux's ``tcp_slow_start_after_idle``, which does not apply to
controls that set a rate of their own (``tcp_bbr``; Cardwell et al. 2016).
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from pathlib import Path

from thinwire.links.tcp import info as tcp_info
from thinwire.links.tcp.info import TCP_CONGESTION
from thinwire.types import InputError, require

AUTO, SYSTEM = "auto", "system"
PREFERRED = "bbr"
KEEPING = ("bbr",)  # controls that set a rate of their own, and keep it in pauses
IDLE = "tcp_slow_start_after_idle"
EMULATED = "THINWIRE_EMULATION"  # set in an emulator's namespaces: what was asked of it holds there
MEANING = f"TCP's congestion control: a name, {SYSTEM} for this machine's, {AUTO} for bbr where allowed."
REMEDY = (
    "as root: modprobe tcp_bbr, and sysctl -w net.ipv4.tcp_allowed_congestion_control='reno cubic bbr'; "
    "or sysctl -w net.ipv4.tcp_slow_start_after_idle=0"
)
_LONGEST = 15  # characters of a name
_SETTINGS = Path("/proc/sys/net/ipv4")


def system() -> str | None:
    """Return the control that connections have here unless told; None where the system does not tell."""
    return next(iter(_listed("tcp_congestion_control")), None)


def resolve(choice: str) -> str | None:
    """Return the name of the control to ask for; None for the one that connections have anyway.

    Errors: ``InputError`` for one that this system does not have, or lets no program choose.

    >>> resolve("system") is None
    True
    """
    emulated = EMULATED in os.environ
    if choice == SYSTEM or (choice == system() and not emulated):
        return None
    if choice == AUTO:
        # asked of the list, because the kernel lets root choose any, and loads it for that
        allowed = not emulated and PREFERRED in _listed("tcp_allowed_congestion_control")
        return PREFERRED if allowed and _refusal(PREFERRED) is None else None
    require(tcp_info.visible(), InputError, f"congestion {choice!r} needs Linux; take {SYSTEM}")
    refusal = _refusal(choice)
    require(refusal is None, InputError, refusal or "")
    return choice


def restarts(control: str | None) -> bool:
    """Return whether connections with ``control`` are known to begin slowly again after a pause here."""
    return control not in (None, *KEEPING) and _listed(IDLE) == ["1"]


def at_port(port: int, control: str | None) -> None:
    """Let connections that are accepted at ``port`` begin with ``control``; one from ``resolve``."""
    for place in tcp_info.sockets() if control is not None else ():
        with tcp_info.borrowed(place) as sock:
            if sock is not None and _listens_at(sock, port):
                use(sock, control)


def at_descriptor(descriptor: int, port: int, control: str | None) -> None:
    """Let the connection to a peer's ``port`` at a descriptor of this process go on with ``control``.

    Where the connection has ended by now, and the number is another file's, nothing happens.
    """
    place = tcp_info.place_of(descriptor) if control is not None else None
    if place is not None:
        with tcp_info.borrowed(place) as sock, contextlib.suppress(OSError):
            if sock is not None and sock.getpeername()[1] == port:
                use(sock, control)


def use(sock: socket.socket, control: str | None) -> None:
    """Let a connection go on with ``control``; one from ``resolve``."""
    if control is not None:
        with contextlib.suppress(OSError):  # it was allowed a moment ago; else the connection does without
            sock.setsockopt(socket.IPPROTO_TCP, TCP_CONGESTION, control.encode())


def _refusal(name: str) -> str | None:
    """Return why a program here cannot choose a control; None where it can."""
    if not (name.isascii() and name.isprintable() and 0 < len(name) <= _LONGEST):
        return f"congestion {name[:40]!r} is no name of a congestion control; {SYSTEM} takes this machine's"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, TCP_CONGESTION, name.encode())
    except OSError as e:
        if e.errno == errno.EPERM:
            return (
                f"congestion {name} is not for programs to choose here; as root: sysctl -w "
                f"net.ipv4.tcp_allowed_congestion_control='... {name}', or take {SYSTEM}"
            )
        known = ", ".join(sorted(_listed("tcp_available_congestion_control"))) or AUTO
        return f"congestion {name} is not known here; choose {SYSTEM} or one of {known}"
    return None


def _listed(setting: str) -> list[str]:
    try:
        return (_SETTINGS / setting).read_text("ascii").split()
    except OSError:
        return []


def _listens_at(sock: socket.socket, port: int) -> bool:
    try:
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return bool(listens) and sock.getsockname()[1] == port
    except OSError:
        return False
