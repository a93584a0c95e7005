"""Relays and ranks that meet there, for tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from waiting import LONG

from thinwire.links import Peer, connect_mesh
from thinwire.links.relay.server import RelayServer

TOKEN = b"a shared secret, long and random"


class Running:
    """A relay in a thread of this process."""

    def __init__(self, secret: bytes = TOKEN, port: int = 0, **options: Any) -> None:
        self.lines: list[str] = []
        self.relay = RelayServer(secret, say=self.lines.append, **options)
        self._loop, self._stop, self._up = asyncio.new_event_loop(), asyncio.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(port,))
        self._thread.start()
        assert self._up.wait(LONG)

    def _run(self, port: int) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self.relay.serve("127.0.0.1", port, self._stop, self._started))

    def _started(self, port: int) -> None:
        self.port = port
        self._up.set()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(LONG)
        assert not self._thread.is_alive()

    stop = __exit__


@contextmanager
def mesh(where: Any, world: int = 2, token: bytes = TOKEN, **options: Any) -> Iterator[list[dict[int, Peer]]]:
    options = {"connect_timeout": LONG, "deadline": 30.0} | options
    at = where if isinstance(where, str) else f"127.0.0.1:{where.port}"
    with ThreadPoolExecutor(8) as pool:
        made = [
            pool.submit(connect_mesh, r, world, None, token=token, relay=at, **options) for r in range(world)
        ]
        ranks = [m.result(2 * LONG) for m in made]
        try:
            yield ranks
        finally:
            for peer in [p for r in ranks for p in r.values()]:
                pool.submit(peer.close)


def exchange(ranks: list[dict[int, Peer]], n: int = 3, size: int = 300_000, tag: bytes = b"x") -> None:
    """Send ``n`` messages each way between ranks 0 and 1 and check what arrives."""
    a, b = ranks[0][1].mailbox, ranks[1][0].mailbox
    for i in range(n):
        a.send(tag, bytes([i]) * size, "forward")
        b.send(tag, bytes([100 + i]) * size, "backward")
    for i in range(n):
        assert b.get(tag, LONG, "forward") == bytes([i]) * size
        assert a.get(tag, LONG, "backward") == bytes([100 + i]) * size
