"""Counters that the kernel keeps of this process's own TCP connections: what really went out (Linux).

Needs no privilege and sees sockets that C++ code opened. ``bytes_sent`` includes retransmissions; with the
headers of each segment it matched emulator and queue counters to 0.01 %. SYN, FIN and SACK blocks are not
in it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import NamedTuple

TCP_INFO = 11  # linux/tcp.h; the constants of the socket module exist on Linux only
TCP_CONGESTION = 13
MIN_LENGTH = 216  # bytes of struct tcp_info up to bytes_retrans (Linux 4.19)
TIME_STAMPS = 1  # bit of tcpi_options
IPV4, IPV6, TCP, TIME_STAMP = 20, 40, 20, 12  # bytes of header
UNMEASURED = 0xFFFFFFFF  # microseconds: the kernel's word for no round trip yet
_DESCRIPTORS = Path("/proc/self/fd")
_COPIES = Lock()  # held while there is a copy of a socket, which must not be taken for another socket


class SocketPlace(NamedTuple):
    """A socket of this process: its descriptor, and the inode that tells it from a later one there."""

    descriptor: int
    inode: int


@dataclass(frozen=True)
class TcpInfo:
    """One connection of this process. Times in seconds, rates in bytes/s."""

    local: tuple[str, int]
    remote: tuple[str, int]
    bytes_sent: int  # payload, retransmissions included
    bytes_retransmitted: int
    bytes_received: int
    segments_out: int
    segments_in: int
    rtt: float | None  # smoothed, queues included; None before the first
    min_rtt: float | None
    delivery_rate: float  # newest; too low after short transfers, and kept when idle
    app_limited: bool  # the delivery rate is what the program sent, not what the way could carry
    headers: int  # bytes of headers that a segment carries
    congestion: str  # the congestion control's name: cubic, bbr

    @property
    def wire_out(self) -> int:
        """Estimate of bytes sent as IP packets."""
        return self.bytes_sent + self.headers * self.segments_out

    @property
    def wire_in(self) -> int:
        """Estimate of bytes received as IP packets, those that came twice left out."""
        return self.bytes_received + self.headers * self.segments_in


def visible() -> bool:
    """Return whether this process can see its own sockets, also those that C++ code opened."""
    return sys.platform == "linux" and _DESCRIPTORS.is_dir()


def supported() -> bool:
    """Return whether this system tells of its sockets, and all of their counters."""
    try:
        return visible() and _told() >= MIN_LENGTH
    except OSError:  # no descriptor is free now, so this is not the last word
        return False


@functools.cache
def _told() -> int:
    """Return the bytes of struct tcp_info that this system fills: old kernels and sandboxes have fewer."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        return len(sock.getsockopt(socket.IPPROTO_TCP, TCP_INFO, 256))


def read(sock: socket.socket) -> TcpInfo | None:
    """Return the counters of a connected TCP socket, or None where the system does not tell."""
    try:
        raw = sock.getsockopt(socket.IPPROTO_TCP, TCP_INFO, 256)
        control = sock.getsockopt(socket.IPPROTO_TCP, TCP_CONGESTION, 16)
        local, remote = sock.getsockname()[:2], sock.getpeername()[:2]
    except OSError:
        return None
    if len(raw) < MIN_LENGTH:
        return None
    rtt_us = struct.unpack_from("<I", raw, 8 + 4 * 15)[0]
    received = struct.unpack_from("<Q", raw, 128)[0]
    segs_out, segs_in, _, min_rtt_us = struct.unpack_from("<4I", raw, 136)
    delivery = struct.unpack_from("<Q", raw, 160)[0]
    sent, again = struct.unpack_from("<2Q", raw, 200)
    ipv4 = ":" not in remote[0] or remote[0].startswith("::ffff:")  # or mapped to IPv6
    return TcpInfo(
        local,
        remote,
        sent,
        again,
        received,
        segs_out,
        segs_in,
        rtt_us * 1e-6 if rtt_us else None,
        min_rtt_us * 1e-6 if min_rtt_us != UNMEASURED else None,
        float(delivery),
        app_limited=bool(raw[7] & 1),
        headers=(IPV4 if ipv4 else IPV6) + TCP + (TIME_STAMP if raw[5] & TIME_STAMPS else 0),
        congestion=control.split(b"\0")[0].decode("ascii", "replace"),
    )


def sockets() -> list[SocketPlace]:
    """Return where this process's sockets are, copies that are lent left out; ``[]`` where none can be seen.

    It waits for whoever borrows one now, so not to be called from within such a block.
    """
    found = []
    with _COPIES, contextlib.suppress(OSError):  # no descriptor is free to list them with
        for path in _DESCRIPTORS.iterdir() if visible() else ():
            try:
                status = path.stat()
            except OSError:  # closed meanwhile
                continue
            if stat.S_ISSOCK(status.st_mode):
                found.append(SocketPlace(int(path.name), status.st_ino))
    return found


def place_of(descriptor: int) -> SocketPlace | None:
    """Return where the socket at a descriptor is; None where there is none, or not any more."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return SocketPlace(descriptor, status.st_ino) if stat.S_ISSOCK(status.st_mode) else None


def read_at(place: SocketPlace) -> TcpInfo | None:
    """Return the counters of the TCP socket that is still at ``place``, or None."""
    with borrowed(place) as sock:
        return None if sock is None else read(sock)


@contextlib.contextmanager
def borrowed(place: SocketPlace) -> Iterator[socket.socket | None]:
    """Lend a copy of the TCP socket that is still at ``place``, or None, for the block alone.

    A copy kept longer would hold the connection open after its owner closed it, and the peer would not learn
    of the end. One is lent at a time: the block has to be short, and must not borrow.
    """
    with _COPIES:
        copy = _copied(place.descriptor)
        if copy is None:
            yield None
            return
        with copy:
            same = os.fstat(copy.fileno()).st_ino == place.inode  # else the number is another file's by now
            yield copy if same and _is_tcp(copy) else None


@contextlib.contextmanager
def held(place: SocketPlace | None) -> Iterator[socket.socket | None]:
    """Lend the TCP socket itself that is still at ``place``, or None: for where no descriptor may be left.

    Its owner may close it meanwhile, and the number be another's: what the block does must do no harm there.
    """
    if place is None or place_of(place.descriptor) != place:
        yield None
        return
    sock = socket.socket(fileno=place.descriptor)
    try:
        yield sock if _is_tcp(sock) else None
    finally:
        sock.detach()


def _is_tcp(sock: socket.socket) -> bool:
    return sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM


def _copied(descriptor: int) -> socket.socket | None:
    """Return a copy of a socket, whose closing leaves the owner's alone; None where there is none."""
    try:
        number = os.dup(descriptor)
    except OSError:  # closed meanwhile
        return None
    try:
        blocks = os.get_blocking(number)
        copy = socket.socket(fileno=number)
    except OSError:  # another kind of file has the number by now
        os.close(number)
        return None
    if os.get_blocking(number) is not blocks:  # by ``socket.setdefaulttimeout``, and the owner's with it
        os.set_blocking(number, blocks)
    return copy
