"""What following a model costs: bytes, speed, the consumer's pause, age over slow links, one uplink for many.

Run ``python -m bench.following.costs`` (``make bench-state``); given words (``coding``, ``age``, ``others``,
``feed``, a rate such as ``1e-06``), the cells that have them all. About 85 minutes on two quiet cores. Three
training runs of SmolLM2-135M, one a learning rate, are recorded in a scratch folder (some GB, dropped at the
end) and replayed by every cell. Cells are kept, so it goes on where it was stopped.
"""

from __future__ import annotations

import shutil
import statistics
import sys
from collections.abc import Iterator
from typing import Any

from bench.following import coding, links, others
from bench.following.recording import BATCH, DATA, LONG, MODEL, RATES, SEQ, STEPS, in_process, scratch
from bench.study.cells import Kept, makers, missing, run_study

KEPT = Kept("state")
EVERY = (1, 4, 16)
GOALS = {(1e-6, 1): 400.0, (1e-6, 16): 100.0}  # times fewer bytes than bf16 whole
FEWER = 0.10  # bytes than the best rival
FAST, FAST_SHARE, SLOW = 1.0, 0.02, 0.4  # GB/s of bf16 input where at most that share changed, and elsewhere
PAUSE = 0.05  # seconds
Words = tuple[str, ...]


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
        return coding.measure(folder, float(rest[0]), int(rest[1].removeprefix("every-")))
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
    return statistics.median(r[coding.OURS]["bytes"] for r in found["versions"])


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
    ours = [r[coding.OURS] for r in rows]
    pauses = [r["pause"] for r in ours]
    rivals = {n: w["bytes"] for n, w in ways.items() if n not in (coding.OURS, coding.PLAIN)}
    best = min(rivals, key=lambda n: rivals[n])
    mine = ways[coding.OURS]
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


if __name__ == "__main__":
    run_study("state", sys.argv[1:], cells, measure, summary)
    if not missing("state", cells()):
        shutil.rmtree(scratch(), ignore_errors=True)
