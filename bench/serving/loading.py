"""Prefixes loaded over slow links beside computing them, and the policy's word: ``make bench-loading``.

SmolLM2-135M in bfloat16, prefixes of WikiText-2's test text packed at 1 bit. They lie behind a web server at
the far side of an emulated link; who needs one reads it while it unpacks, and its model makes the first
token. The policy (``kv.load_or_recompute``) is told what was measured before: the link by a file of half a
megabyte and by how long a connection takes, the speed of unpacking by a prefix of another length, and that of
the model by two others. Its word is right where it names the way that was sooner.

``python -m bench.serving.loading [LINK]``. Needs THINWIRE_DATA, and what emulated links need. Seconds are
those of a clock: nothing else should run.
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from bench.serving import caches
from bench.study.cells import Kept, run_study
from bench.study.tables import Draw, Row, columns
from thinwire import kv
from thinwire.links.profile import Profile
from thinwire.runs.emulator.session import Emulation
from thinwire.types import MeasurementError

KEPT = Kept("loading")
LINKS = {
    "1 Gbit/s, 1 ms": "1gbit,1ms",
    "100 Mbit/s, 5 ms": "100mbit,5ms",
    "20 Mbit/s, 40 ms": "20mbit,40ms",
    "4 Mbit/s, 40 ms": "4mbit,40ms",
    "LTE": "trace:lte",
}
TOKENS = (512, 1024, 2048)
KNOWN = (256, 1536)  # tokens by which the model's speed is known; unpacking's by the latter
REPEATS = 3
BITS, PROBE = 1.0, 1 << 19  # bytes
PORT, PATIENCE = 29610, 300.0  # seconds
ATTEMPTS = 2


class Cell(NamedTuple):
    link: str


def cells() -> list[Cell]:
    """Return all cells: a link each, over which all prefixes go."""
    return [Cell(link) for link in LINKS.values()]


@cache
def place() -> Path:
    """Return a folder with all prefixes and the file for probing, as a web server shows it."""
    folder, used = Path(tempfile.mkdtemp(prefix="bench-loading-")), caches.components(caches.OURS)
    own, store = caches.prefix(0), kv.PrefixStore(str(folder), used)
    for n in (*TOKENS, KNOWN[-1]):
        part = own.copied(lambda x, n=n: x[:, :n])
        store.put(own.ids[:n].tolist(), part, bits=BITS)
    (folder / "probe").write_bytes(secrets.token_bytes(PROBE))
    return folder


@cache
def computed() -> dict[int, float]:
    """Return the seconds until the first token behind so many computed ones, the median of ``REPEATS``."""
    import torch

    model, ids = caches.model(torch.bfloat16), caches.prefix(0).ids[None]
    model(ids[:, : KNOWN[0]], logits_to_keep=1)
    with torch.inference_mode():
        return {n: timed(lambda n=n: model(ids[:, : n + 1], logits_to_keep=1)) for n in (*KNOWN, *TOKENS)}


def timed(work: Callable[[], object], times: int = REPEATS) -> float:
    """Return the median of the seconds that ``work`` takes."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def measure(cell: Cell) -> dict[str, Any]:
    """Load all prefixes over a link. Errors: ``MeasurementError`` where the machine was late."""
    folder, known = place(), computed()
    with tempfile.TemporaryDirectory() as at, Emulation([Profile.parse(cell.link)] * 2) as net:
        net.check()
        ready, go, out = (Path(at) / name for name in ("ready", "go", "out.json"))
        order = {"address": net.address(0), "folder": str(folder), "ready": str(ready), "go": str(go)}
        order |= {"out": str(out), "known": {str(n): known[n] for n in KNOWN}}
        server = [sys.executable, "-m", "http.server", str(PORT), "--bind", net.address(0), "-d", str(folder)]
        net.popen(0, server)
        env = os.environ | {"THINWIRE_BENCH": json.dumps(order)}
        client = net.popen(1, [sys.executable, "-m", "bench.serving.loading", "--load"], env)
        wait(ready.exists, lambda: client.poll() is None, "the client is ready")
        net.restart()
        go.touch()
        wait(lambda: client.poll() is not None, lambda: True, "all prefixes are loaded")
        net.verdict()
        if client.returncode:
            raise MeasurementError(f"the client ended with {client.returncode}")
        found: dict[str, Any] = json.loads(out.read_text())
        about = net.describe()
    for row in found["rows"]:
        row["computing_s"] = known[row["tokens"]]
    return found | {"network": {name: about[name] for name in ("valid", "lateness", "load", "check")}}


