"""ZeroMQ sockets as every link here opens them, and the thread that owns one.

They are bounded, in a context of their own, and secured by the token. The thread polls, watches connections,
is woken and closes what it has.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from time import monotonic

import zmq
from zmq.utils.monitor import recv_monitor_message

from thinwire.links.address import parse_address, shown
from thinwire.links.metered import CURVE_OVERHEAD
from thinwire.links.names import LOOKUP, addresses, interface_names, needs_ipv6, reach, resolve
from thinwire.links.security import ZAP_ENDPOINT, answer_zap, is_loopback, secure_binder
from thinwire.links.strangers import EVENTS, Strangers
from thinwire.links.tcp import congestion
from thinwire.types import InputError, LinkError, require

_IN, _OUT = int(zmq.POLLIN), int(zmq.POLLOUT)  # numbers: the names' own are joined in Python each time
_Event = zmq.Event
DIALS = (_Event.CONNECTED, _Event.CONNECT_DELAYED, _Event.CONNECT_RETRIED)
REFUSED = (_Event.HANDSHAKE_FAILED_AUTH, _Event.HANDSHAKE_FAILED_PROTOCOL, _Event.HANDSHAKE_FAILED_NO_DETAIL)
WATCHED = _Event.HANDSHAKE_SUCCEEDED | _Event.DISCONNECTED  # what a connecting end is told of
for _e in (*DIALS, *REFUSED):
    WATCHED |= _e

PROBES = 8, 4, 3  # seconds of an idle connection, seconds between two questions, how many stay unanswered
STALL = 120.0  # seconds without room at the other end, or without an answer from it, until TCP gives it up
HANDSHAKE = 10.0  # seconds for a connection to prove itself; until then a stranger's holds a descriptor
REACH = 3.0  # seconds for one of several addresses to answer
DESCRIPTORS = 1 << 13  # that this process may have once it listens, where the system allows so many
BURST = 64  # messages moved in one turn, so that neither direction starves the other
IDLE = 250  # milliseconds, at most, between two looks at the time
CONNECT = 3.0  # seconds that one attempt to connect may take
REDIAL = 1.0  # seconds without a new attempt after which a connector dials afresh
REFUSALS = 5  # handshakes that break off before a connector blames the token: one may be a cut connection
MISMATCH = 0x11000002  # ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: one end has a token, the other has none


def open_socket(kind: int, max_message: int, queued: int) -> zmq.Socket[bytes]:
    """Return a socket that takes frames of at most ``max_message`` bytes and queues ``queued`` messages."""
    sock = zmq.Context().socket(kind)  # a context each: ZAP and shutdown stay this link's own matter
    sock.linger = 0
    # a larger frame breaks the connection before memory is taken for it
    sock.maxmsgsize = max_message + CURVE_OVERHEAD
    sock.sndhwm = sock.rcvhwm = queued
    sock.setsockopt(zmq.TCP_MAXRT, int(STALL * 1000))  # long: a peer that reads slowly, or not now, lives
    sock.setsockopt(zmq.TCP_KEEPALIVE, 1)
    for option, value in zip(
        (zmq.TCP_KEEPALIVE_IDLE, zmq.TCP_KEEPALIVE_INTVL, zmq.TCP_KEEPALIVE_CNT), PROBES, strict=True
    ):
        sock.setsockopt(option, value)
    return sock


def listen(
    sock: zmq.Socket[bytes],
    host: str,
    port: int,
    token: bytes | None,
    control: str | None = None,
    handover: bool = True,
) -> tuple[zmq.Socket[bytes] | None, int]:
    """Bind a ROUTER; return the socket that ZeroMQ asks about tokens, if there is one, and the port.

    Port 0 takes a free one; ``control`` is TCP's congestion control, from ``congestion.resolve``; with
    ``handover`` a new connection under a name replaces the old, maybe dead one. This process's soft limit on
    descriptors is raised, at most to the hard one. Errors: ``InputError`` where the address cannot be bound.
    """
    make_room()
    sock.handshake_ivl = int(HANDSHAKE * 1000)  # a rank that dials, maybe through a relay, has libzmq's 30 s
    sock.router_mandatory = True  # a peer that is unknown, or whose queue is full, is an error to us
    sock.router_handover = handover
    zap = None
    if token is not None:
        zap = sock.context.socket(zmq.REP)
        zap.bind(ZAP_ENDPOINT)
        secure_binder(sock, token)
    try:
        own = _own_address(host)
        sock.ipv6 = ":" in own
        sock.bind(endpoint(own, port or "*"))
    except (zmq.ZMQError, InputError) as e:
        sock.context.destroy(linger=0)
        if isinstance(e, InputError):
            raise
        why = zmq.strerror(e.errno or 0)  # the error's own text has ZeroMQ's name of the address in it
        raise InputError(f"cannot listen at {shown(host, port)}: {why}; choose another host or port") from e
    port = port_of(sock)
    congestion.at_port(port, control)
    return zap, port


def _own_address(host: str) -> str:
    """Return what ZeroMQ can listen at: it looks up no names there, but knows those of interfaces."""
    if ":" in host or host in interface_names():
        return host
    infos = resolve(host)
    if not infos:
        return host  # of which ZeroMQ says what is wrong
    found = infos[0][4][0]
    here = is_loopback(found) and not is_loopback(host)  # as Debian has it of a machine's own name
    require(not here, InputError, f"{host} is {found} here, where no other machine comes; give an address")
    return found


def port_of(sock: zmq.Socket[bytes]) -> int:
    """Return the port at which a socket listens."""
    return int(sock.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


def dialled_at(sock: zmq.Socket[bytes], host: str) -> str:
    """Return what others dial where a socket listens at ``host``: an interface's name is no address."""
    if host not in interface_names():
        return host
    return parse_address(sock.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://"))[0]


def make_room() -> None:
    """Let this process have many descriptors: strangers at a port hold some until they are dropped."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # Windows has no such limit
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def dial(sock: zmq.Socket[bytes], address: str, reaching: bool = True) -> bool:
    """Let a DEALER connect to ``address``; return whether libzmq can go on with that alone.

    libzmq looks a name up for each attempt, but for one kind of address, and takes the first. So while a name
    is not known, or has several addresses, who dials must do so anew now and then; of several, the one that
    answers is dialled, and none where not ``reaching``.
    """
    host, port = parse_address(address.removeprefix("tcp://"))
    infos = addresses(host, port or 0, LOOKUP)
    if len(infos) > 1:
        with contextlib.suppress(OSError):
            if reaching:
                with reach(host, port or 0, REACH) as found:
                    at = str(found.getpeername()[0])
                sock.ipv6 = ":" in at
                sock.connect(endpoint(at, port or 0))
        return False
    sock.ipv6 = needs_ipv6(infos)
    sock.connect(address)
    return bool(infos)


def dial_again(sock: zmq.Socket[bytes], address: str) -> bool:
    """Give a DEALER a fresh connection to ``address``; return as ``dial``."""
    for old in (sock.getsockopt_string(zmq.LAST_ENDPOINT), address):
        with contextlib.suppress(zmq.ZMQError):  # libzmq has given the endpoint up already
            sock.disconnect(old)
    return dial(sock, address)


class Bell:
    """Wakes a thread that polls: it watches ``fileno`` and calls ``answer``, others ``ring``."""

    def __init__(self) -> None:
        self._rope, self._clapper = socket.socketpair()
        self._rope.setblocking(False)
        self._clapper.setblocking(False)

    def fileno(self) -> int:
        return self._clapper.fileno()

    def ring(self) -> None:
        """Wake the thread, from any other."""
        with contextlib.suppress(OSError):  # full: it is awake anyway; closed: it is gone
            self._rope.send(b"r")

    def answer(self) -> None:
        """Be ready to be rung again."""
        self._clapper.recv(4096)

    def close(self) -> None:
        """Ring no more."""
        self._rope.close()
        self._clapper.close()


def endpoint(host: str, port: int | str) -> str:
    """Return the address in ZeroMQ's notation.

    >>> endpoint("::1", 5000)
    'tcp://[::1]:5000'
    """
    return f"tcp://[{host.strip('[]')}]:{port}" if ":" in host else f"tcp://{host}:{port}"


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
        awaited = (_IN if self._reads() else 0) | (_OUT if self._stuck() else 0)
        poller.register(self._sock, awaited)
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
        if ready.get(self._sock, 0) & _IN:
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

    def _stuck(self) -> bool:
        """Return whether something waits for room in the socket, which says when there is some."""
        return False

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
