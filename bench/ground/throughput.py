"""Measure what one link carries one way: GB/s, and CPU seconds a GB at either end.

Run ``python -m bench.ground.throughput [--source FOLDER]``. Two processes on this machine, each bound to a
core of its own; equal messages of 64 kB, 1 MB and 64 MB, plain and encrypted; beside them ZeroMQ alone, which
sends the same bytes without a copy and reads them into nothing. The ways take turns. ``--source`` measures a
checkout of thinwire, before a change. Writes ``bench/results/throughput.json``: the rate of the quickest turn
and the CPU times of the cheapest, because what else runs on the machine only ever adds to them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import zmq

from bench.study.tables import Draw, columns

SIZES = {"64 kB": 1 << 16, "1 MB": 1 << 20, "64 MB": 1 << 26}
NBYTES = {False: 1 << 30, True: 1 << 29}  # sent in one turn; less where it is encrypted
TURNS = 3
FLIGHT = 1 << 28  # bytes that have not been acknowledged, at most
TOKEN = b"a token of thirty-two characters"
KEYS = zmq.curve_keypair()
DEADLINE = 120.0  # seconds
WAYS = {"before": "thinwire, before", "thinwire": "thinwire", "zeromq": "ZeroMQ alone"}
Numbers = dict[str, float]


def run(way: str, size: int, count: int, secure: bool, pinned: bool = True) -> Numbers:
    """Send ``count`` messages of ``size`` bytes; return bytes/s, and CPU seconds a GB of both ends."""
    here, there = multiprocessing.Pipe()
    receive, send = (_receive, _send) if way == "thinwire" else (_receive_alone, _send_alone)
    process = multiprocessing.get_context("fork").Process(
        target=_bound, args=(pinned, 1, receive, there, size, count, secure)
    )
    process.start()
    kept = os.sched_getaffinity(0)
    try:
        seconds, used = _bound(pinned, 0, send, here, size, count, secure)
        theirs = here.recv()
    finally:
        os.sched_setaffinity(0, kept)
    here.send(None)
    process.join()
    gigabytes = size * count / 1e9
    return {"rate": size * count / seconds, "sender": used / gigabytes, "receiver": theirs / gigabytes}


def _bound(pinned: bool, core: int, work: Any, *args: Any) -> Any:
    cores = sorted(os.sched_getaffinity(0))
    if pinned:
        os.sched_setaffinity(0, {cores[core % len(cores)]})
    return work(*args)


def _stack(connect: bool, port: int, secure: bool) -> tuple[Any, int]:
    from thinwire.links import LinkShape, ZmqLink
    from thinwire.links.mesh import stack
    from thinwire.links.pair.reliable import MAX_SEGMENT

    options: dict[str, Any] = {"max_message": MAX_SEGMENT, "token": TOKEN if secure else None}
    link = ZmqLink.connect(b"n", "127.0.0.1", port, **options) if connect else ZmqLink.bind(b"n", **options)
    peer = stack(0, link, LinkShape(), 0, DEADLINE, DEADLINE)
    return peer, link.port


def _send(pipe: Connection, size: int, count: int, secure: bool) -> tuple[float, float]:
    peer, _ = _stack(True, pipe.recv(), secure)
    peer.reliable.wait_alive(DEADLINE)
    data = os.urandom(size)
    for _ in _sent(peer, [b"warm"] * max(4, min(count, 1 << 26) // 16), data, 1 << 26):
        pass
    pipe.send(None)
    pipe.recv()
    start, before = time.perf_counter(), time.process_time()
    for _ in _sent(peer, [b"t"] * count, data, FLIGHT):
        pass
    taken = time.perf_counter() - start, time.process_time() - before
    peer.close(1.0)
    return taken


def _sent(peer: Any, tags: list[bytes], data: bytes, flight: int) -> Iterator[None]:
    under_way: deque[Any] = deque()
    for tag in tags:
        under_way.append(peer.mailbox.send(tag, data, "other"))
        if len(under_way) * len(data) > flight:
            yield under_way.popleft().result(DEADLINE)
    for done in under_way:
        yield done.result(DEADLINE)


def _receive(pipe: Connection, size: int, count: int, secure: bool) -> None:
    peer, port = _stack(False, 0, secure)
    pipe.send(port)
    pipe.recv()
    while peer.mailbox.look(b"warm") is not None:
        pass
    before = time.process_time()
    pipe.send(None)
    for _ in range(count):
        if len(peer.mailbox.get(b"t", DEADLINE, "a message")) != size:
            raise ValueError("a message of another size")
    pipe.send(time.process_time() - before)
    pipe.recv()
    peer.close(1.0)


def _socket(kind: int, secure: bool) -> Any:
    sock = zmq.Context().socket(kind)
    sock.linger, sock.sndhwm, sock.rcvhwm = 0, 64, 64
    if secure:
        sock.curve_publickey, sock.curve_secretkey = KEYS
        if kind == zmq.DEALER:
            sock.curve_serverkey = KEYS[0]
        else:
            sock.curve_server = True
    return sock


def _send_alone(pipe: Connection, size: int, count: int, secure: bool) -> tuple[float, float]:
    sock, data = _socket(zmq.DEALER, secure), os.urandom(size)
    sock.connect(f"tcp://127.0.0.1:{pipe.recv()}")
    sock.send(b"")
    sock.recv()
    start, before = time.perf_counter(), time.process_time()
    for _ in range(count):
        sock.send(data, copy=False)
    sock.recv()
    taken = time.perf_counter() - start, time.process_time() - before
    sock.context.destroy(linger=0)
    return taken


def _receive_alone(pipe: Connection, size: int, count: int, secure: bool) -> None:
    sock = _socket(zmq.ROUTER, secure)
    pipe.send(sock.bind_to_random_port("tcp://127.0.0.1"))
    name, _ = sock.recv_multipart()
    sock.send_multipart([name, b""])
    before = time.process_time()
    for _ in range(count):
        if len(sock.recv_multipart(copy=False)[1]) != size:
            raise ValueError("a message of another size")
    used = time.process_time() - before
    sock.send_multipart([name, b""])
    pipe.send(used)
    pipe.recv()
    sock.context.destroy(linger=0)


def best(turns: list[Numbers]) -> Numbers:
    """Return the rate of the quickest turn, and the CPU seconds a GB of the cheapest."""
    least = min(turns, key=lambda turn: turn["sender"] + turn["receiver"])
    return least | {"rate": max(turn["rate"] for turn in turns)}


TABLES: dict[str, Draw] = {
    "throughput": columns(
        "cells",
        ("messages", "{size}"), ("encrypted", lambda cell: "yes" if cell["secure"] else "no"),
        ("way", lambda cell: WAYS[cell["way"]]), ("GB/s", lambda cell: f"{cell['rate'] / 1e9:.2f}"),
        ("CPU s a GB: sender", "{sender:.2f}"), ("receiver", "{receiver:.2f}"),
    )
}  # fmt: skip


def main() -> None:
    """Take turns, and write what came of them."""
    from bench.ground.codecs import machine
    from bench.study.cells import RESULTS
    from thinwire.runs.records.writer import write_json

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--source", help="folder with an earlier thinwire to measure as well")
    parser.add_argument("--one", nargs=3, metavar=("WAY", "BYTES", "SECURE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        way, size, secure = args.one[0], int(args.one[1]), args.one[2] == "1"
        print(json.dumps(run(way, size, max(2, NBYTES[secure] // size), secure)))
        return
    cells = []
    for secure in (False, True):
        for name, size in SIZES.items():
            ways = [way for way in WAYS if way != "before" or args.source]
            turns: dict[str, list[Numbers]] = {way: [] for way in ways}
            for _ in range(TURNS):
                for way in ways:
                    turns[way].append(_elsewhere(way, size, secure, args.source))
            for way in ways:
                about = {"way": way, "size": name, "secure": secure, "turns": TURNS}
                cells.append(about | best(turns[way]))
                print(json.dumps(cells[-1]), flush=True)
    write_json(RESULTS / "throughput.json", {"machine": machine(), "cells": cells})


def _elsewhere(way: str, size: int, secure: bool, source: str | None) -> Numbers:
    """Measure one turn in a process of its own, which may import another thinwire."""
    environment = dict(os.environ) | ({"PYTHONPATH": str(source)} if way == "before" else {})
    asked = ["thinwire" if way == "before" else way, str(size), str(int(secure))]
    command = [sys.executable, "-m", "bench.ground.throughput", "--one", *asked]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    found: Numbers = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
