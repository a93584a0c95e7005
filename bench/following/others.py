"""How old a version is that comes the others' way: their bytes over the same lines, for ``costs``.

Rank 0 encodes a version and writes it into a TCP stream; rank 1 reads all of it and decodes it. The next one
follows after a pause, so none waits for another, and there is no protocol: both in their favour. Age is from
the beginning of encoding to the end of decoding, by one clock, as it is for ``thinwire``, whose publisher has
bf16 tensors there too. One version goes first, in which caches and the congestion control warm up. ``python
-m bench.following.others publish|follow`` is one rank; its order comes as JSON in ``THINWIRE_BENCH``.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.following.links import CONTROLS, DELAY, TRAINED, Cell
from bench.following.recording import Recording, Replay
from bench.following.rivals import rivals
from thinwire.runs.records.writer import write_json

WAYS = ("xor zstd-1", "pulse zstd-1")
WHOLE = "full zstd-1"  # the same at every rate and stride, so sent once a line
WHOLE_RATE = 1e-6
SKIPPED = 16  # steps before the first version: the first ones of AdamW move more weights than later ones
VERSIONS = (1, 1, 4, 4, 16)  # the steps that each makes, one after another
PORT, PATIENCE = 29610, 300.0  # seconds
HEAD = struct.Struct("!I")


def age(folder: Path, mbit: int, rate: float) -> Any:
    """Return a cell: each way's versions over one line."""
    orders = {"folder": str(folder), "rate": rate, "pause": TRAINED}
    with tempfile.TemporaryDirectory() as place:
        found = Cell(f"{mbit}mbit,{DELAY}", Path(place), orders, CONTROLS[0], "bench.following.others").run()
    return {"mbit": mbit, "rate": rate, "control": CONTROLS[0], "network": found["network"],
            "rows": beside(found["publish"], found["follow"])}  # fmt: skip


def beside(sent: list[dict[str, Any]], came: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row a version but the first: what was sent, and its age where it came, in seconds."""
    both = list(zip(sent, came, strict=True))[1:]
    return [{**s, "decode": c["decode"], "age": c["ready"] - s["began"]} for s, c in both]


class Versions:
    """What both ranks know: the words before each version, and those after it."""

    def __init__(self, order: dict[str, Any]) -> None:
        recording = Recording(Path(order["folder"]), order["rate"])
        self._replay, self._whole = Replay(recording), order["rate"] == WHOLE_RATE
        self.ways = {r.name: r for r in rivals(recording.layout)}
        self.words = self._replay.words
        self.tensors = recording.views(torch.from_numpy(self.words).view(torch.bfloat16))

    def __iter__(self) -> Iterator[tuple[str, int, np.ndarray]]:
        """Yield way, steps a version and the words before it; ``words`` and ``tensors`` are after it."""
        self._replay.advance(SKIPPED)
        for number, stride in enumerate(VERSIONS):
            before = self.words.copy()
            self._replay.advance(stride)
            first = [WAYS[0], *WAYS, *([WHOLE] if self._whole else [])]  # the first of all warms up
            for way in WAYS if number else first:
                yield way, stride, before


def publish(order: dict[str, Any]) -> list[dict[str, Any]]:
    """Send all versions; each waits until the other rank has it, and for a pause."""
    rows, versions = [], Versions(order)
    with socket.create_server((order["host"], PORT)) as server:
        server.settimeout(PATIENCE)
        peer = server.accept()[0]
        with peer, peer.makefile("rb") as answers:
            _prepare(peer)
            Path(order["ready"]).touch()  # the network's counters are read now
            for way, stride, before in versions:
                time.sleep(order["pause"])
                began = time.monotonic()
                parts = versions.ways[way].encode(versions.tensors, before)
                encoded = time.monotonic()
                peer.sendall(HEAD.pack(len(parts)) + b"".join(HEAD.pack(len(p)) for p in parts))
                for part in parts:
                    peer.sendall(part)
                if int(answers.readline()) != zlib.crc32(versions.words):
                    raise SystemExit(f"{way}: other words came out than went in")
                rows.append({"way": way, "stride": stride, "bytes": sum(map(len, parts)), "began": began,
                             "encode": encoded - began})  # fmt: skip
    return rows


def follow(order: dict[str, Any]) -> list[dict[str, Any]]:
    """Take all versions, and answer each with the check sum of the words."""
    rows, versions = [], Versions(order)
    with connected(order["host"]) as peer, peer.makefile("rb") as source:
        for way, _, before in versions:
            held = before.copy()  # decoded into
            sizes = [HEAD.unpack(source.read(4))[0] for _ in range(HEAD.unpack(source.read(4))[0])]
            parts = [source.read(size) for size in sizes]
            came = time.monotonic()
            versions.ways[way].decode(parts, held)
            ready = time.monotonic()
            rows.append({"ready": ready, "decode": ready - came})
            peer.sendall(b"%d\n" % zlib.crc32(held))
    return rows


def connected(host: str, port: int = PORT) -> socket.socket:
    """Return a connection to the other rank, which may not listen yet."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            peer = socket.create_connection((host, port), PATIENCE)
            _prepare(peer)
            return peer
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def _prepare(peer: socket.socket) -> None:
    peer.settimeout(PATIENCE)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def main() -> None:
    """Be one rank."""
    order = json.loads(os.environ["THINWIRE_BENCH"])
    torch.set_num_threads(1)
    write_json(Path(order["out"]), publish(order) if sys.argv[1] == "publish" else follow(order))


if __name__ == "__main__":
    main()
