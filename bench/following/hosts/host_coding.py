"""Bytes and seconds of every way to send a version, in turn on the same weights, for ``sync_hosts``.

Weights are bfloat16 at both ends. Encoding begins at the trainer's tensors and ends at bytes; decoding begins
at bytes and ends where the weights are in place. For thinwire that includes content hashes at both ends, the
log for followers that are behind, and the follower's second buffer. All run on one core; seconds are of that
core, so what else the machine does counts little.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.following.hosts.host_formats import host_formats
from bench.following.hosts.host_sources import Moving, same, stepped
from bench.following.rivals import Rival
from thinwire.state import native
from thinwire.state.history import History
from thinwire.state.patches.patch import Patch
from thinwire.state.replica import Replica

OURS = "thinwire"


def timed(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """Return what a call returns, the seconds it took, and those of the processor."""
    gc.collect()
    began, worked = time.perf_counter(), time.process_time()
    found = work()
    worked, took = time.process_time() - worked, time.perf_counter() - began
    return found, took, worked


class Sender:
    """The trainer's end, by thinwire; version 1 is what the tensors are now."""

    def __init__(self, source: Moving) -> None:
        self._source, self._history = source, History(source.layout)
        self._history.publish(source.tensors)

    def encode(self) -> list[bytes]:
        """Return what travels."""
        base = self._history.newest.number
        self._history.publish(self._source.tensors)
        return [self._history.patch(base).pack()]


class Taker:
    """The worker's end, by thinwire, which has the weights at the start."""

    def __init__(self, source: Moving) -> None:
        self._replica = Replica(source.layout)
        self._replica.start(source.tensors)
        self._replica.swap()

    def decode(self, parts: list[bytes]) -> None:
        """Bring the weights forward."""
        self._replica.apply(Patch.unpack(parts[0]))
        self._replica.swap()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the weights."""
        return self._replica.tensors()


class PlainSender:
    """The trainer's end of another way. The words before each version are kept by whoever calls."""

    def __init__(self, source: Moving, way: Rival, before: np.ndarray) -> None:
        self._source, self._way, self._before = source, way, before

    def encode(self) -> list[bytes]:
        """Return what travels."""
        return self._way.pack(self._source.words, self._before)


def code(source: Moving, steps: int, tried: int) -> dict[str, Any]:
    """Return bytes and seconds of ``steps`` versions by thinwire, and of each ``tried``-th by the others."""
    torch.set_num_threads(1)
    others = host_formats(source.layout)
    sender, taker, before = Sender(source), Taker(source), source.words.copy()
    held, rows = np.empty_like(before), []
    for number in stepped(source, steps):
        row: dict[str, Any] = {"changed": int(np.count_nonzero(source.words != before))}
        names = [OURS, *(others if number % tried == 0 or steps < tried else ())]
        for k in range(len(names)):
            name = names[(k + number) % len(names)]
            if name == OURS:
                row[name] = _pair(sender.encode, taker.decode)
            else:
                np.copyto(held, before)
                plain = PlainSender(source, others[name], before)
                row[name] = _pair(plain.encode, partial(others[name].decode, held=held))
                if not np.array_equal(held, source.words):
                    raise SystemExit(f"{name}: other words came out than went in")
        np.copyto(before, source.words)
        rows.append(row)
    if not same(source.tensors, taker.tensors()):
        raise SystemExit(f"{OURS}: other words came out than went in")
    return {"whole": source.layout.nbytes, "numel": source.layout.numel, "versions": rows,
            "compiled": native.there()}  # fmt: skip


def _pair(encode: Callable[[], list[bytes]], decode: Callable[[list[bytes]], None]) -> dict[str, float]:
    parts, encoding, encoded = timed(encode)
    _, decoding, decoded = timed(lambda: decode(parts))
    return {"bytes": sum(map(len, parts)), "encode": encoded, "decode": decoded,
            "encode_wall": encoding, "decode_wall": decoding}  # fmt: skip


@contextmanager
def on_one_core() -> Iterator[None]:
    """Let this process use one core alone, as long as the block lasts."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(mine)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)


def summed(found: dict[str, Any]) -> dict[str, Any]:
    """Return the summary of a cell: by way bytes a version (mean of all it sent), and seconds (medians)."""
    rows, ways = found["versions"], {}
    both = [r for r in rows if len(r) > 2]  # where all ways took turns
    for name in (k for k in both[0] if k != "changed"):
        own = [r[name] for r in both]
        seconds = {k: statistics.median(x[k] for x in own) for k in own[0] if k != "bytes"}
        ways[name] = {"bytes": statistics.fmean(x["bytes"] for x in own), **seconds}
    best = min((n for n in ways if n != OURS), key=lambda n: ways[n]["bytes"])
    every = statistics.fmean(r[OURS]["bytes"] for r in rows)
    share = statistics.fmean(r["changed"] for r in rows) / found["numel"]
    return {"whole": found["whole"], "numel": found["numel"], "versions": len(rows), "compared": len(both),
            "changed": share, "ways": ways, "best_other": best, "bytes_of_all": every,
            "share": ways[OURS]["bytes"] / ways[best]["bytes"]}  # fmt: skip
