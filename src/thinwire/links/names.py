"""What a host's name leads to, the one place where names are looked up; and the interfaces of this one."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import threading
from contextlib import ExitStack, suppress
from ipaddress import ip_address
from itertools import zip_longest
from time import monotonic, sleep

RESOLVE, LOOKUP = 10.0, 3.0  # seconds; the latter before a dial, which is made anew until a name is known
ATTEMPT = 3.0  # seconds that one try to find somebody listening may take
EYEBALLS = 0.25  # seconds until the next address of a name is tried too
MOST = 8  # addresses
Info = tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int]]


def interface_names() -> list[str]:
    """Return the names of this machine's network interfaces."""
    return [name for _, name in socket.if_nameindex()]


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


def addresses(host: str, port: int = 0, timeout: float = RESOLVE) -> list[Info]:
    """Return the addresses to try in turn: those of ``resolve``, IPv4 and IPv6 by turns, the first few."""
    kinds: dict[int, list[Info]] = {}
    for info in dict.fromkeys(resolve(host, port, timeout)):
        kinds.setdefault(info[0], []).append(info)
    return [info for row in zip_longest(*kinds.values()) for info in row if info is not None][:MOST]


def own_address(host: str, port: int) -> str | None:
    """Return this machine's address on the way to ``host``; None where there is no route."""
    for family, _, _, _, address in resolve(host, port):
        with socket.socket(family, socket.SOCK_DGRAM) as s:
            try:
                s.connect(address)  # sends nothing
            except OSError:
                continue
            return str(s.getsockname()[0])
    return None


def await_answer(host: str, port: int, end: float, pause: float) -> None:
    """Wait until somebody listens there: torch's own wait hears no Ctrl-C and ends in a trace.

    ``end``: by ``monotonic``; ``pause``: seconds between two tries. Errors: the last ``OSError``.
    """
    while True:
        try:  # briefly: where packets are dropped, the kernel's own tries come ever more rarely
            reach(host, port, min(ATTEMPT, max(pause, end - monotonic()))).close()
        except OSError:
            if monotonic() + pause > end:
                raise
        else:
            return
        sleep(pause)


def reach(host: str, port: int, timeout: float) -> socket.socket:
    """Return a connection to whichever of a host's addresses answers first, within ``timeout`` seconds.

    These are its timeout from then on. The next address is tried once the one before has failed, or has not
    answered for a quarter of a second.
    Errors: ``OSError``; where there are several addresses its ``strerror`` says what came of each.
    Source: Happy Eyeballs, RFC 8305.
    """
    end, left = monotonic() + timeout, addresses(host, port, timeout)
    if not left:
        raise socket.gaierror(socket.EAI_NONAME, f"the name {host!r} is not known")
    names, failed, due = [str(info[4][0]) for info in left], dict[str, OSError](), 0.0
    with selectors.DefaultSelector() as waiting, ExitStack() as stack:
        while (left or waiting.get_map()) and monotonic() < end:
            if left and (monotonic() >= due or not waiting.get_map()):
                info, due = left.pop(0), monotonic() + EYEBALLS
                try:
                    sock = stack.enter_context(socket.socket(*info[:3]))
                    sock.setblocking(False)
                    _begin(sock, info)
                    waiting.register(sock, selectors.EVENT_WRITE, (sock, str(info[4][0])))
                except OSError as e:
                    failed[str(info[4][0])] = e
                continue
            for key, _ in waiting.select(max(0.0, min(end, due if left else end) - monotonic())):
                sock, at = key.data
                error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                waiting.unregister(sock)
                if not error:  # by another object, which the block does not close
                    found = socket.socket(sock.family, sock.type, sock.proto, sock.detach())
                    found.settimeout(timeout)
                    return found
                failed[at] = OSError(error, os.strerror(error))
    raise _failure(names, failed)


def _begin(sock: socket.socket, info: Info) -> None:
    error = sock.connect_ex(info[4])
    if error not in (0, errno.EINPROGRESS, errno.EWOULDBLOCK):
        raise OSError(error, os.strerror(error))


def _failure(names: list[str], failed: dict[str, OSError]) -> OSError:
    """Return one error for all addresses: refused where all were, else a deadline."""
    errors = [failed.get(at) or TimeoutError(errno.ETIMEDOUT, "no answer") for at in names]
    error = next((e for e in errors if isinstance(e, TimeoutError)), errors[0])
    if len(errors) > 1:
        said = ", ".join(f"{at}: {e.strerror}" for at, e in zip(names, errors, strict=True))
        return OSError(error.errno, said)
    return error


def tried(host: str) -> str:
    """Return what to add to an error of a host that was dialled in vain, where it has several addresses.

    >>> tried("127.0.0.1")
    ''
    """
    many = [str(info[4][0]) for info in addresses(host, timeout=LOOKUP)]
    return f" (tried {', '.join(many)})" if len(many) > 1 else ""


def needs_ipv6(infos: list[Info]) -> bool:
    """Return whether a host that was looked up has no IPv4 address."""
    return bool(infos) and infos[0][0] == socket.AF_INET6
