"""Bytes and speed of one cell of ``costs``: a learning rate and a publishing interval, one thread.

All ways to send a version take turns on the same weights. Encoding begins at the trainer's fp32 tensors and
ends at bytes; decoding begins at bytes and ends where the words are in place. For thinwire that includes the
log that lets followers be behind, the content hash at both ends, and the follower's second buffer.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.following.recording import MODEL, Recording, Replay
from bench.following.rivals import Rival, rivals
from thinwire.runs.models.source import resolve_model
from thinwire.state import native
from thinwire.state.history import History
from thinwire.state.patches.patch import Patch
from thinwire.state.replica import Replica
from thinwire.uses.following.run.job import base_model

OURS, PLAIN = "thinwire", "thinwire, numpy"  # with compiled passes where there are any, and without
MEASURED = 16  # versions of a cell that all ways are tried on, at most


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return what a call returns, and the seconds it took."""
    began = time.perf_counter()
    found = work()
    return found, time.perf_counter() - began


class Ours:
    """Both ends of thinwire, with a model that uses what comes; or without the ``compiled`` passes."""

    def __init__(self, replay: Replay, model: torch.nn.Module, compiled: bool) -> None:
        self._replay, self._compiled = replay, compiled
        self._history = History(replay.recording.layout)
        self._history.publish(replay.tensors)
        self._replica = Replica(replay.recording.layout)
        half = torch.from_numpy(replay.recording.base).view(torch.bfloat16)
        self._replica.start(replay.recording.views(half))
        self._replica.swap()
        self._replica.bind(model)
        self._replica.confirm(self._history.newest)

    def __call__(self) -> dict[str, float]:
        """Publish, send and take one version."""
        with nullcontext() if self._compiled else native.without():
            return self._send()

    def _send(self) -> dict[str, float]:
        base = self._history.newest.number
        version, publish = timed(lambda: self._history.publish(self._replay.tensors, {"step": base}))
        packed, code = timed(lambda: self._history.patch(base).pack())
        _, apply = timed(lambda: self._replica.apply(Patch.unpack(packed)))
        self._replica.swap()
        times = {"publish": publish, "code": code, "pause": self._replica.pause}
        return {"bytes": len(packed), "encode": publish + code, "decode": apply,
                "changed": version.changed} | times  # fmt: skip

    def right(self) -> bool:
        """Say whether the follower's tensors are the trainer's, bit for bit."""
        held = self._replica.tensors()
        return all(torch.equal(x.bfloat16().view(torch.int16), held[name].view(torch.int16))
                   for name, x in self._replay.tensors.items())  # fmt: skip


def theirs(rival: Rival, replay: Replay, before: np.ndarray, held: np.ndarray) -> dict[str, float]:
    """Send one version as a rival does."""
    np.copyto(held, before)
    parts, encode = timed(lambda: rival.encode(replay.tensors, before))
    _, decode = timed(lambda: rival.decode(parts, held))
    assert np.array_equal(held, replay.words), rival.name
    return {"bytes": sum(map(len, parts)), "encode": encode, "decode": decode}


def measure(folder: Path, rate: float, every: int) -> dict[str, Any]:
    """Return the rows of a cell, one a version that all ways were tried on."""
    torch.set_num_threads(1)
    recording = Recording(folder, rate)
    replay, others = Replay(recording), rivals(recording.layout)
    model = base_model(resolve_model(MODEL, None), torch.bfloat16)
    ours = {name: Ours(replay, model, name == OURS) for name in (OURS, PLAIN)}
    held, rows = np.empty_like(replay.words), []
    count = recording.steps // every
    for number in range(count):
        before = replay.words.copy()
        replay.advance(every)
        row: dict[str, Any] = {"step": replay.step}
        if number % -(-count // MEASURED) == 0:
            ways: list[Callable[[], dict[str, float]]] = list(ours.values())
            ways += [partial(theirs, r, replay, before, held) for r in others]
            names = [*ours, *(r.name for r in others)]
            for i in range(len(ways)):
                k = (i + number) % len(ways)
                row[names[k]] = ways[k]()
                gc.collect()
            rows.append(row)
            print(f"{rate:g}, every {every}: {_line(row)}", flush=True)
        else:
            for each in ours.values():
                each()
    assert all(each.right() for each in ours.values())
    losses = [s["loss"] for s in recording.about["steps"]]
    return {"rate": rate, "every": every, "whole": recording.layout.nbytes, "versions": rows,
            "numel": recording.layout.numel, "losses": losses, "compiled": native.there()}  # fmt: skip


def _line(row: dict[str, Any]) -> str:
    mine = row[OURS]
    best = min(v["bytes"] for k, v in row.items() if isinstance(v, dict) and k not in (OURS, PLAIN))
    return (
        f"step {row['step']}: {mine['changed']} changed, {mine['bytes']} bytes, best other {best}; "
        f"{mine['publish']:.3f} + {mine['code']:.3f} s, {mine['decode']:.3f} s, {mine['pause'] * 1e3:.1f} ms"
    )
