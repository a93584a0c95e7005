"""The thread of one link between two ranks: moves messages, and finds out whether the peer will come."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from time import monotonic

import zmq

from thinwire.links.address import parse_address
from thinwire.links.greeting import asks_for_token
from thinwire.links.inbox import Inbox, failed, pending, renewed
from thinwire.links.polled import BURST, IDLE, REFUSALS, PolledSocket, is_certain
from thinwire.links.security import REMEDY
from thinwire.links.sockets import REFUSED, WATCHED
from thinwire.links.tcp import congestion
from thinwire.types import AuthError, LinkError

BLOCKED = 2  # milliseconds before a message that found no room is offered again

_Event = zmq.Event


class Pump(PolledSocket):
    """Owns a bound ROUTER (``endpoint`` is None; the peer calls itself ``name``) or a connecting DEALER.

    ``control``: the congestion control of the connections that it makes (``congestion``).
    """

    def __init__(
        self,
        sock: zmq.Socket[bytes],
        name: bytes,
        peer: str,
        *,
        endpoint: str | None = None,
        zap: zmq.Socket[bytes] | None = None,
        token: bytes | None = None,
        connect_timeout: float = 60.0,
        control: str | None = None,
    ) -> None:
        super().__init__(sock, WATCHED, f"the link to {peer}", endpoint=endpoint, zap=zap, token=token)
        self.peer, self.inbox = peer, Inbox()
        self._name = name
        self._outbox: deque[tuple[bytes, Future[None]]] = deque()
        self.refused = 0  # handshakes that failed
        self._about_token = token is not None and endpoint is not None  # whether a token is the likely reason
        self.connected = threading.Event()
        self._patience = connect_timeout
        self._give_up = monotonic() + connect_timeout
        self._redial_now = False
        self._control = control
        self._host, self._port = parse_address((endpoint or "").removeprefix("tcp://"))
        self._thread.start()

    def send(self, data: bytes) -> Future[None]:
        """Queue one message; the future is done when ZeroMQ has taken it."""
        future = pending()
        with self._lock:
            if self.error is not None:
                return failed(self.error)
            self._outbox.append((data, future))
            first = len(self._outbox) == 1
        if first:
            self._bell.ring()
        return future

    def redial(self) -> None:
        """Ask a connector for a fresh connection; a binder cannot and does nothing."""
        self._redial_now = True
        self._bell.ring()

    def fail(self, error: LinkError) -> None:
        """Let the thread end with ``error``."""
        with self._lock:
            self.error = self.error or error
        self._bell.ring()

    # the thread

    def _pause(self) -> int:
        if not self._outbox:
            return IDLE
        return BLOCKED if self.connected.is_set() else 10 * BLOCKED

    def _receive(self) -> None:
        for _ in range(BURST):
            try:
                frames = self._sock.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            if self._endpoint is None and (len(frames) != 2 or frames[0] != self._name):
                continue  # not our peer
            if self._endpoint is not None and len(frames) != 1:
                continue
            self.connected.set()
            self.inbox.put(frames[-1])

    def _flush(self) -> None:
        for _ in range(BURST):
            with self._lock:
                if not self._outbox:
                    return
                data, future = self._outbox[0]
            try:
                self._sock.send_multipart(
                    [self._name, data] if self._endpoint is None else [data], zmq.DONTWAIT
                )
            except zmq.ZMQError as e:
                if e.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                    return  # no room, or the peer is not connected now
                raise
            with self._lock:
                self._outbox.popleft()
            future.set_result(None)

    def _waiting(self) -> bool:
        return bool(self._outbox)

    def _noticed(self, kind: int, value: int) -> None:
        self._plan_redial(kind, monotonic())
        if kind == _Event.CONNECTED and self._port:  # the value is the connection's descriptor
            congestion.at_descriptor(value, self._port, self._control)
        elif kind == _Event.HANDSHAKE_SUCCEEDED and self._endpoint is not None:
            self.connected.set()
        elif kind in REFUSED:
            self._refuse(kind, value)

    def _refuse(self, kind: int, value: int) -> None:
        self.refused += 1
        certain = is_certain(kind, value)
        # who just connects to a binder and closes, as port scans and health checks do, has shown no token
        shown = self._token is not None and kind != _Event.HANDSHAKE_FAILED_NO_DETAIL
        self._about_token = self._about_token or certain or shown
        if self._endpoint is None or self.connected.is_set():
            return  # a binder must not die because a stranger knocks
        if self._token and not certain and not self._greets():
            self.refused = 0
        if certain or (self._token and self.refused >= REFUSALS):
            self._fail(
                AuthError(f"{self.peer} refused this rank's token: {REMEDY} to the same text on each rank")
            )

    def _greets(self) -> bool:
        """Return whether the peer is there, or just something on the way that accepts and breaks off."""
        return asks_for_token(self._host, self._port or 0)

    def _check(self) -> None:
        now = monotonic()
        if self._endpoint is not None and (self._redial_now or (self._redial_at and now > self._redial_at)):
            self._redial_now = False
            self._redial(now)
        if self.connected.is_set() or now < self._give_up:
            return
        if self.refused and self._about_token:
            self._fail(
                AuthError(
                    f"nobody with the right token connected as {self.peer} within {self._patience:g} s, and "
                    f"{self.refused} connections were refused: {REMEDY}, the same on each rank"
                )
            )
        text = f"{self.peer} did not connect within {self._patience:g} s"
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
        self.inbox.fail(self.error)

    def _lingers(self, left: float) -> float:
        return max(0.0, left) if self._linger is not None and self.connected.is_set() else 0.0
