"""A link over ZeroMQ: one TCP connection for a pair of ranks, which reconnects by itself.

One side binds (ROUTER), the other connects (DEALER) under a name that both know; what comes to the binder's
port under another name is dropped unread. A message may be lost when the connection breaks: ``Reliable``
repairs that.
"""

from __future__ import annotations

from concurrent.futures import Future

import zmq

from thinwire.links.address import check_port
from thinwire.links.base import Data, LinkEstimate
from thinwire.links.pair.pump import Pump
from thinwire.links.security import check_host, secure_connector
from thinwire.links.sockets import endpoint, listen, open_socket
from thinwire.links.tcp import congestion
from thinwire.types import InputError, LinkError

MAX_MESSAGE = 1 << 26  # bytes
HIGH_WATER = 256  # messages that libzmq queues; more wait in this process


class ZmqLink:
    """Messages to one peer over TCP; made by ``bind`` or ``connect``.

    A send is done when ZeroMQ has taken the message. Without a token any process of this machine that knows
    the name can connect; with one, only the holder of the token can, and messages are encrypted.
    """

    def __init__(self, pump: Pump, host: str, port: int, secure: bool, max_message: int, binds: bool) -> None:
        self._pump = pump
        self.binds = binds  # the port is this end's own
        self.host, self.port, self.secure, self.max_message = host, port, secure, max_message

    @classmethod
    def bind(
        cls,
        name: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        token: bytes | None = None,
        peer: str = "peer",
        via: str | None = None,
        connect_timeout: float = 60.0,
        max_message: int = MAX_MESSAGE,
        control: str = congestion.AUTO,
        handover: bool = True,
    ) -> ZmqLink:
        """Listen at ``host`` for the one peer that calls itself ``name``; port 0 takes a free one.

        ``via``: what errors say in place of the address, where that leads to a tunnel. ``control``: TCP's
        congestion control (``congestion``). ``handover``: whoever comes later under that name takes the link
        over, as a peer does whose old connection died; without it they are not heard, until they dial again
        once the first is gone.

        Errors: ``InputError`` for an address off loopback without a token, or one that cannot be bound; the
        link fails with ``LinkError`` when nobody came within ``connect_timeout`` seconds, ``AuthError`` when
        only holders of a wrong token did.
        """
        check_host(host, token)
        check_port(port)
        chosen = congestion.resolve(control)
        sock = open_socket(zmq.ROUTER, host, max_message, HIGH_WATER)
        zap, port = listen(sock, host, port, token, chosen, handover)
        who = f"{peer} ({via or f'{host}:{port}'})"
        pump = Pump(sock, name, who, zap=zap, token=token, connect_timeout=connect_timeout)
        return cls(pump, host, port, token is not None, max_message, binds=True)

    @classmethod
    def connect(
        cls,
        name: bytes,
        host: str,
        port: int,
        *,
        token: bytes | None = None,
        peer: str = "peer",
        via: str | None = None,
        connect_timeout: float = 60.0,
        max_message: int = MAX_MESSAGE,
        control: str = congestion.AUTO,
    ) -> ZmqLink:
        """Connect as ``name`` to a binder; returns at once, the connection is made in the background.

        Errors: ``InputError`` for an address off loopback without a token; the link fails with ``LinkError``
        when there is no connection within ``connect_timeout`` seconds, ``AuthError`` when the token is wrong.
        """
        check_host(host, token)
        check_port(port)
        chosen = congestion.resolve(control)
        sock = open_socket(zmq.DEALER, host, max_message, HIGH_WATER)
        sock.routing_id = name
        sock.reconnect_ivl, sock.reconnect_ivl_max = 100, 1000  # ms
        sock.connect_timeout = 3000  # ms
        if token is not None:
            secure_connector(sock, token)
        address = endpoint(host, port)
        who = f"{peer} ({via or f'{host}:{port}'})"
        try:
            pump = Pump(
                sock,
                name,
                who,
                endpoint=address,
                token=token,
                connect_timeout=connect_timeout,
                control=chosen,
            )
        except zmq.ZMQError as e:
            sock.context.destroy(linger=0)
            raise InputError(f"cannot connect to {host}:{port}: {e.strerror}; check the address") from e
        return cls(pump, host, port, token is not None, max_message, binds=False)

    @property
    def peer(self) -> str:
        return self._pump.peer

    @property
    def connected(self) -> bool:
        """Whether the peer was there at least once."""
        return self._pump.connected.is_set()

    def send(self, data: Data, label: str = "control") -> Future[None]:
        if len(data) > self.max_message:
            raise InputError(
                f"a message of {len(data)} bytes is over the link's limit of {self.max_message}; split it"
            )
        return self._pump.send(bytes(data))

    def recv(self) -> Future[bytes]:
        return self._pump.inbox.get()

    def estimate(self) -> LinkEstimate:
        return LinkEstimate()

    def redial(self) -> None:
        """Drop the connection and make a new one, where this end is the connecting one."""
        self._pump.redial()

    def fail(self, error: LinkError) -> None:
        """Give the link up: whoever waits or comes later gets ``error``."""
        self._pump.fail(error)

    def close(self, timeout: float = 5.0) -> None:
        self._pump.close(timeout)
