"""The thread that owns the ZeroMQ sockets of one link: moves messages, watches connections, answers ZAP."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from time import monotonic

import zmq
from zmq.utils.monitor import recv_monitor_message

from thinwire.links.address import parse_address
from thinwire.links.greeting import asks_for_token
from thinwire.links.inbox import Inbox, failed, pending, renewed
from thinwire.links.security import REMEDY, answer_zap
from thinwire.links.sockets import DIALS, REFUSED, WATCHED, Bell, dial, dial_again
from thinwire.links.tcp import congestion
from thinwire.types import AuthError, LinkError

REFUSALS = (
    5  # handshakes that must break off before a connector blames the token: one may be a cut connection
)
REDIAL = 1.0  # seconds without a new attempt after which a connector dials afresh
BURST = 64  # messages moved in one turn, so that neither direction starves the other
BLOCKED = 2  # milliseconds before a message that found no room is offered again
MECHANISM_MISMATCH = (
    0x11000002  # one end has a token, the other has none (ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
)

_Event = zmq.Event


class Pump:
    """Owns a bound ROUTER (``endpoint`` is None; the peer calls itself ``name``) or a connecting DEALER.

    The socket's context belongs to the pump too; ``close`` ends both. ``control``: the congestion control of
    the connections that it makes (``congestion``).
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
        self.peer, self.inbox = peer, Inbox()
        self._sock, self._name, self._endpoint, self._zap, self._token = sock, name, endpoint, zap, token
        self._monitor = sock.get_monitor_socket(WATCHED)
        # after the monitor, which would miss the first handshake otherwise
        self._known = endpoint is None or dial(sock, endpoint)  # the host has an address
        self._address = [name] if endpoint is None else []  # a ROUTER's first frame; it stays off the wire
        self._lock = threading.Lock()
        self._outbox: deque[tuple[bytes, Future[None]]] = deque()
        self.error: LinkError | None = None
        self.refused = 0  # handshakes that failed
        self._about_token = token is not None and endpoint is not None  # whether a token is the likely reason
        self.connected = threading.Event()
        self._patience = connect_timeout
        self._give_up = monotonic() + connect_timeout
        self._redial_at: float | None = None
        self._redial_now = False
        self._linger: float | None = None  # set by close: when to stop flushing
        self._control = control
        self._host, self._port = parse_address((endpoint or "").removeprefix("tcp://"))
        self._bell = Bell()
        self._thread = threading.Thread(target=self._run, name=f"link to {peer}", daemon=True)
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

    def close(self, timeout: float) -> None:
        """Flush for at most ``timeout`` seconds, close the sockets and end the thread."""
        with self._lock:
            self._linger = self._linger or monotonic() + timeout
        self._bell.ring()
        self._thread.join(timeout + 10.0)

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            for source in (self._sock, self._monitor, self._zap, self._bell.fileno()):
                if source is not None:
                    poller.register(source, zmq.POLLIN)
            while self._turn(poller):
                pass
        except zmq.ZMQError as e:
            self._fail(LinkError(f"the link to {self.peer} failed: {e.strerror}"))
        except Exception as e:  # told to whoever waits, who would else hear that this end closed it
            self._fail(LinkError(f"the link to {self.peer} failed: {type(e).__name__}: {e}"))
            raise
        finally:
            self._fail(LinkError(f"this end closed the link to {self.peer}"))
            self._shut()

    def _turn(self, poller: zmq.Poller) -> bool:
        ready = dict(poller.poll(self._pause()))
        if self._bell.fileno() in ready:
            self._bell.answer()
        if self._monitor in ready:
            self._watch()
        if self._zap is not None and self._zap in ready and self._token is not None:
            answer_zap(self._zap, self._token)
        if self._sock in ready:
            self._receive()
        self._check_connection()  # before what was sent after a redial
        self._flush()
        return self.error is None and not (self._linger and (not self._outbox or monotonic() > self._linger))

    def _pause(self) -> int:
        if not self._outbox:
            return 250
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
            except (zmq.Again, zmq.ZMQError) as e:
                if isinstance(e, zmq.Again) or e.errno == zmq.EHOSTUNREACH:
                    return  # no room, or the peer is not connected now
                raise
            with self._lock:
                self._outbox.popleft()
            future.set_result(None)

    def _watch(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            kind, value = event["event"], event["value"]
            if kind in DIALS:
                if kind == _Event.CONNECTED:
                    self._redial_at = None
                elif self._known or self._redial_at is None:
                    self._redial_at = monotonic() + REDIAL + 3.0
                if kind == _Event.CONNECTED and self._port:  # the value is the connection's descriptor
                    congestion.at_descriptor(value, self._port, self._control)
            elif kind == _Event.HANDSHAKE_SUCCEEDED and self._endpoint is not None:
                self.connected.set()
            elif kind in REFUSED:
                self._refuse(kind, value)
            if kind == _Event.DISCONNECTED or kind in REFUSED:
                self._redial_at = monotonic() + REDIAL

    def _refuse(self, kind: int, value: int) -> None:
        self.refused += 1
        mismatch = kind == _Event.HANDSHAKE_FAILED_PROTOCOL and value == MECHANISM_MISMATCH
        # who just connects to a binder and closes, as port scans and health checks do, has shown no token
        shown = self._token is not None and kind != _Event.HANDSHAKE_FAILED_NO_DETAIL
        self._about_token = self._about_token or mismatch or shown
        if self._endpoint is None or self.connected.is_set():
            return  # a binder must not die because a stranger knocks
        certain = kind == _Event.HANDSHAKE_FAILED_AUTH or mismatch
        if self._token and not certain and not self._greets():
            self.refused = 0
        if certain or (self._token and self.refused >= REFUSALS):
            self._fail(
                AuthError(f"{self.peer} refused this rank's token: {REMEDY} to the same text on each rank")
            )

    def _greets(self) -> bool:
        """Return whether the peer is there, or just something on the way that accepts and breaks off."""
        return asks_for_token(self._host, self._port or 0)

    def _check_connection(self) -> None:
        now = monotonic()
        if self._endpoint is not None and (self._redial_now or (self._redial_at and now > self._redial_at)):
            self._dial()
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

    def _dial(self) -> None:
        self._redial_now, self._redial_at = False, monotonic() + REDIAL
        if self._endpoint is not None:
            self._known = dial_again(self._sock, self._endpoint)

    def _fail(self, error: LinkError) -> None:
        with self._lock:
            self.error = self.error or error
            outbox, self._outbox = self._outbox, deque()
        for _, future in outbox:
            future.set_exception(renewed(self.error))
        self.inbox.fail(self.error)

    def _shut(self) -> None:
        flush = self._linger is not None and self.connected.is_set()
        linger = max(0.0, (self._linger or 0.0) - monotonic()) if flush else 0.0
        self._sock.disable_monitor()
        for sock in (self._monitor, self._zap):
            if sock is not None:
                sock.close(linger=0)
        context = self._sock.context
        self._sock.close(linger=int(linger * 1000))
        context.term()
        self._bell.close()
