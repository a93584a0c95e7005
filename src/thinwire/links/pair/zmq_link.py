"""A link over ZeroMQ: one TCP connection for a pair of ranks, which reconnects by itself.

One side binds (ROUTER), the other connects (DEALER) under a name that both know; what comes to the binder's
port under another name is dropped unread. A message may be lost when the connection breaks: ``Reliable``
repairs that.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from time import monotonic
from typing import Any, Self

import zmq

from thinwire.links.address import check_port, shown
from thinwire.links.inbox import Inbox, failed, pending, renewed
from thinwire.links.link import LinkEstimate
from thinwire.links.message import Data, Message, Parts, buffers_of
from thinwire.links.names import tried
from thinwire.links.security import REMEDY, asks_for_token, check_host, secure_connector
from thinwire.links.sockets import (
    BURST,
    CONNECT,
    IDLE,
    REFUSALS,
    REFUSED,
    WATCHED,
    PolledSocket,
    endpoint,
    is_certain,
    listen,
    open_socket,
)
from thinwire.links.tcp import congestion
from thinwire.types import AuthError, InputError, LinkError

MAX_MESSAGE = 1 << 26  # bytes
HIGH_WATER = 8  # messages that libzmq queues each way: of large ones a few fill any line
UNREAD = 1 << 23  # bytes that nobody has asked for above which the rest stays with the sender
FRAMES = 2  # of a message, at most
BLOCKED = 2  # milliseconds before a message that found no room is offered again

# numbers, because the names' own are joined in Python each time
_NOW, _MORE = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)
_Event = zmq.Event


class ZmqLink(PolledSocket):
    """Messages to one peer over TCP; made by ``bind`` or ``connect``.

    A send is done when ZeroMQ has taken the message. Without a token any process of this machine that knows
    the name can connect; with one, only the holder of the token can, and messages are encrypted.
    """

    def __init__(
        self,
        sock: zmq.Socket[bytes],
        name: bytes,
        peer: str,
        at: tuple[str, int],
        token: bytes | None,
        connect_timeout: float,
        max_message: int,
        control: str | None = None,
        **more: Any,
    ) -> None:
        super().__init__(sock, WATCHED, f"the link to {peer}", token=token, **more)
        self.peer, self.secure, self.max_message = peer, token is not None, max_message
        self.host, self.port = at
        self.binds = self._endpoint is None  # the port is this end's own
        self.connected = False  # whether the peer was there at least once
        self.refused = 0  # handshakes that failed
        self._name, self._inbox = name, Inbox()
        self._outbox: deque[tuple[tuple[Data, ...], Future[None]]] = deque()
        self._full = False  # whether the socket had no room for the first of them
        self._about_token = self.secure and not self.binds  # whether a token is the likely reason
        self._patience, self._give_up = connect_timeout, monotonic() + connect_timeout
        self._redial_now = False
        self._control = control  # of the connections that it makes
        self._thread.start()

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
    ) -> Self:
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
        sock = open_socket(zmq.ROUTER, max_message, HIGH_WATER)
        zap, port = listen(sock, host, port, token, chosen, handover)
        who = f"{peer} ({via or shown(host, port)})"
        return cls(sock, name, who, (host, port), token, connect_timeout, max_message, zap=zap)

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
    ) -> Self:
        """Connect as ``name`` to a binder; returns at once, the connection is made in the background.

        Errors: ``InputError`` for an address off loopback without a token; the link fails with ``LinkError``
        when there is no connection within ``connect_timeout`` seconds, ``AuthError`` when the token is wrong.
        """
        check_host(host, token)
        check_port(port)
        chosen = congestion.resolve(control)
        sock = open_socket(zmq.DEALER, max_message, HIGH_WATER)
        sock.routing_id = name
        sock.reconnect_ivl, sock.reconnect_ivl_max = 100, 1000  # ms
        sock.connect_timeout = int(CONNECT * 1000)
        if token is not None:
            secure_connector(sock, token)
        who, limits = f"{peer} ({via or shown(host, port)})", (connect_timeout, max_message)
        try:
            return cls(sock, name, who, (host, port), token, *limits, chosen, endpoint=endpoint(host, port))
        except zmq.ZMQError as e:
            sock.context.destroy(linger=0)
            raise InputError(f"cannot connect to {shown(host, port)}: {e.strerror}; check the address") from e

    def send(self, data: Message, label: str = "control") -> Future[None]:
        frames = buffers_of(data)
        largest = max(map(len, frames))
        if largest > self.max_message:
            raise InputError(
                f"a message of {largest} bytes is over the link's limit of {self.max_message}; split it"
            )
        future = pending()
        with self._lock:
            if self.error is not None:
                return failed(self.error)
            self._outbox.append((frames, future))
            first = len(self._outbox) == 1
        if first and threading.current_thread() is not self._thread:
            self._bell.ring()
        return future

    def recv(self) -> Future[Message]:
        with self._room():
            return self._inbox.get()

    def more(self) -> deque[Message]:
        with self._room():
            return self._inbox.more()

    def estimate(self) -> LinkEstimate:
        return LinkEstimate()

    def redial(self) -> None:
        """Drop the connection and make a new one, where this end is the connecting one."""
        self._redial_now = True
        self._bell.ring()

    def fail(self, error: LinkError) -> None:
        """Give the link up: whoever waits or comes later gets ``error``."""
        with self._lock:
            self.error = self.error or error
        self._bell.ring()

    def close(self, timeout: float = 5.0) -> None:
        super().close(timeout)

    @contextmanager
    def _room(self) -> Iterator[None]:
        """Let the thread read on where what happens meanwhile makes room."""
        full = not self._reads()
        yield
        if full and self._reads():
            self._bell.ring()

    # the thread

    def _reads(self) -> bool:
        return self._inbox.nbytes < UNREAD

    def _pause(self) -> int:
        if not self._outbox or self._full:
            return IDLE
        return BLOCKED if self.connected else 10 * BLOCKED

    def _receive(self) -> None:
        for _ in range(BURST):
            if not self._reads():
                return
            try:
                frames = [self._sock.recv(_NOW, copy=False)]
            except zmq.Again:
                return
            while frames[-1].more:
                frames.append(self._sock.recv(_NOW, copy=False))
            if self.binds and frames.pop(0).bytes != self._name:
                continue  # not our peer
            if not 1 <= len(frames) <= FRAMES:
                continue  # nor one of its messages
            self._strangers.heard(frames[-1])
            self.connected = True
            whole = len(frames) == 1
            self._inbox.put(frames[0].bytes if whole else Parts(*(frame.buffer for frame in frames)))

    def _flush(self) -> None:
        for _ in range(BURST):
            with self._lock:
                if not self._outbox:
                    return
                frames, future = self._outbox[0]
            try:
                # what lies in one frame was copied to it: once more costs less than pyzmq's own thread
                *heads, last = (self._name, *frames) if self.binds else frames
                for head in heads:
                    self._sock.send(head, _MORE)
                self._sock.send(last, _NOW, copy=len(frames) == 1)
            except zmq.ZMQError as e:
                if e.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):  # no room, or the peer is not connected now
                    # a second refusal: the room was for somebody else, so this is asked again by time
                    self._full = e.errno == zmq.EAGAIN and not self._full
                    return
                raise
            self._full = False
            with self._lock:
                self._outbox.popleft()
            future.set_result(None)

    def _stuck(self) -> bool:
        return self._full

    def _waiting(self) -> bool:
        return bool(self._outbox)

    def _noticed(self, kind: int, value: int) -> None:
        self._plan_redial(kind, monotonic())
        if kind == _Event.CONNECTED:  # the value is the connection's descriptor
            congestion.at_descriptor(value, self.port, self._control)
        elif kind == _Event.HANDSHAKE_SUCCEEDED and not self.binds:
            self.connected = True
        elif kind in REFUSED:
            self._refuse(kind, value)

    def _refuse(self, kind: int, value: int) -> None:
        self.refused += 1
        certain = is_certain(kind, value)
        # who just connects to a binder and closes, as port scans and health checks do, has shown no token
        shown = self._token is not None and kind != _Event.HANDSHAKE_FAILED_NO_DETAIL
        self._about_token = self._about_token or certain or shown
        if self.binds or self.connected:
            return  # a binder must not die because a stranger knocks
        if self._token and not certain and not asks_for_token(self.host, self.port):
            self.refused = 0  # just something on the way that accepts and breaks off
        if certain or (self._token and self.refused >= REFUSALS):
            self._fail(
                AuthError(f"{self.peer} refused this rank's token: {REMEDY} to the same text on each rank")
            )

    def _check(self) -> None:
        now = monotonic()
        if not self.binds and (self._redial_now or (self._redial_at and now > self._redial_at)):
            self._redial_now = False
            self._redial(now)
        if self.connected or now < self._give_up:
            return
        if self.refused and self._about_token:
            self._fail(
                AuthError(
                    f"nobody with the right token connected as {self.peer} within {self._patience:g} s, and "
                    f"{self.refused} connections were refused: {REMEDY}, the same on each rank"
                )
            )
        text = f"{self.peer} did not connect within {self._patience:g} s"
        text += "" if self.binds else tried(self.host)
        if self.refused:
            there = f" without a token; if that was it, {REMEDY} there"
            why = there if self._token else f": {REMEDY} if the other ranks have one"
            text += f", and {self.refused} connections broke off{why}"
        self._fail(LinkError(text))

    def _fail(self, error: LinkError) -> None:
        with self._lock:
            self.error = self.error or error
            outbox, self._outbox = self._outbox, deque()
        for _, future in outbox:
            future.set_exception(renewed(self.error))
        self._inbox.fail(self.error)

    def _lingers(self, left: float) -> float:
        return max(0.0, left) if self._linger is not None and self.connected else 0.0
