"""A TCP proxy for tests that lets so many bytes a second through to the connecting side."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from time import monotonic, sleep

from tcp_proxy import DOWN, TcpProxy

PIECE = 2048  # bytes
LATE = 0.02  # seconds that a thread may wake up late without making the line slower


class SlowProxy(TcpProxy):
    """A ``TcpProxy`` whose way down is ``rate`` bytes/s; ``rate`` may be changed at any time."""

    def __init__(self, target: int, rate: float) -> None:
        self.rate = rate
        self._turn = threading.Lock()  # connections share the line
        self._free_at = 0.0
        super().__init__(target)

    def _forward(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        if way != DOWN:
            super()._forward(source, sink, way)
            return
        with suppress(OSError):
            while data := source.recv(PIECE):
                self._open.wait()
                with self._turn:
                    self._free_at = max(self._free_at, monotonic() - LATE) + len(data) / self.rate
                    wait = self._free_at - monotonic()
                if wait > 0:
                    sleep(wait)
                sink.sendall(self._counted(data, way))
        for s in (source, sink):
            with suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)
