"""The thread that owns one ZeroMQ socket: it polls, watches connections, is woken and closes what it has."""

from __future__ import annotations

import threading
from time import monotonic

import zmq
from zmq.utils.monitor import recv_monitor_message

from thinwire.links.security import answer_zap
from thinwire.links.sockets import DIALS, HANDSHAKE, REFUSED, Bell, dial, dial_again, port_of
from thinwire.links.strangers import EVENTS, Strangers
from thinwire.types import LinkError

BURST = 64  # messages moved in one turn, so that neither direction starves the other
IDLE = 250  # milliseconds, at most, between two looks at the time
CONNECT = 3.0  # seconds that one attempt to connect may take
REDIAL = 1.0  # seconds without a new attempt after which a connector dials afresh
REFUSALS = 5  # handshakes that break off before a connector blames the token: one may be a cut connection
MISMATCH = 0x11000002  # ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: one end has a token, the other has none


class PolledSocket:
    """A socket and its thread; the base of ``ZmqLink``, ``Hub`` and ``Spoke``, which start it.

    ``watched``: events of the socket that ``_noticed`` is told of. ``where``: what errors call it.
    ``endpoint``: to connect to. ``zap``: what ZeroMQ asks about ``token``. The socket's context belongs to
    the thread too; ``close`` ends both.
    """

    def __init__(
        self,
        sock: zmq.Socket[bytes],
        watched: int,
        where: str,
        *,
        endpoint: str | None = None,
        zap: zmq.Socket[bytes] | None = None,
        token: bytes | None = None,
    ) -> None:
        self._sock, self._where, self._endpoint, self._zap, self._token = sock, where, endpoint, zap, token
        listens = endpoint is None
        self._strangers = Strangers(HANDSHAKE, port_of(sock) if listens else 0)
        self._monitor = sock.get_monitor_socket(watched | EVENTS if listens else watched)
        # after the monitor, which would miss the first handshake otherwise
        self._resolved = endpoint is None or dial(sock, endpoint, False)  # libzmq dials again by itself
        self._bell = Bell()
        self._lock = threading.Lock()
        self.error: LinkError | None = None
        # libzmq does not dial again after every kind of failure
        self._redial_at: float | None = None if self._resolved else monotonic()
        self._linger: float | None = None  # set by close: when to stop flushing
        self._thread = threading.Thread(target=self._run, name=where, daemon=True)

    def close(self, timeout: float = 2.0) -> None:
        """Send what is queued for at most ``timeout`` seconds, then end the thread. Safe to call twice."""
        with self._lock:
            self._linger = self._linger or monotonic() + timeout
        self._bell.ring()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout + 10.0)

    # the thread

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            for source in (self._monitor, self._zap, self._bell.fileno()):
                if source is not None:
                    poller.register(source, zmq.POLLIN)
            while self._turn(poller):
                pass
            self._farewell()
        except zmq.ZMQError as e:
            self._fail(LinkError(f"{self._where} failed: {e.strerror}"))
        except Exception as e:  # told to whoever waits, who would else hear that this end closed it
            self._fail(LinkError(f"{self._where} failed: {type(e).__name__}: {e}"))
            raise
        finally:
            self._fail(LinkError(f"this end closed {self._where}"))
            self._shut()

    def _turn(self, poller: zmq.Poller) -> bool:
        poller.register(self._sock, zmq.POLLIN if self._reads() else 0)
        ready = dict(poller.poll(self._pause()))
        if self._bell.fileno() in ready:
            self._bell.answer()
        while self._monitor in ready and self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            if self._endpoint is None:
                self._strangers.noticed(event["event"], event["value"], monotonic())
            self._noticed(event["event"], event["value"])
        if self._zap is not None and self._zap in ready and self._token is not None:
            answer_zap(self._zap, self._token)
        if self._sock in ready:
            self._receive()
        if self._strangers:
            self._strangers.check(monotonic(), not self._reads())
        self._check()  # before what was sent after a redial
        self._flush()
        closing = self._linger is not None and (not self._waiting() or monotonic() > self._linger)
        return self.error is None and not closing

    def _plan_redial(self, kind: int, now: float) -> None:
        """Note from an event of a connector when it has to dial afresh."""
        if kind == zmq.Event.CONNECTED:
            self._redial_at = None
        elif kind in DIALS:
            if self._resolved or self._redial_at is None:
                self._redial_at = now + REDIAL + CONNECT
        elif kind == zmq.Event.DISCONNECTED or kind in REFUSED:
            self._redial_at = now + REDIAL

    def _redial(self, now: float) -> None:
        self._redial_at = now + REDIAL
        if self._endpoint is not None:
            self._resolved = dial_again(self._sock, self._endpoint)

    def _fail(self, error: LinkError) -> None:
        """Let the thread end with ``error``, and tell whoever waits; the first error stays."""
        raise NotImplementedError

    def _shut(self) -> None:
        self._sock.disable_monitor()
        for sock in (self._monitor, self._zap):
            if sock is not None:
                sock.close(linger=0)
        context, left = self._sock.context, (self._linger or 0.0) - monotonic()
        self._sock.close(linger=int(1000 * self._lingers(left)))
        context.term()
        self._bell.close()

    # what differs

    def _reads(self) -> bool:
        """Return whether there is room for what comes."""
        return True

    def _pause(self) -> int:
        """Return the milliseconds, at most, until the next turn."""
        raise NotImplementedError

    def _waiting(self) -> bool:
        """Return whether messages are queued here."""
        raise NotImplementedError

    def _noticed(self, kind: int, value: int) -> None:
        raise NotImplementedError

    def _receive(self) -> None:
        raise NotImplementedError

    def _check(self) -> None:
        """Look at the time: who fell silent, what has to be dialled."""
        raise NotImplementedError

    def _flush(self) -> None:
        raise NotImplementedError

    def _farewell(self) -> None:
        """Say the last words, where there was no error."""

    def _lingers(self, left: float) -> float:
        """Return the seconds for which ZeroMQ may go on sending, of those ``left``."""
        return max(0.1, left)


def is_certain(kind: int, value: int) -> bool:
    """Return whether a handshake failed because of the token, as the other end or ZeroMQ itself says."""
    mismatch = kind == zmq.Event.HANDSHAKE_FAILED_PROTOCOL and value == MISMATCH
    return mismatch or kind == zmq.Event.HANDSHAKE_FAILED_AUTH
