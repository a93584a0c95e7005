"""A state of 1.2 G bfloat16 values published and applied, for ``sync_hosts``.

It is nine copies of the recorded model, each at another step of the recorded run: what a version changes is
where and how a training changes it, in nine steps at once.
"""

from __future__ import annotations

import gc
import os
import statistics
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.following.hosts.host_coding import timed
from bench.following.hosts.host_sources import Moving, same
from thinwire.state import native
from thinwire.state.history import History
from thinwire.state.layout import Layout, Slot
from thinwire.state.patches.patch import Patch
from thinwire.state.replica import Replica

COPIES, VERSIONS = 9, 6
PUBLISH, APPLY = 1.5, 1.0  # seconds: the goals
BUSY = 1.5  # times the cores: a load above that is other work, and the seconds are not this machine's
APART = 2  # steps between two copies


class Copies(Moving):
    """Copies of what moves, copy ``i`` of them ``i * APART`` steps ahead."""

    def __init__(self, source: Moving, copies: int) -> None:
        self._source, self._many = source, copies
        slots = (Slot(f"{i}.{s.name}", s.shape, s.kind) for i in range(copies) for s in source.layout.slots)
        words = np.empty(copies * source.words.size, np.int16)
        for i in range(copies):
            words[i * source.words.size : (i + 1) * source.words.size] = source.words
            for _ in range(APART):
                source.advance()
        super().__init__(Layout(tuple(slots)), words)
        self._known: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def flips(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        if step not in self._known:
            size, found = self._source.words.size, []
            for i in range(self._many):
                at, bits = self._source.flips(i * APART + step)
                found.append((at.astype(np.int64) + i * size, bits))
            self._known[step] = np.concatenate([a for a, _ in found]), np.concatenate([b for _, b in found])
        return self._known[step]

    def turn_back(self) -> None:
        """Go back to where it began."""
        for step in range(self.step, 0, -1):
            at, bits = self.flips(step)
            self.words[at] ^= bits
        self.step = 0


def large(source: Copies, versions: int = VERSIONS) -> dict[str, Any]:
    """Return bytes and seconds of so many versions on all cores: all are published, then all applied."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    load = os.getloadavg()[0]
    rows, packed = publish(source, versions)
    gc.collect()
    source.turn_back()
    replica = Replica(source.layout)
    replica.start(source.tensors)
    replica.swap()
    for row, data in zip(rows, packed, strict=True):
        _, row["apply"], row["apply_cpu"] = timed(partial(_apply, replica, data))
    for _ in range(versions):
        source.advance()
    if not same(source.tensors, replica.tensors()):
        raise SystemExit("thinwire: other words came out than went in")
    return {"numel": source.layout.numel, "versions": rows, "cores": len(os.sched_getaffinity(0)),
            "load": load, "compiled": native.there()}  # fmt: skip


def publish(source: Moving, versions: int) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Return what each version took, and what travels."""
    rows, packed = [], []
    history = History(source.layout)
    history.publish(source.tensors)
    for _ in range(versions):
        source.advance()
        base = history.newest.number
        version, publishing, published = timed(lambda: history.publish(source.tensors))
        data, making, made = timed(partial(_made, history, base))
        rows.append({"changed": version.changed, "bytes": len(data), "publish": publishing, "patch": making,
                     "publish_cpu": published, "patch_cpu": made})  # fmt: skip
        packed.append(data)
    return rows, packed


def _made(history: History, base: int) -> bytes:
    return history.patch(base).pack()


def _apply(replica: Replica, data: bytes) -> None:
    replica.apply(Patch.unpack(data))
    replica.swap()


def busy(found: dict[str, Any]) -> bool:
    """Return whether the machine had other work: what seconds say of a goal is nothing then."""
    return bool(found["load"] > BUSY * found["cores"])


def summed_up(found: dict[str, Any]) -> dict[str, Any]:
    """Return the summary of a cell: medians; the first version, whose memory is fresh, is left out."""
    rows = found["versions"][1:]
    middle = {k: statistics.median(r[k] for r in rows) for k in rows[0]}
    published = statistics.median(r["publish"] + r["patch"] for r in rows)
    worked = statistics.median(r["publish_cpu"] + r["patch_cpu"] for r in rows)
    about = {k: found[k] for k in ("numel", "cores", "load", "compiled")}
    met = {"publish": published <= PUBLISH, "apply": middle["apply"] <= APPLY}
    return {**about, **middle, "whole_publish": published, "whole_publish_cpu": worked,
            "met": {k: ok if ok or not busy(found) else None for k, ok in met.items()}}  # fmt: skip
