"""A hub: one listening ZeroMQ socket for many peers (spokes) that come and go, each sent to by its name.

Nothing is repaired here: a message may be lost when a connection breaks, and the owner of the hub is told of
peers that join and are lost. A peer that does not read costs its own bounded queue and nobody else's time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

import zmq

from thinwire.links.address import check_port, shown
from thinwire.links.hub import station
from thinwire.links.hub.station import Event, EventKind
from thinwire.links.metered import Traffic, wire_bytes
from thinwire.links.pair.buffers import joined
from thinwire.links.security import check_host
from thinwire.links.sockets import BURST, REFUSED, dialled_at, listen
from thinwire.links.tcp import congestion

MAX_REQUEST = 4096  # bytes of a message from a spoke
MAX_QUEUE = 1 << 25  # bytes that wait for one peer; what is over it is refused
MAX_QUEUED = 1 << 28  # bytes that wait for all; while there are more, a peer may have FAIR
FAIR = 1 << 20
UNCOPIED = 1 << 16  # bytes from which on libzmq reads a message where it lies
MAX_PEERS = 1024


@dataclass
class _SpokeState:
    name: str
    heard: float  # when, monotonic
    queue: deque[bytes] = field(default_factory=deque)
    queued: int = 0  # bytes
    sent: Traffic = field(default_factory=Traffic)
    received: Traffic = field(default_factory=Traffic)


class Hub(station.Station):
    """Talk to many spokes over one port; made by ``bind``.

    With a token only its holders are heard, and messages are encrypted; without one it stays on loopback.
    """

    def __init__(
        self,
        sock: zmq.Socket[bytes],
        host: str,
        port: int,
        token: bytes | None,
        zap: zmq.Socket[bytes] | None,
        silence: float,
        clock: Callable[[], float],
    ) -> None:
        self.host, self.port, self.secure = host, port, token is not None
        self.refused = 0  # connections that broke off before they were let in
        self._clock = clock
        self._peers: dict[bytes, _SpokeState] = {}
        self._queued = 0  # bytes that wait for all peers
        self._reassured = 0.0  # when the peers were told last that this end lives, though it does not read
        self._gone = (Traffic(), Traffic())  # sent and received, of peers that are no more
        watched = REFUSED[0] | REFUSED[1] | REFUSED[2]
        super().__init__(sock, watched, f"the hub at {shown(host, port)}", silence, zap=zap, token=token)
        self._thread.start()

    @classmethod
    def bind(
        cls,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        token: bytes | None = None,
        silence: float = station.SILENCE,
        clock: Callable[[], float] = time.time,
        max_message: int = MAX_REQUEST,
        control: str = congestion.AUTO,
    ) -> Hub:
        """Listen at ``host``; port 0 takes a free one.

        ``silence``: seconds after which a peer that says nothing is lost; below 4 the spokes need the same,
        which ping every second, or four times in their own silence. ``clock``: what the spokes compare
        their clocks with, in seconds. ``max_message``: bytes of the largest message that is read.
        ``control``: TCP's congestion control (``congestion``).
        Errors: ``InputError`` for an address off loopback without a token, or one that cannot be bound, or a
        control that cannot be had.
        """
        check_host(host, token)
        check_port(port)
        station.check_silence(silence)
        chosen = congestion.resolve(control)
        sock = station.station_socket(zmq.ROUTER, max_message, sends=station.LARGE)
        zap, port = listen(sock, host, port, token, chosen)
        return cls(sock, dialled_at(sock, host), port, token, zap, silence, clock)

    @property
    def peers(self) -> tuple[bytes, ...]:
        """Names of the spokes that are there, 16 bytes each."""
        with self._lock:
            return tuple(self._peers)

    def describe(self, peer: bytes) -> str:
        """Return a peer's name for people: ``7f3a (192.0.2.7)``."""
        with self._lock:
            found = self._peers.get(peer)
        return found.name if found is not None else peer.hex()[:4]

    def send(self, peer: bytes, *data: bytes | memoryview) -> bool:
        """Queue one message, given in parts; False where the peer is not there, or more waits than may."""
        nbytes = sum(map(len, data))
        with self._lock:
            found = self._peers.get(peer)
            most = MAX_QUEUE if self._queued < MAX_QUEUED else min(FAIR, MAX_QUEUE)
            if found is None or found.queued + nbytes > most or self._linger is not None:
                return False
            found.queue.append(joined((station.DATA_BYTE, *data)))
            found.queued += nbytes + 1
            self._queued += nbytes + 1
        self._bell.ring()
        return True

    def traffic(self, peer: bytes | None = None) -> tuple[Traffic, Traffic]:
        """Return messages and wire bytes sent to and received from a peer, or all there ever were.

        Frame headers and encryption are counted, TCP and IP headers and handshakes are not.
        """
        with self._lock:
            if peer is not None:
                found = self._peers.get(peer)
                return (found.sent, found.received) if found is not None else (Traffic(), Traffic())
            sent, received = self._gone
            for p in self._peers.values():
                sent, received = sent + p.sent, received + p.received
        return sent, received

    def forget(self, peer: bytes) -> None:
        """Drop a peer and what waits for it; should it speak again, it joins again."""
        with self._lock:
            found = self._peers.pop(peer, None)
            if found is not None:
                self._queued -= found.queued
                sent, received = self._gone
                self._gone = sent + found.sent, received + found.received

    # the thread

    def _noticed(self, kind: int, value: int) -> None:
        self.refused += kind in REFUSED  # a hub must not die because a stranger knocks

    def _waiting(self) -> bool:
        with self._lock:
            return any(p.queue for p in self._peers.values())

    def _receive(self) -> None:
        for _ in range(BURST):
            if self._events.full:
                return
            try:
                frames = self._sock.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            if len(frames) != 2 or len(frames[0].buffer) != station.IDENTITY or not len(frames[1].buffer):
                continue  # no spoke of ours
            name, data = frames[0].bytes, frames[1].bytes
            if self._known(name, frames[1], len(data)):
                self._strangers.heard(frames[1])
                self._take(name, data)

    def _known(self, name: bytes, frame: zmq.Frame, nbytes: int) -> bool:
        """Note a sign of life; return whether there is room for the peer."""
        with self._lock:
            peer = self._peers.get(name)
            new = peer is None
            if peer is None:
                if len(self._peers) >= MAX_PEERS:
                    return False
                peer = self._peers[name] = _SpokeState(f"{name.hex()[:4]} ({_address(frame)})", monotonic())
            peer.heard = monotonic()
            peer.received += Traffic(1, wire_bytes(nbytes, self.secure))
        if new:
            self._events.put(Event(EventKind.JOINED, name))
        return True

    def _take(self, name: bytes, data: bytes) -> None:
        kind = data[0]
        if kind == station.DATA:
            self._events.put(Event(EventKind.DATA, name, data[1:], monotonic()))
        elif kind == station.PING and len(data) == station.STAMP.size:
            self._put(name, station.ANSWER.pack(station.PONG, station.STAMP.unpack(data)[1], self._clock()))
        elif kind == station.BYE:
            self._lose(name, b"it left")

    def _flush(self) -> None:
        with self._lock:
            todo = [name for name, peer in self._peers.items() if peer.queue]
        for name in todo:
            for _ in range(BURST):
                with self._lock:
                    peer = self._peers.get(name)
                    data = peer.queue[0] if peer is not None and peer.queue else None
                if peer is None or data is None or not self._put(name, data):
                    break
                with self._lock:
                    if peer.queue:
                        peer.queue.popleft()
                        peer.queued -= len(data)
                        self._queued -= len(data) if self._peers.get(name) is peer else 0

    def _put(self, name: bytes, data: bytes) -> bool:
        """Hand a message to ZeroMQ; False where there is no room now."""
        try:
            self._sock.send_multipart([name, data], zmq.DONTWAIT, copy=len(data) < UNCOPIED)
        except zmq.Again:
            return False
        except zmq.ZMQError as e:
            if e.errno != zmq.EHOSTUNREACH:
                raise
            self._lose(name, b"its connection broke")
            return False
        with self._lock:
            if name in self._peers:
                self._peers[name].sent += Traffic(1, wire_bytes(len(data), self.secure))
        return True

    def _check_silence(self, now: float, excused: bool) -> None:
        if excused:
            with self._lock:
                for p in self._peers.values():
                    p.heard = now
            self._reassure(now)
        with self._lock:
            silent = [name for name, peer in self._peers.items() if now - peer.heard > self._silence]
        for name in silent:
            self._lose(name, f"it gave no sign of life for {self._silence:g} s".encode())

    def _reassure(self, now: float) -> None:
        """Tell all that this end lives: their pings wait unread, and none of them is answered."""
        if now - self._reassured >= self._heartbeat:
            self._reassured = now
            for name in self.peers:
                self._put(name, station.ALIVE_BYTE)

    def _lose(self, name: bytes, why: bytes) -> None:
        self.forget(name)
        self._events.put(Event(EventKind.LOST, name, why))

    def _farewell(self) -> None:
        for name in self.peers:
            self._put(name, station.BYE_BYTE)


def _address(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("Peer-Address"))
    except (zmq.ZMQError, KeyError, ValueError):
        return "?"
