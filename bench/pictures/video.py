"""Clips by several ranks in pipes: ``make bench-video``.

A cell is one run of ``thinwire generate`` with ``wan-fashion``, in which all ways of its group take turns,
from one noise; all are held against one machine's clip. Only ``links`` has times; its networks are emulated.
``python -m bench.pictures.video [GROUP] [LINK] [seed=N]``: the cells that have these words.

- ``bits``: how many bits a value, against float16;
- ``patches``: into how many parts a clip is cut, and whether along time or space;
- ``memory``: what residuals are of, how the first steps are sent, whether frames are coded one by one;
- ``four``: four ranks with a block each, which share the cores;
- ``links``: pipes beside the other ways, over slow links.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from bench.pictures.diffusion import LINKS, SEEDS, UNLIMITED, Cell, Group, generated, joined
from bench.study.cells import Kept, run_study
from thinwire.uses.pictures.run.options import WAN

KEPT = Kept("video")
FP16, OURS = "pipe-fp16", "compact-pipe"
BITS = (FP16, *(f"{OURS}:bits={bits}" for bits in (2, 3, 4, 8)))
WAYS = {
    "bits": BITS,
    "patches": (
        *(f"{way}:patches={many}" for way in (FP16, OURS) for many in (2, 4, 8)),
        *(f"{way}:over=space{more}" for way in (FP16, OURS) for more in ("", ",patches=8")),
    ),
    "memory": (
        OURS,
        *(f"{OURS}:{how}" for how in ("order=1", "early=0", "chain=0", "warmup=2", "warmup=4")),
        *(f"{OURS}:bits=3,{how}" for how in ("chain=0", "early=0")),
        f"{FP16}:warmup=4",
    ),
    "four": (*BITS[:4], f"{OURS}:patches=8", "compact"),
    "links": ("one", "fp16", "compact", "latent", FP16, OURS, f"{OURS}:bits=2"),
}
GROUPS = {
    name: Group(
        {way: way for way in ways},
        ("100mbit", "20mbit") if name == "links" else (UNLIMITED,),
        {"model": WAN, "ranks": 4 if name == "four" else 2},
        SEEDS[:1] if name == "four" else SEEDS,
    )
    for name, ways in WAYS.items()
}


def cells() -> Iterator[Cell]:
    """Yield all cells, one of each group at first."""
    every = [(seed, name, link) for name, g in GROUPS.items() for link in g.links for seed in g.seeds]
    yield from (Cell(name, link, seed) for seed, name, link in sorted(every, key=lambda cell: cell[0]))


def measure(cell: Cell) -> dict[str, Any]:
    """Run a cell; return the figures of each way by its label."""
    group = GROUPS[cell.group]
    options = {"link": LINKS[cell.link], "emulate": cell.link != UNLIMITED, "seed": cell.seed}
    return {"ways": generated(group.ways, **options, **group.options)}


def summary() -> dict[str, Any]:
    """Return for each group, link and way: medians of seconds, means of quality, bytes, memory."""
    rows = []
    for name, group in GROUPS.items():
        for link in group.links:
            kept = [KEPT.get(Cell(name, link, seed)) for seed in group.seeds]
            found = [cell["ways"] for cell in kept if cell]
            for label in group.ways if found else ():
                of_way = [f[label] for f in found]
                rows.append({"group": name, "link": link, "way": label} | joined(of_way) | _more(of_way))
    return {"links": {link: LINKS[link] for g in GROUPS.values() for link in g.links}, "rows": rows}


def _more(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what only clips are asked for."""
    db = [f["quality"]["flicker_db"] for f in found if f["quality"]["flicker_db"] is not None]
    return {"flicker_db": sum(db) / len(db) if db else None, "memory": found[0]["memory"]}


if __name__ == "__main__":
    run_study("video", sys.argv[1:], cells, measure, summary)
