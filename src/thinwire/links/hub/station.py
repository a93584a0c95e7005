"""What hub and spoke share: the thread that owns a socket, its events, its way of being woken and closed."""

from __future__ import annotations

import struct
import threading
from time import monotonic
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from thinwire.links.hub.events import Event, Events
from thinwire.links.inbox import ASLEEP
from thinwire.links.sockets import Bell, open_socket
from thinwire.types import InputError, LinkError, require

HEARTBEAT = 1.0  # seconds between two pings of a spoke, at most
BEATS = 4  # pings within the silence after which an end counts as lost, at least
SILENCE = 10.0  # seconds without a sign of life after which the other end counts as lost
QUEUED = 256  # small messages that libzmq queues for one peer
LARGE = 16  # and large ones: of these a few fill the line, and libzmq counts messages, not bytes
BURST = 64  # messages moved in one turn, so that neither direction starves the other
IDLE = 250  # milliseconds, at most, between two looks at the time
BLOCKED = 10  # milliseconds before a message that found no room is offered again
IDENTITY = 16  # bytes of a spoke's name
PING, PONG, DATA, BYE, ALIVE = range(5)  # a message's first byte
STAMP = struct.Struct("<Bd")  # a ping: the spoke's clock, which only the spoke reads
ANSWER = struct.Struct("<Bdd")  # a pong: that again, and the hub's clock
DATA_BYTE, BYE_BYTE, ALIVE_BYTE = bytes([DATA]), bytes([BYE]), bytes([ALIVE])


class Station:
    """A socket, the thread that owns it, and what it reports; the base of ``Hub`` and ``Spoke``."""

    def __init__(self, sock: zmq.Socket[bytes], watched: int, where: str, silence: float) -> None:
        self._sock, self._where, self._silence = sock, where, silence
        self._heartbeat = min(HEARTBEAT, silence / BEATS)  # seconds
        self._idle = min(IDLE, max(1, int(1000 * self._heartbeat / 2)))  # milliseconds
        self._bell = Bell()
        self._events = Events(relieved=self._bell.ring)
        self._lock = threading.Lock()
        self._monitor = sock.get_monitor_socket(watched)
        self._error: LinkError | None = None
        self._turned = monotonic()  # when the thread checked the time last
        self._linger: float | None = None  # set by close: when to stop flushing
        self._thread = threading.Thread(target=self._run, name=where, daemon=True)

    def recv(self, timeout: float) -> Event | None:
        """Return the next event; None after ``timeout`` seconds, or at once after ``wake``.

        Errors: ``LinkError`` once the socket is closed or has failed.
        """
        return self._events.get(timeout)

    def wake(self) -> None:
        """Let whoever waits in ``recv`` return, from any thread."""
        self._events.wake()

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
            extra = [s for s in (self._monitor, self._zap(), self._bell.fileno()) if s is not None]
            busy, reading = zmq.Poller(), zmq.Poller()
            for poller, sources in ((busy, extra), (reading, [self._sock, *extra])):
                for source in sources:
                    poller.register(source, zmq.POLLIN)
            while self._turn(busy if self._events.full else reading):
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
        ready: dict[Any, int] = dict(poller.poll(BLOCKED if self._waiting() else self._idle))
        if self._bell.fileno() in ready:
            self._bell.answer()
        if self._monitor in ready:
            while self._monitor.poll(0):
                event = recv_monitor_message(self._monitor)
                self._noticed(event["event"], event["value"])
        self._answer(ready)
        if self._sock in ready:
            self._receive()
        self._flush()
        now = monotonic()
        # this end did not read, or its process was stopped: no silence of the other's
        excused, self._turned = self._events.full or now - self._turned > ASLEEP, now
        self._check(now, excused)
        closing = self._linger is not None and (not self._waiting() or monotonic() > self._linger)
        return self._error is None and not closing

    def _fail(self, error: LinkError) -> None:
        self._error = self._error or error
        self._events.fail(self._error)

    def _shut(self) -> None:
        self._sock.disable_monitor()
        self._monitor.close(linger=0)
        zap = self._zap()
        if zap is not None:
            zap.close(linger=0)
        left = max(0.1, (self._linger or 0.0) - monotonic())
        context = self._sock.context
        self._sock.close(linger=int(left * 1000))
        context.term()
        self._bell.close()

    # what differs between the two

    def _zap(self) -> zmq.Socket[bytes] | None:
        return None

    def _answer(self, ready: dict[Any, int]) -> None:
        return

    def _waiting(self) -> bool:
        """Return whether messages are queued here."""
        raise NotImplementedError

    def _noticed(self, kind: int, value: int) -> None:
        raise NotImplementedError

    def _receive(self) -> None:
        raise NotImplementedError

    def _flush(self) -> None:
        raise NotImplementedError

    def _check(self, now: float, excused: bool) -> None:
        """Find out who fell silent; where ``excused``, this end could not have heard them."""
        raise NotImplementedError

    def _farewell(self) -> None:
        raise NotImplementedError


def station_socket(
    kind: int, max_message: int, sends: int = QUEUED, takes: int = QUEUED
) -> zmq.Socket[bytes]:
    """Return a socket that takes messages of at most ``max_message`` bytes, besides their kind.

    ``sends`` and ``takes``: how many of them libzmq queues for a peer, and from one.
    """
    sock = open_socket(kind, max_message + 1, sends)
    sock.rcvhwm = takes
    sock.handshake_ivl = int(SILENCE * 1000)
    return sock


def check_silence(silence: float) -> None:
    """Raise ``InputError`` unless so many seconds without a sign of life can be told from none."""
    require(silence > 0, InputError, f"silence={silence} s is not above 0; an end would be lost at once")
