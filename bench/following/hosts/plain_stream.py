"""Versions by another way's bytes in one TCP stream, for ``host_loop``: as overlapped as thinwire's.

The trainer copies its words and goes on; a thread encodes and sends. At the worker a thread receives, and the
words are brought forward between two generations. No check sum, no encryption, no restart: in its favour.
"""

from __future__ import annotations

import queue
import socket
import struct
import threading
import time
from typing import Any

import numpy as np

from bench.following.hosts.host_formats import host_formats
from bench.following.hosts.host_sources import Moving
from bench.following.others import connected
from thinwire.state.patches.patch import Version
from thinwire.types import LinkError
from thinwire.uses.following.follower_base import Applied

HEAD = struct.Struct("!Qd")  # version, when it was published
COUNT = struct.Struct("!I")
PATIENCE = 240.0  # seconds


class PlainPublisher:
    """The trainer's end. Version 1 is what both ends have."""

    def __init__(self, source: Moving, way: str, host: str, port: int) -> None:
        self._source, self._number = source, 0
        self._way, self._before = host_formats(source.layout)[way], source.words.copy()
        self._waiting: queue.Queue[tuple[int, float, np.ndarray] | None] = queue.Queue()
        self._server = socket.create_server((host, port))
        self._server.settimeout(PATIENCE)
        self._thread = threading.Thread(target=self._send, name="sends")
        self._thread.start()

    def publish(self) -> int:
        """Make the words the newest version, and return its number."""
        self._number += 1
        if self._number > 1:
            self._waiting.put((self._number, time.time(), self._source.words.copy()))
        return self._number

    def _send(self) -> None:
        peer = self._server.accept()[0]
        with peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while (item := self._waiting.get()) is not None:
                number, when, words = item
                parts = self._way.pack(words, self._before)
                self._before = words
                sizes = b"".join(COUNT.pack(len(p)) for p in parts)
                peer.sendall(HEAD.pack(number, when) + COUNT.pack(len(parts)) + sizes)
                for part in parts:
                    peer.sendall(part)
            peer.shutdown(socket.SHUT_WR)
            peer.recv(1)  # the other end goes when it has all

    def close(self) -> None:
        """End it, once all is sent."""
        self._waiting.put(None)
        self._thread.join(PATIENCE)
        self._server.close()


class PlainFollower:
    """The worker's end: what a rollout worker asks of a follower, and ``bring_up``."""

    def __init__(self, source: Moving, way: str, host: str, port: int) -> None:
        self._source, self._way = source, host_formats(source.layout)[way]
        self._came: list[tuple[Version, list[bytes]]] = []
        self.held = self._shown = Version(1, published=time.time())
        self.current = True  # there is one publisher's life
        self._changed = threading.Condition()
        self._peer = connected(host, port)
        self._peer.settimeout(None)
        self._thread = threading.Thread(target=self._receive, name="receives", daemon=True)
        self._thread.start()

    @property
    def clock(self) -> float:
        """Seconds since the epoch by the publisher's clock, which is this machine's."""
        return time.time()

    def wait(self, version: int = 1, timeout: float = PATIENCE, *, current: bool = False) -> Version:
        """Return the newest version here, once its number is at least ``version``; it is always current."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.held.number >= version, timeout):
                raise LinkError(f"version {version} did not come within {timeout:g} s")
            return self.held

    def bring_up(self) -> Applied:
        """Bring the words to the newest version here."""
        began = time.perf_counter()
        with self._changed:
            came, self._came = self._came, []
        for version, parts in came:
            self._way.decode(parts, self._source.words)
            self._shown = version
        return Applied(time.perf_counter() - began, self._shown, bool(came))

    def _receive(self) -> None:
        with self._peer.makefile("rb") as stream:
            while head := stream.read(HEAD.size):
                number, when = HEAD.unpack(head)
                sizes = [_count(stream) for _ in range(_count(stream))]
                parts = [stream.read(size) for size in sizes]
                with self._changed:
                    self.held = Version(number, published=when)
                    self._came.append((self.held, parts))
                    self._changed.notify_all()

    def close(self) -> None:
        """Let the other end go."""
        self._peer.close()


def _count(stream: Any) -> int:
    return int(COUNT.unpack(stream.read(COUNT.size))[0])
