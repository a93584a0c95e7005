"""A TCP proxy for tests: counts bytes, and can cut, stall or corrupt the connections through it."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

UP, DOWN = "up", "down"  # from the connecting side to the target, and back


class TcpProxy:
    """Forward connections at ``port`` to ``target`` on loopback; use as a context manager."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.counts = {UP: 0, DOWN: 0}
        self.connections = self.turned_away = 0
        self._flips: dict[str, set[int]] = {UP: set(), DOWN: set()}
        self._stall_at: dict[str, int] = {}
        self._open = threading.Event()
        self._open.set()
        self._cut = self._closed = False
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._start(self._accept)

    def __enter__(self) -> TcpProxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self._closed = True
        self._open.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._listener.close()
        self._drop()
        for thread in self._threads:
            thread.join(10)

    def cut(self) -> None:
        """Reset all connections and refuse new ones until ``restore``; bytes on their way are lost."""
        self._cut = True
        self._drop()

    def restore(self) -> None:
        """Let connections through again."""
        self._cut = False

    def stall(self) -> None:
        """Forward nothing, both ways, and keep the connections."""
        self._open.clear()

    def stall_at(self, way: str, nbytes: int) -> None:
        """Stall once so many bytes, or a few more, of one direction have been forwarded."""
        self._stall_at[way] = nbytes

    def resume(self) -> None:
        """Forward again what was held."""
        self._stall_at.clear()
        self._open.set()

    def corrupt(self, way: str, after: int) -> None:
        """Invert the byte that follows ``after`` more bytes of one direction."""
        self._flips[way].add(self.counts[way] + after)

    def _start(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self._cut or self._closed:
                self.turned_away += 1
                near.close()
                continue
            try:
                far = socket.create_connection(("127.0.0.1", self.target), timeout=10)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            self.connections += 1
            with self._lock:
                self._sockets += [near, far]
            self._start(self._forward, near, far, UP)
            self._start(self._forward, far, near, DOWN)

    def _forward(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self._open.wait()
                sink.sendall(self._counted(data, way))
        for s in (source, sink):
            with suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)

    def _counted(self, data: bytes, way: str) -> bytes:
        start = self.counts[way]
        self.counts[way] += len(data)
        if self.counts[way] >= self._stall_at.get(way, self.counts[way] + 1):
            self._open.clear()
        hit = [n for n in self._flips[way] if start <= n < start + len(data)]
        if not hit:
            return data
        changed = bytearray(data)
        for n in hit:
            changed[n - start] ^= 0xFF
            self._flips[way].discard(n)
        return bytes(changed)

    def _drop(self) -> None:
        with self._lock:
            dropped, self._sockets = self._sockets, []
        for s in dropped:
            with suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)
            s.close()
