"""A TCP proxy in this process: a door that can be shut for a while, and, without an emulator, a slow link.

With a rate it is a throttle: the bytes of each way leave at that rate, and arrive a delay later. It is no
network: headers, acknowledgements and lost packets cost nothing there.
"""

from __future__ import annotations

import queue
import socket
import threading
from contextlib import suppress
from time import monotonic, sleep

from thinwire.links.names import reach

MOST, LEAST, PIECE = 16384, 1024, 0.01  # bytes that are moved at once, or so many seconds of the line
AHEAD = 0.2  # seconds of a line that may wait before it, as in a router's queue
FULL = 1 << 12  # pieces under way


class Gate:
    """Forward connections at ``port`` on loopback to ``host``:``to``.

    ``rate``: bytes/s each way, None for as fast as they come; ``delay``: seconds one way.
    """

    def __init__(self, host: str, to: int, rate: float | None = None, delay: float = 0.0) -> None:
        self._target, self._rate, self._delay = (host, to), rate, delay
        self._piece = MOST if rate is None else int(min(max(rate * PIECE, LEAST), MOST))
        self._shut = self._closed = False
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._held: socket.socket | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._free = {"up": 0.0, "down": 0.0}  # when each way's line is free again
        threading.Thread(target=self._accept, name=f"gate to {host}:{to}", daemon=True).start()

    def shut(self) -> None:
        """Cut all connections and let none through until ``open``; bytes on their way are lost.

        Who connects meanwhile hears nothing, as where packets are lost: a refusal would mean something.
        """
        self._shut = True
        self._drop()

    def open(self) -> None:
        """Let connections through again."""
        self._shut = False

    def close(self) -> None:
        """End everything. Harmless twice."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._listener.close()
        self._drop()

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self._shut:
                    raise OSError("the gate is shut")
                far = reach(*self._target, 5.0)
                far.settimeout(None)
            except OSError:
                self._hold(near)
                continue
            with self._lock:
                self._sockets += [near, far]
            for ends in ((near, far, "up"), (far, near, "down")):
                self._forward(*ends)

    def _hold(self, near: socket.socket) -> None:
        """Keep a connection open that leads nowhere, until the next one: who dials again has left it."""
        with self._lock:
            held, self._held = self._held, near
        if held is not None:
            held.close()

    def _forward(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        under_way: queue.Queue[tuple[float, bytes]] = queue.Queue(FULL)
        for run in (self._read, self._write):
            args = (source, sink, way, under_way)
            threading.Thread(target=run, args=args, name=f"gate {way}", daemon=True).start()

    def _read(
        self, source: socket.socket, sink: socket.socket, way: str, out: queue.Queue[tuple[float, bytes]]
    ) -> None:
        with suppress(OSError):
            while data := source.recv(self._piece):
                out.put((self._due(len(data), way), data))
        out.put((monotonic(), b""))

    def _due(self, nbytes: int, way: str) -> float:
        """Return when so many bytes arrive; wait until what is before the line is short enough."""
        now = monotonic()
        if self._rate is None:
            return now + self._delay
        with self._lock:
            free = self._free[way] = max(now, self._free[way]) + nbytes / self._rate
        sleep(max(0.0, free - now - AHEAD))
        return free + self._delay

    def _write(
        self, source: socket.socket, sink: socket.socket, way: str, out: queue.Queue[tuple[float, bytes]]
    ) -> None:
        broken = False
        while (item := out.get())[1]:  # to the end: who reads must not wait for room
            if not broken:
                sleep(max(0.0, item[0] - monotonic()))
                try:
                    sink.sendall(item[1])
                except OSError:
                    broken = True
                    with suppress(OSError):
                        source.shutdown(socket.SHUT_RDWR)
        for s in (source, sink):
            with suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)

    def _drop(self) -> None:
        with self._lock:
            dropped, self._sockets = self._sockets, []
            if self._held is not None and self._closed:
                self._held.close()
        for s in dropped:
            with suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)
            s.close()
