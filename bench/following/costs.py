"""What following a model costs: bytes, speed, the consumer's pause, age over slow links, one uplink for many.

Run ``python -m bench.following.costs`` (``make bench-state``); given words (``coding``, ``age``, ``others``,
``feed``, a rate such as ``1e-06``), the cells that have them all. About 85 minutes on two quiet cores. Three
training runs of SmolLM2-135M, one a learning rate, are recorded in a scratch folder (some GB, dropped at the
end) and replayed by every cell. Cells are kept, so it goes on where it was stopped.

Coding: all ways to send a version take turns on the same weights. Encoding begins at the trainer's fp32
tensors and ends at bytes; decoding begins at bytes and ends where the words are in place. For thinwire that
includes the log for followers that are behind, content hashes at both ends, and the follower's second buffer.
"""

from __future__ import annotations

import gc
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.following import links, others
from bench.following.recording import (
    BATCH,
    DATA,
    LONG,
    MODEL,
    RATES,
    SEQ,
    STEPS,
    Recording,
    Replay,
    in_process,
    scratch,
)
from bench.following.rivals import Rival, rivals
from bench.study.cells import Kept, makers, missing, run_study
from thinwire.runs.models.model_source import resolve_model
from thinwire.state import native
from thinwire.state.history import History
from thinwire.state.patches.patch import Patch
from thinwire.state.replica import Replica
from thinwire.uses.following.run.demo_ranks import base_model

KEPT = Kept("state")
EVERY = (1, 4, 16)
GOALS = {(1e-6, 1): 400.0, (1e-6, 16): 100.0}  # times fewer bytes than bf16 whole
FEWER = 0.10  # bytes than the best rival
FAST, FAST_SHARE, SLOW = 1.0, 0.02, 0.4  # GB/s of bf16 input where at most that share changed, and elsewhere
PAUSE = 0.05  # seconds
Words = tuple[str, ...]
OURS, PLAIN = "thinwire", "thinwire, numpy"  # with compiled passes where there are any, and without
MEASURED = 16  # versions of a cell that all ways are tried on, at most


def cells() -> Iterator[Words]:
    """Yield the words of every cell, those first that others need."""
    for rate in RATES:
        for every in EVERY:
            yield "coding", f"{rate:g}", f"every-{every}"
    for mbit, rate, stride, pace, _, controls in links.AGES:
        yield from (("age", f"{mbit}mbit", f"{rate:g}", f"stride-{stride}", pace, c) for c in controls)
    for mbit in links.MBITS:
        yield from (("others", f"{mbit}mbit", f"{rate:g}") for rate in RATES)
    for kind in links.FEEDS:
        yield "feed", kind


def measure(cell: Words) -> dict[str, Any]:
    """Record what a cell replays, unless it is there, and return what it finds."""
    folder = scratch()
    for rate, steps in recordings_of(cell):
        in_process(folder, rate, steps)
    kind, *rest = cell
    if kind == "coding":
        return code(folder, float(rest[0]), int(rest[1].removeprefix("every-")))
    if kind == "feed":
        return links.feed(folder, rest[0])
    mbit, rate = int(rest[0].removesuffix("mbit")), float(rest[1])
    if kind == "others":
        return others.age(folder, mbit, rate)
    _, _, steps, pace, control = rest
    stride = int(steps.removeprefix("stride-"))
    seconds = next(a[4] for a in links.AGES if a[:4] == (mbit, rate, stride, pace))
    return links.age(folder, mbit, rate, stride, pace, seconds, control, expected(rate, stride))


def expected(rate: float, stride: int) -> float:
    """Return the bytes that a version takes, from the coding cell of the same rate."""
    cell = ("coding", f"{rate:g}", f"every-{stride}")
    if (found := KEPT.get(cell)) is None:
        raise SystemExit(f"{' '.join(cell)} must be measured first")
    return statistics.median(r[OURS]["bytes"] for r in found["versions"])


def recordings_of(cell: Words) -> list[tuple[float, int]]:
    """Return rate and steps of the recordings that a cell replays."""
    rates = [links.FEED_RATE] if cell[0] == "feed" else [r for r in RATES if f"{r:g}" in cell]
    return [(rate, links.steps(cell)) for rate in rates]


def coded(found: dict[str, Any]) -> dict[str, Any]:
    """Return the summary of a coding cell: bytes a version (mean), ratios, GB/s of bf16 input (median)."""
    rows, whole = found["versions"], found["whole"]
    names = [k for k, v in rows[0].items() if isinstance(v, dict)]
    ways = {}
    for name in names:
        nbytes = statistics.fmean(r[name]["bytes"] for r in rows)
        speeds = {k: whole / 1e9 / statistics.median(r[name][k] for r in rows) for k in ("encode", "decode")}
        ways[name] = {"bytes": nbytes, "ratio": whole / nbytes, **speeds}
    ours = [r[OURS] for r in rows]
    pauses = [r["pause"] for r in ours]
    rivals = {n: w["bytes"] for n, w in ways.items() if n not in (OURS, PLAIN)}
    best = min(rivals, key=lambda n: rivals[n])
    mine = ways[OURS]
    parts = {k: statistics.median(r[k] for r in ours) for k in ("publish", "code")}
    changed = statistics.fmean(r["changed"] for r in ours) / found["numel"]
    wanted = FAST if changed <= FAST_SHARE else SLOW
    goal = GOALS.get((found["rate"], found["every"]))
    return {
        "rate": found["rate"], "every": found["every"], "compiled": found["compiled"],
        "versions": len(rows), "changed": changed,
        "changed_last": ours[-1]["changed"] / found["numel"], "ways": ways, "best_other": best,
        "fewer": 1 - mine["bytes"] / rivals[best], "parts_s": parts,
        "pause": {"median": statistics.median(pauses), "worst": max(pauses)},
        "met": {"ratio": goal is None or mine["ratio"] >= goal,
                "fewer": mine["bytes"] <= (1 - FEWER) * rivals[best],
                "speed": min(mine["encode"], mine["decode"]) >= wanted, "pause": max(pauses) < PAUSE},
    }  # fmt: skip


TIMED = {  # what the summary has of a cell over a link
    "age": ("mbit", "rate", "stride", "pace", "control", "summary"),
    "others": ("mbit", "rate", "control", "rows"),
}


def summary() -> dict[str, Any]:
    """Return what all finished cells say."""
    found: dict[str, Any] = {"coding": [], "age": [], "others": [], "feed": []}
    known = [(cell[0], data) for cell in cells() if (data := KEPT.get(cell))]
    for kind, data in known:
        if kind == "coding":
            found["coding"].append(coded(data))
        elif kind in TIMED:
            about = {k: data[k] for k in TIMED[kind]}
            found[kind].append(about | {"valid": data["network"]["valid"]})
        else:
            found["feed"].append({k: v for k, v in data.items() if k != "made"})
    job = {"model": MODEL, "data": DATA, "batch": BATCH, "seq": SEQ, "steps": STEPS, "long": LONG}
    return {"made_by": makers(data for _, data in known), "job": job, **found}


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


def code(folder: Path, rate: float, every: int) -> dict[str, Any]:
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


if __name__ == "__main__":
    run_study("state", sys.argv[1:], cells, measure, summary)
    if not missing("state", cells()):
        shutil.rmtree(scratch(), ignore_errors=True)