def wait(until: Callable[[], bool], going: Callable[[], bool], what: str) -> None:
    """Wait until something is so. Errors: ``MeasurementError`` after ``PATIENCE``, or if nothing goes on."""
    end = time.monotonic() + PATIENCE
    while not until():
        if time.monotonic() > end or not going():
            raise MeasurementError(f"no word that {what} within {PATIENCE:g} s")
        time.sleep(0.05)


# -- at the near side --------------------------------------------------------------------------------------


def load() -> None:
    """Probe the link, ask the policy, load each prefix, and write what all of it took."""
    import torch

    order = json.loads(os.environ["THINWIRE_BENCH"])
    used, model = caches.components(caches.OURS), caches.model(torch.bfloat16)
    ids = caches.texts("test", caches.PREFIXES, caches.TOKENS + caches.FOLLOWING)[0]
    files = {n: file_of(used, ids, n) for n in (*TOKENS, KNOWN[-1])}
    near = (Path(order["folder"]) / files[KNOWN[-1]]).read_bytes()
    unpacking = len(near) / timed(lambda: kv.unpack_cache(near, used))
    model(ids[None, :8])
    Path(order["ready"]).touch()
    wait(Path(order["go"]).exists, lambda: True, "the network is ready")
    rate, delay = probed(order["address"])
    computing = kv.Recomputing.measured([(int(n), s) for n, s in order["known"].items()])
    rows = []
    for n in TOKENS:
        size = (Path(order["folder"]) / files[n]).stat().st_size
        verdict = kv.load_or_recompute(
            size, n, rate=rate, delay=delay, unpacking=unpacking, computing=computing
        )
        seconds = timed(
            lambda n=n: first_token(order["address"], files[n], used, model, ids[None, n : n + 1])
        )
        rows.append({"tokens": n, "nbytes": size, "loading_s": seconds, "foretold": verdict._asdict()})
    told = {"rate": rate, "delay": delay, "unpacking": unpacking, "rows": rows}
    Path(order["out"]).write_text(json.dumps(told))


def file_of(used: Any, ids: Any, n: int) -> str:
    """Return the name of the file of the first ``n`` tokens."""
    return kv.PrefixStore(".", used).name(ids[:n].tolist())


def probed(host: str) -> tuple[float, float]:
    """Return a link's bytes/s and its delay one way in seconds."""
    import socket

    def connect() -> None:
        socket.create_connection((host, PORT), PATIENCE).close()

    trip = min(timed(connect, 1) for _ in range(REPEATS))
    took = timed(lambda: sum(map(len, read(host, "probe"))))
    return PROBE / max(took - 2 * trip, 1e-6), trip / 2  # one trip to connect, one to ask


def read(host: str, name: str) -> Iterator[bytes]:
    """Yield a file of the far side as it comes."""
    import urllib.request

    with urllib.request.urlopen(f"http://{host}:{PORT}/{name}", timeout=PATIENCE) as answer:
        while piece := answer.read1(1 << 16):
            yield piece


def first_token(host: str, name: str, used: Any, model: Any, ids: Any) -> int:
    """Load a prefix and return the token that follows it and ``ids`` [1, 1]."""
    import torch

    past = kv.unpack_parts(read(host, name), used)
    with torch.inference_mode():
        return int(model(ids, past_key_values=past).logits[0, -1].argmax())


def summary() -> dict[str, Any]:
    """Return all cells, and how often the policy's word was right."""
    rows = []
    for name, link in LINKS.items():
        found = KEPT.get(Cell(link))
        for row in found["rows"] if found else ():
            told = row["foretold"]
            about = {"link": name, "right": told["load"] == (row["loading_s"] < row["computing_s"])}
            rows.append(about | row | {"word": "load" if told["load"] else "compute"})
    return {"right": sum(r["right"] for r in rows), "cells": len(rows), "rows": rows}


def _rows(found: dict[str, Any]) -> list[Row]:
    rows: list[Row] = found["rows"]
    return rows


loading = columns(
    _rows,
    ("link", "{link}"),
    ("tokens", "{tokens:,}"),
    ("MB", "{nbytes:.2fM}"),
    ("loaded, s", "{loading_s:.2f}"),
    ("foretold", lambda r: f"{r['foretold']['loading']:.2f}"),
    ("computed, s", "{computing_s:.2f}"),
    ("foretold ", lambda r: f"{r['foretold']['computing']:.2f}"),
    ("word", "{word}"),
    ("right", lambda r: "yes" if r["right"] else "no"),
)
TABLES: dict[str, Draw] = {"loading": loading}

if __name__ == "__main__":
    if "--load" in sys.argv:
        load()
    else:
        run_study("loading", sys.argv[1:], cells, measure, summary, ATTEMPTS)
