"""Strangers at every kind of listener: few at a time, none for long, and no full table ends it."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from itertools import product
from pathlib import Path
from time import monotonic, sleep

import pytest
import zmq
from strangers import GREETING, READY
from waiting import HOST, LONG, until

from thinwire.links import ZmqLink
from thinwire.links.hub.spoke import Spoke
from thinwire.links.relay import handshake
from thinwire.links.relay.handshake import Request, Role, Verdict
from thinwire.links.strangers import Strangers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the table of descriptors is Linux's")
LEFT = 40  # descriptors, all listeners together
MANY = 120  # strangers at each
LISTENERS = """
import os, resource, sys
from thinwire.links import ZmqLink, sockets
from thinwire.links.hub.hub import Hub
from thinwire.links.relay import server
from relayed import Running
server.HANDSHAKE = float(sys.argv[2])
made = sockets.Strangers
sockets.Strangers = lambda _, port: made(float(sys.argv[2]), port)
hub, link, relay = Hub.bind(), ZmqLink.bind(b"name"), Running()
most = len(os.listdir("/proc/self/fd")) + int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
print(hub.port, link.port, relay.port, flush=True)
sys.stdin.readline()
print(len(os.listdir("/proc/self/fd")) - most, hub.error, link.error, flush=True)
os._exit(0)
"""


@pytest.fixture
def listeners() -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process with a hub, a link's listening end and a relay, which has few descriptors left."""
    shared = str(Path(__file__).parents[1] / "shared")
    code = f"import sys\nsys.path.insert(0, {shared!r})\n{LISTENERS}"
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", code, str(LEFT), "1.0"]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, [int(port) for port in process.stdout.readline().split()]
        finally:
            process.kill()


def _relay_answers(port: int) -> bool:
    """Return whether a relay takes a listener that has the token."""
    with suppress(OSError), socket.create_connection((HOST, port), 1.0) as far:
        key, hello = handshake.access_key(TOKEN), _take(far, handshake.HELLO)
        request = Request(Role.LISTEN, secrets.token_bytes(32), secrets.token_bytes(16))
        asking = handshake.ask(key, hello, secrets.token_bytes(32), request)
        far.sendall(asking)
        found = handshake.answered(key, hello, asking, _take(far, handshake.ANSWER))
        return found is not None and found.verdict is Verdict.WAITING
    return False


def _take(far: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        more = far.recv(nbytes - len(data))
        if not more:
            raise ConnectionResetError
        data += more
    return data


TOKEN = b"a shared secret, long and random"
SAID = (
    b"",
    b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    GREETING[:20],
    GREETING,
    GREETING + READY,
    b"\x11\x00" + b"s" * 16,
)


def test_strangers_fill_no_table_for_long_and_whoever_belongs_here_gets_in(
    listeners: tuple[subprocess.Popen[str], list[int]],
) -> None:
    process, ports = listeners
    with ExitStack() as stack:
        crowd = [stack.enter_context(closing(socket.socket())) for _ in range(MANY * len(ports))]
        for i, stranger in enumerate(crowd):
            stranger.setblocking(False)
            stranger.connect_ex((HOST, ports[i % len(ports)]))
        for i, stranger in enumerate(crowd):
            with suppress(OSError):  # some are dropped by now
                stranger.send(SAID[i // len(ports) % len(SAID)])
        hub, link, relay = ports
        spoke = stack.enter_context(closing(Spoke.connect(HOST, hub)))
        until(lambda: spoke.joined)
        peer = stack.enter_context(closing(ZmqLink.connect(b"name", HOST, link)))
        peer.send(b"hello").result(LONG)
        until(lambda: _relay_answers(relay))
        end = monotonic() + LONG
        while (gone := sum(map(_closed, crowd))) < len(crowd) and monotonic() < end:
            sleep(0.05)
        assert gone == len(crowd)
        for said, port in product(SAID[-3:], (hub, link)):  # whom libzmq would bear for ever, some of them
            silent = stack.enter_context(closing(socket.create_connection((HOST, port), LONG)))
            silent.sendall(said)
            silent.setblocking(False)
            until(lambda silent=silent: _closed(silent), timeout=5.0)
        assert spoke.joined and spoke.send(b"still here") and peer.error is None
        out, err = process.communicate("\n", LONG)
    left, *errors = out.split()
    assert (errors, err) == (["None", "None"], "") and int(left) < 0


def _closed(stranger: socket.socket) -> bool:
    try:
        while stranger.recv(1 << 12):
            pass
        return True
    except BlockingIOError:
        return False
    except OSError:
        return True


@pytest.mark.parametrize("kind", ["a pair of this process", "another's connection"])
def test_a_descriptor_that_is_another_sockets_by_now_is_no_stranger(kind: str) -> None:
    """A stranger that left at once may leave its number to whatever this process opens next."""
    with ExitStack() as stack:
        if kind == "a pair of this process":
            one, other = map(stack.enter_context, socket.socketpair())
            port = 1
        else:
            listener = stack.enter_context(socket.create_server((HOST, 0)))
            port = listener.getsockname()[1] + 1  # the strangers came to another port
            other = stack.enter_context(socket.create_connection(listener.getsockname(), LONG))
            one = stack.enter_context(listener.accept()[0])
        strangers = Strangers(patience=0.0, port=port)
        strangers.noticed(zmq.Event.ACCEPTED, one.fileno(), 0.0)
        strangers.check(1.0, excused=False)
        one.sendall(b"still here")
        assert not strangers and other.recv(16) == b"still here"
