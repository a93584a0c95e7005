"""Weight updates where rollouts happen: thinwire beside what the hosts send today, in one table.

``python -m bench.following.hosts.sync_hosts`` (``make bench-sync-hosts``); given words (``coding``, ``loop``,
a rate such as ``1e-06``, a line such as ``20mbit``), the cells that have them all; with ``--smoke`` it tries
all on a model of a few thousand values and keeps nothing. Cells of fewer than 48 recorded steps are measured
anew, and so are seconds of ``large`` and ``loop`` that were taken beside other work; ``--steps=22`` is
content with so many. About an hour on two quiet cores, half of it to record three training runs of
SmolLM2-135M (``recording``), which are left in the scratch folder.

- ``coding``: bytes and seconds of all ways, in turn, over 48 steps at a rate, or of a model with experts of
  which 5 % change at random;
- ``memory``: the peak of each end of each way;
- ``loop``: tokens a second, waiting and ages of the whole loop over a line;
- ``versions``: a hundred of them with two restarts at each side; ``large``: 1.2 G values on all cores.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

from bench.following.hosts.host_coding import OURS, code, on_one_core, summed
from bench.following.hosts.host_formats import host_formats
from bench.following.hosts.host_loop import LINES, PACE, PROMPTS, TOKENS, loop, told
from bench.following.hosts.host_memory import memory
from bench.following.hosts.host_sources import EXPERTS, Experts, moving
from bench.following.hosts.hundred_versions import hundred
from bench.following.hosts.large_state import COPIES, Copies, busy, large, summed_up
from bench.following.recording import BATCH, DATA, MODEL, SEQ, STEPS, in_process, scratch
from bench.study.cells import Kept, makers, run_study
from thinwire.state import native
from thinwire.state.patches.patch import FORMAT

STUDY = "sync_hosts"
KEPT = Kept(STUDY)
RATES = ("1e-06", "3e-06", "1e-05")
TRIED = 3  # all ways take turns on each third version
LOOPS = ("1e-06", "1e-05")
OTHER = "best-other"
MAX_AGES = {"20mbit": (0, 1), "100mbit": (0,)}  # where weights travel in no time, age saves next to none
LONG = "1e-06"  # the rate of a hundred versions, and of the large state
THIRD = 1 / 3  # of the bytes of the best of the others: the goal
Words = tuple[str, ...]


def cells() -> Iterator[Words]:
    """Yield the words of every cell, those first that others need."""
    for kind in (EXPERTS, *RATES):
        yield "coding", kind
    yield "versions", LONG
    yield "large", LONG
    for line in LINES:
        for rate, max_age in product(LOOPS, MAX_AGES[line]):
            yield from (("loop", line, rate, f"max-age-{max_age}", way) for way in (OURS, OTHER))
    for kind in (EXPERTS, *RATES):
        yield "memory", kind


def measure(cell: Words, steps: int = STEPS) -> dict[str, Any]:
    """Record what a cell replays, unless it is there; return what it finds, and how many steps that has."""
    folder, kind = scratch(), cell[2 if cell[0] == "loop" else 1]
    if kind == EXPERTS:
        steps = STEPS
    else:
        in_process(folder, float(kind), steps)
    return measured(cell, kind, steps) | {"steps": steps, "format": FORMAT, "native": native.there()}


def measured(cell: Words, kind: str, steps: int) -> dict[str, Any]:
    """Return what a cell finds."""
    folder = scratch()
    make = partial(moving, kind, folder, steps)
    if cell[0] == "coding":
        with on_one_core():
            return code(make(), steps, TRIED)
    if cell[0] == "memory":
        with on_one_core():
            return {"peak": memory(make, [OURS, *host_formats(make().layout)])}
    if cell[0] == "versions":
        return hundred(make())
    if cell[0] == "large":
        return large(Copies(make(), COPIES))
    _, line, rate, max_age, way = cell
    sent = OURS if way == OURS else best_other(rate)
    return loop(rate, folder, steps, line, sent, int(max_age.removeprefix("max-age-")))


def best_other(kind: str) -> str:
    """Return which of the others sends the fewest bytes, from the coding cell."""
    if (found := KEPT.get("coding", kind)) is None:
        raise SystemExit(f"coding {kind} must be measured first")
    return str(summed(found)["best_other"])


def summary() -> dict[str, Any]:
    """Return what all finished cells say."""
    known = {cell: data for cell in cells() if (data := KEPT.get(cell))}
    coding = [{"of": c[1]} | summed(d) for c, d in known.items() if c[0] == "coding"]
    for row in coding:
        row["met"] = row["share"] <= THIRD
        row["peak"] = (known.get(("memory", row["of"])) or {}).get("peak")
    loops = [{k: d[k] for k in ("line", "way", "max_age")} | {"rate": c[2]} | told(d)
             for c, d in known.items() if c[0] == "loop"]  # fmt: skip
    versions, big = (known.get((kind, LONG)) for kind in ("versions", "large"))
    job = {"model": MODEL, "data": DATA, "batch": BATCH, "seq": SEQ, "steps": STEPS, "pace": PACE,
           "prompts": PROMPTS, "tokens": TOKENS}  # fmt: skip
    return {"made_by": makers(known.values()), "job": job, "coding": coding, "loops": loops,
            "versions": versions, "large": big and summed_up(big)}  # fmt: skip


def smoke() -> dict[str, Any]:
    """Return what every part but the loop says of a model of a few thousand values."""
    return {
        "coding": summed(code(Experts(small=True), 4, 2)),
        "memory": memory(partial(Experts, small=True), [OURS, "vllm sparse"]),
        "versions": hundred(Experts(small=True), 4),
        "large": summed_up(large(Copies(Experts(small=True), 2), 2)),
    }


def stale(steps: int, cell: Words, found: dict[str, Any]) -> bool:
    """Return whether a cell is to be measured anew: fewer steps, an older format, or beside other work."""
    if found.get("format") != FORMAT or not found["native"]:
        return True
    beside = busy(found) if cell[0] == "large" else cell[0] == "loop" and bool(told(found)["busy"])
    return int(found.get("steps", STEPS)) < steps or beside


def main(words: list[str]) -> None:
    """Measure the missing cells, and those of fewer steps than wanted."""
    asked = [int(word.removeprefix("--steps=")) for word in words if word.startswith("--steps=")]
    steps = min([*asked, STEPS])
    chosen = [word for word in words if not word.startswith("--steps=")]
    run_study(STUDY, chosen, cells, partial(measure, steps=steps), summary, stale=partial(stale, steps))


if __name__ == "__main__":
    if "--smoke" in sys.argv[1:]:
        print(json.dumps(smoke(), indent=1))
    else:
        main(sys.argv[1:])
