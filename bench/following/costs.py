"""What following a model costs: bytes, speed, the consumer's pause, age over slow links, one uplink for many.

Run ``python -m bench.following.costs`` (``make bench-state``); given words (``coding``, ``age``, ``others``,
``feed``, a rate such as ``1e-06``), the cells that have them all. About 85 minutes on two quiet cores. Three
training runs of SmolLM2-135M, one a learning rate, are recorded in a scratch folder (some GB, dropped at the
end) and replayed by every cell. A finished cell is kept in ``bench/results/state/``, so it goes on where it
was stopped; the summary is ``bench/results/state.json``.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.following import coding as state_coding
from bench.following import links as state_links
from bench.following import others as state_others
from bench.following.recording import BATCH, DATA, LONG, MODEL, RATES, SEQ, STEPS, in_process, scratch
from bench.study.cells import RESULTS, check_words, keep, makers
from thinwire.runs.records.writer import write_json
from thinwire.types import ThinwireError

CELLS = RESULTS / "state"
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
    for mbit, rate, stride, pace, _, controls in state_links.AGES:
        yield from (("age", f"{mbit}mbit", f"{rate:g}", f"stride-{stride}", pace, c) for c in controls)
    for mbit in state_links.MBITS:
        yield from (("others", f"{mbit}mbit", f"{rate:g}") for rate in RATES)
    for kind in state_links.FEEDS:
        yield "feed", kind


def cell_file(cell: Words) -> Path:
    """Return where a cell is kept."""
    return CELLS / f"{'-'.join(cell)}.json"


def measure(cell: Words, folder: Path) -> Any:
    """Return what a cell finds."""
    kind, *rest = cell
    if kind == "coding":
        return state_coding.measure(folder, float(rest[0]), int(rest[1].removeprefix("every-")))
    if kind == "feed":
        return state_links.feed(folder, rest[0])
    mbit, rate = int(rest[0].removesuffix("mbit")), float(rest[1])
    if kind == "others":
        return state_others.age(folder, mbit, rate)
    _, _, steps, pace, control = rest
    stride = int(steps.removeprefix("stride-"))
    seconds = next(a[4] for a in state_links.AGES if a[:4] == (mbit, rate, stride, pace))
    return state_links.age(folder, mbit, rate, stride, pace, seconds, control, expected(rate, stride))


def expected(rate: float, stride: int) -> float:
    """Return the bytes that a version takes, from the coding cell of the same rate."""
    file = cell_file(("coding", f"{rate:g}", f"every-{stride}"))
    if not file.exists():
        raise SystemExit(f"{file.name} must be measured first")
    rows = json.loads(file.read_text())["versions"]
    return statistics.median(r[state_coding.OURS]["bytes"] for r in rows)


def recordings_of(cell: Words) -> list[tuple[float, int]]:
    """Return rate and steps of the recordings that a cell replays."""
    rates = [state_links.FEED_RATE] if cell[0] == "feed" else [r for r in RATES if f"{r:g}" in cell]
    return [(rate, state_links.steps(cell)) for rate in rates]


def coded(found: dict[str, Any]) -> dict[str, Any]:
    """Return the summary of a coding cell: bytes a version (mean), ratios, GB/s of bf16 input (median)."""
    rows, whole = found["versions"], found["whole"]
    names = [k for k, v in rows[0].items() if isinstance(v, dict)]
    ways = {}
    for name in names:
        nbytes = statistics.fmean(r[name]["bytes"] for r in rows)
        speeds = {k: whole / 1e9 / statistics.median(r[name][k] for r in rows) for k in ("encode", "decode")}
        ways[name] = {"bytes": nbytes, "ratio": whole / nbytes, **speeds}
    ours = [r[state_coding.OURS] for r in rows]
    pauses = [r["pause"] for r in ours]
    others = {n: w["bytes"] for n, w in ways.items() if n not in (state_coding.OURS, state_coding.PLAIN)}
    best = min(others, key=lambda n: others[n])
    mine = ways[state_coding.OURS]
    parts = {k: statistics.median(r[k] for r in ours) for k in ("publish", "code")}
    changed = statistics.fmean(r["changed"] for r in ours) / found["numel"]
    wanted = FAST if changed <= FAST_SHARE else SLOW
    goal = GOALS.get((found["rate"], found["every"]))
    return {
        "rate": found["rate"], "every": found["every"], "compiled": found["compiled"],
        "versions": len(rows), "changed": changed,
        "changed_last": ours[-1]["changed"] / found["numel"], "ways": ways, "best_other": best,
        "fewer": 1 - mine["bytes"] / others[best], "parts_s": parts,
        "pause": {"median": statistics.median(pauses), "worst": max(pauses)},
        "met": {"ratio": goal is None or mine["ratio"] >= goal,
                "fewer": mine["bytes"] <= (1 - FEWER) * others[best],
                "speed": min(mine["encode"], mine["decode"]) >= wanted, "pause": max(pauses) < PAUSE},
    }  # fmt: skip


TIMED = {  # what the summary has of a cell over a link
    "age": ("mbit", "rate", "stride", "pace", "control", "summary"),
    "others": ("mbit", "rate", "control", "rows"),
}


def summarise() -> dict[str, Any]:
    """Return what all finished cells say, and which are missing."""
    found: dict[str, Any] = {"coding": [], "age": [], "others": [], "feed": [], "missing": []}
    read: list[dict[str, Any]] = []
    for cell in cells():
        file = cell_file(cell)
        if not file.exists():
            found["missing"].append(" ".join(cell))
            continue
        data = json.loads(file.read_text())
        read.append(data)
        if cell[0] == "coding":
            found["coding"].append(coded(data))
        elif cell[0] in TIMED:
            about = {k: data[k] for k in TIMED[cell[0]]}
            found[cell[0]].append(about | {"valid": data["network"]["valid"]})
        else:
            found["feed"].append({k: v for k, v in data.items() if k != "made"})
    job = {"model": MODEL, "data": DATA, "batch": BATCH, "seq": SEQ, "steps": STEPS, "long": LONG}
    return {"made_by": makers(read), "job": job, **found}


def main(wanted: list[str]) -> None:
    """Measure what is missing of the wanted cells, and write the summary."""
    check_words(wanted, cells())
    folder, failed = scratch(), []
    for cell in cells():
        if cell_file(cell).exists() or not set(wanted) <= set(cell):
            continue
        print(*cell, "...", file=sys.stderr, flush=True)
        for rate, steps in recordings_of(cell):
            in_process(folder, rate, steps)
        try:
            keep(cell_file(cell), measure(cell, folder))
        except ThinwireError as e:
            print(f"{' '.join(cell)}: {e}", file=sys.stderr, flush=True)
            failed.append(" ".join(cell))
        write_json(RESULTS / "state.json", summarise())
    found = summarise()
    write_json(RESULTS / "state.json", found)
    if not found["missing"]:
        shutil.rmtree(folder, ignore_errors=True)
    elif folder.exists():
        print(f"the recordings stay in {folder} until all is measured", file=sys.stderr)
    if failed:
        raise SystemExit(f"not measured: {'; '.join(failed)}")


if __name__ == "__main__":
    main(sys.argv[1:])
