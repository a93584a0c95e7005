"""ZeroMQ sockets as every link here opens them: bounded, in a context of their own, secured by the token."""

from __future__ import annotations

import contextlib
import socket

import zmq

from thinwire.links.address import parse_address, shown
from thinwire.links.metered import CURVE_OVERHEAD
from thinwire.links.names import LOOKUP, addresses, interface_names, needs_ipv6, reach, resolve
from thinwire.links.security import ZAP_ENDPOINT, is_loopback, secure_binder
from thinwire.links.tcp import congestion
from thinwire.types import InputError, require

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


def open_socket(kind: int, max_message: int, queued: int) -> zmq.Socket[bytes]:
    """Return a socket that takes frames of at most ``max_message`` bytes and queues ``queued`` messages."""
    sock = zmq.Context().socket(kind)  # a context each: ZAP and shutdown stay this link's own matter
    sock.linger = 0
    # a larger frame breaks the connection before memory is taken for it
    sock.maxmsgsize = max_message + CURVE_OVERHEAD
    sock.sndhwm = queued
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
