"""Hostile scene files: cut, flipped, and with claims beyond their bytes, inside their compression too.

As a program it reads CASES of them and says as JSON how many were refused, and by how much the memory grew at
most. It is a process of its own because a reader in C++ takes part::

    PYTHONPATH=src:tests/shared python tests/shared/scene_fuzz.py 20000
"""

from __future__ import annotations

import gzip
import json
import random
import re
import struct
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import zstandard
from scenes import ball

from thinwire.types import InputError, PayloadError
from thinwire.uses.scenes import importance_coder
from thinwire.uses.scenes.files import foreign
from thinwire.uses.scenes.files.packed_scene import read_scene, write_scene
from thinwire.uses.scenes.files.ply import read_ply, write_ply
from thinwire.uses.scenes.layers import shown_after
from thinwire.uses.scenes.part import Layer
from thinwire.uses.scenes.scene import Splats

PIXELS = 64
NUMBER = re.compile(rb"\d+")


def packed(n: int, farthest: float = 0) -> bytes:
    scene = ball(n, 1)
    scene.positions[0, 0] += farthest
    part = importance_coder.encode(importance_coder.Analysis.of(scene, PIXELS), 1e-5)
    return write_scene([Layer(None, part), Layer(part)])


def spz(n: int, bands: int, version: int) -> bytes:
    foreign.SPZ_VERSION = version
    return foreign.write_foreign(ball(n, bands), "spz")


def text(scene: Splats) -> bytes:
    head, _, body = write_ply(scene).partition(b"end_header\n")
    rows = np.frombuffer(body, "<f4").reshape(scene.count, -1)
    lines = "\n".join(" ".join(map(str, row.tolist())) for row in rows)
    return head.replace(b"binary_little_endian", b"ascii") + b"end_header\n" + lines.encode()


def samples() -> dict[str, bytes]:
    """Return whole files by the name of their format."""
    return {
        "packed": packed(80),
        "packed, larger": packed(3000),
        "packed, with a stray": packed(80, 1e4),
        "ply": write_ply(ball(6, 1)),
        "text ply": text(ball(4, 0)),
        "spz 3": spz(40, 1, 3),
        "spz 4": spz(40, 1, 4),
        "spz 4, plain": spz(40, 0, 4),
        "compressed.ply": foreign.write_foreign(ball(300, 1), "compressed.ply"),
    }


def damaged(name: str, whole: bytes, draw: random.Random) -> bytes:
    """Return a file with a few bytes changed, a number in it made another, and perhaps its end cut off."""
    if name == "spz 3" and draw.random() < 0.7:
        return gzip.compress(changed(gzip.decompress(whole), draw), 1)
    if name.startswith("spz 4") and draw.random() < 0.5:
        return recoded(whole, draw)
    return changed(whole, draw)


def changed(whole: bytes, draw: random.Random) -> bytes:
    data = bytearray(whole)
    head = min(len(data), 4096)
    for _ in range(draw.randrange(4)):
        at = draw.randrange(head if draw.random() < 0.5 else len(data))
        data[at] ^= 1 << draw.randrange(8) if draw.random() < 0.5 else draw.randrange(256)
    if draw.random() < 0.3:
        at = draw.randrange(min(64, len(data) - 8))
        struct.pack_into("<I", data, at, draw.choice([0xFFFFFFFF, 0x7FFFFFFF, 1 << 24, 1 << 30, 2_000_000]))
    numbers = list(NUMBER.finditer(data[:head])) if draw.random() < 0.3 else []
    if numbers:
        found = draw.choice(numbers)
        data[slice(*found.span())] = str(draw.choice([0, 1, 65536, 10**6, 10**9, 10**18])).encode()
    return bytes(data[: draw.randrange(len(data) + 1)] if draw.random() < 0.3 else data)


def recoded(whole: bytes, draw: random.Random) -> bytes:
    """Return an SPZ 4 whose header or streams are changed below their compression."""
    streams, (table,) = whole[15], struct.unpack_from("<I", whole, 16)
    rows = [struct.unpack_from("<QQ", whole, table + 16 * i) for i in range(streams)]
    at, found = table + 16 * streams, []
    for nbytes, _ in rows:
        found.append(zstandard.decompress(whole[at : at + nbytes]))
        at += nbytes
    i = draw.randrange(streams)
    found[i] = changed(found[i], draw) if len(found[i]) > 64 else bytes(draw.randrange(1 << 22))
    again = [zstandard.compress(stream) for stream in found]
    claimed = [len(s) if draw.random() < 0.9 else draw.choice([0, 1 << 20, 1 << 31, 1 << 62]) for s in found]
    places = b"".join(struct.pack("<QQ", len(s), n) for s, n in zip(again, claimed, strict=True))
    return whole[:table] + places + b"".join(again)


def read(name: str, data: bytes) -> Splats:
    """Return the scene in a file of a format."""
    if name.startswith("packed"):
        return shown_after(read_scene(data))
    if name.endswith("ply") and not name.startswith("compressed"):
        return read_ply(data)
    return foreign.read_foreign(data, "spz" if name.startswith("spz") else name)


def peak() -> int:
    """Return the most memory that this process has had, in bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) << 10 if found else 0


def main(cases: int, seed: int = 0) -> None:
    draw, files, counts = random.Random(seed), samples(), Counter[str]()
    for name, whole in files.items():
        read(name, whole)
    before = peak()
    for _ in range(cases):
        name = draw.choice(list(files))
        data = damaged(name, files[name], draw)
        try:
            read(name, data)
            counts[f"{name}: read"] += 1
        except (PayloadError, InputError) as e:
            counts[f"{name}: refused"] += 1
            assert "\n" not in str(e), e
    told = {"cases": cases, "grew": peak() - before, "largest": max(map(len, files.values()))}
    print(json.dumps(told | dict(sorted(counts.items()))))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
