"""Listeners of thinwire doctor, and who comes to them, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import Queue
from time import monotonic

from waiting import HOST as HERE
from waiting import LONG

from thinwire.links import LinkShape, Peer, ZmqLink
from thinwire.types import LinkError
from thinwire.uses.doctor.run import linktest
from thinwire.uses.doctor.run.linktest import LinkTest, MeasuredWay, TestedMachine, listen

TOKEN = b"a token of the tests"
COMMAND = [sys.executable, "-m", "thinwire", "doctor"]


@contextmanager
def listening(
    token: bytes | None = TOKEN, shape: LinkShape | None = None
) -> Iterator[tuple[int, Queue[str], Future[None]]]:
    said: Queue[str] = Queue()
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(listen, HERE, 0, token, True, shape, said.put)
        port = int(said.get(timeout=LONG).rpartition(":")[2])
        try:
            yield port, said, served
        finally:
            if not served.done():  # nobody came through; who did waits for ``served``
                peer = knocking(port, token)
                peer.mailbox.send(linktest.HELLO, b'{"name": "end", "settings": {}}')
                peer.mailbox.send(linktest.DO, b'{"end": 0}').result(LONG)
                peer.close()


def knocking(port: int, token: bytes | None, shape: LinkShape | None = None) -> Peer:
    """Return a peer that the listener has answered: at once, or when it has left the one before."""
    end = monotonic() + LONG
    while True:
        link = ZmqLink.connect(linktest.NAME, HERE, port, token=token, max_message=linktest.MAX_SEGMENT)
        peer = linktest.stack(0, link, shape or LinkShape(), 0, LONG, LONG)
        try:
            peer.reliable.wait_alive(LONG)
            return peer
        except LinkError as e:
            peer.close()
            if "an earlier start" not in str(e) or monotonic() > end:
                raise


@contextmanager
def listening_process() -> Iterator[tuple[int, Iterator[str], subprocess.Popen[str]]]:
    process = subprocess.Popen(
        [*COMMAND, "--listen", "--host", HERE, "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        port = next(line for line in lines if line.startswith("listening at")).rpartition(":")[2].strip()
        yield int(port), lines, process
    finally:
        process.kill()
        process.communicate()


def environment() -> dict[str, str]:
    return os.environ | {"THINWIRE_TOKEN": TOKEN.decode()}


def link_test(way: MeasuredWay, rtt: float = 0.05, **settings: str) -> LinkTest:
    quiet = MeasuredWay(1e6, 1000, 1.0, 0.0, "bbr", rtt)
    return LinkTest(TestedMachine("a", settings), TestedMachine("b", {}), rtt, rtt, 0.0, way, quiet)
