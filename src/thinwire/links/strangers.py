"""Who has connected to a listener and not yet said anything that counts: few at a time, and not for long.

A flood from one address costs those of the same address their place, and nobody else. Where this process has
no descriptor left, such connections go first.
"""

from __future__ import annotations

import socket
from collections import Counter
from contextlib import suppress
from ipaddress import IPv6Address, IPv6Network
from typing import Generic, TypeVar

import zmq

from thinwire.links.tcp import info as tcp_info
from thinwire.links.tcp.info import SocketPlace

MOST, EACH = 128, 64  # strangers at a time, and from one address: many clients of one machine come at once
AT_ONCE = 16  # that go where there is no descriptor for another one
EVENTS = zmq.Event.ACCEPTED | zmq.Event.ACCEPT_FAILED | zmq.Event.DISCONNECTED  # that tell a listener of them
K = TypeVar("K")


def whence(address: str) -> str:
    """Return what one machine has one of: its IPv4 address, or the IPv6 network of its address.

    >>> whence("192.0.2.7"), whence("2001:db8::1:7"), whence("::ffff:192.0.2.7")
    ('192.0.2.7', '2001:db8::/64', '192.0.2.7')
    """
    try:
        found = IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    return str(found.ipv4_mapped or IPv6Network((int(found), 64), strict=False))


class Crowd(Generic[K]):
    """Who knocks, in order of arrival, and whence; ``most`` at a time, and ``each`` from one address.

    >>> crowd = Crowd[int](most=3, each=2)
    >>> [crowd.came(i, at) for i, at in enumerate(["192.0.2.7"] * 3 + ["192.0.2.8"] * 2)]
    [None, None, 0, None, 1]
    """

    def __init__(self, most: int, each: int) -> None:
        self.most, self.each = most, each
        self._origins: dict[K, str] = {}

    def came(self, who: K, address: str) -> K | None:
        """Note somebody new; return who has to go for it, and is forgotten here."""
        self._origins.pop(who, None)
        self._origins[who] = origin = whence(address)
        crowds = Counter(self._origins.values())
        if crowds[origin] > self.each:
            return self._oldest(origin)
        return self.pop() if len(self._origins) > self.most else None

    def pop(self) -> K | None:
        """Forget the oldest of whoever has most here, and return it; None where nobody knocks."""
        crowds = Counter(self._origins.values())
        return self._oldest(crowds.most_common(1)[0][0]) if crowds else None

    def left(self, who: K) -> None:
        """Forget somebody who is let in, or gone."""
        self._origins.pop(who, None)

    def _oldest(self, origin: str) -> K:
        oldest = next(who for who, its in self._origins.items() if its == origin)
        del self._origins[oldest]
        return oldest


class Strangers:
    """The strangers at a ZeroMQ socket that listens at ``port``, as its monitor's ``EVENTS`` tell.

    Each has ``patience`` seconds. Connections are libzmq's own, which closes what is shut down here.
    """

    def __init__(self, patience: float, port: int) -> None:
        self._patience, self._port = patience, port
        self._crowd = Crowd[int](MOST, EACH)
        self._came: dict[int, tuple[SocketPlace, float]] = {}  # by descriptor, and when

    def __bool__(self) -> bool:
        return bool(self._came)

    def noticed(self, kind: int, value: int, now: float) -> None:
        """Take in an event of the socket's monitor, whose value is a descriptor, or why there is none."""
        if kind == zmq.Event.ACCEPTED:
            self._accepted(value, now)
        elif kind == zmq.Event.DISCONNECTED:
            self._forget(value)
        elif kind == zmq.Event.ACCEPT_FAILED:
            for _ in range(AT_ONCE):
                self._drop(self._crowd.pop())

    def heard(self, frame: zmq.Frame) -> None:
        """Note that whoever sent this is no stranger."""
        with suppress(zmq.ZMQError):  # who speaks ZMTP 1 has no such property
            self._forget(frame.get(zmq.SRCFD) if self._came else -1)

    def check(self, now: float, excused: bool) -> None:
        """Drop who has said nothing for too long; where ``excused``, this end could not have heard it."""
        for descriptor, (place, came) in list(self._came.items()):
            if excused:
                self._came[descriptor] = place, now
            elif now - came > self._patience:
                self._drop(descriptor)

    def _accepted(self, descriptor: int, now: float) -> None:
        place, address = tcp_info.place_of(descriptor), None
        with suppress(OSError), tcp_info.held(place) as sock:
            if sock is not None and sock.getsockname()[1] == self._port:
                address = sock.getpeername()[0]
        if place is not None and address is not None:  # else it is gone, the number maybe another's
            self._came[descriptor] = place, now
            self._drop(self._crowd.came(descriptor, str(address)))

    def _drop(self, descriptor: int | None) -> None:
        if descriptor is None:
            return
        place = self._forget(descriptor)
        with suppress(OSError), tcp_info.held(place) as sock:
            if sock is not None:
                sock.shutdown(socket.SHUT_RDWR)

    def _forget(self, descriptor: int) -> SocketPlace | None:
        self._crowd.left(descriptor)
        return self._came.pop(descriptor, (None, 0.0))[0]
