"""Every way to make a picture over every link: ``make bench-diffusion``.

A cell is one run of ``thinwire generate`` in which all ways of its group take turns, from one noise. Times
are medians over the seeds, three in the main groups; networks are emulated.

Groups of ways:

- ``two``: two ranks, guidance off, over every link;
- ``four``: four ranks, which share two cores: bytes and pictures only;
- ``coding``: what residuals, orders and warm-ups are worth: pictures only;
- ``guided``: two forward passes a step; ``several``: two pictures.

``python -m bench.pictures.diffusion [GROUP] [LINK] [seed=N]``: the cells that have these words.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

from bench.study.cells import Kept, run_study
from thinwire.uses.kinds import load_run
from thinwire.uses.pictures.run.generation import launch
from thinwire.uses.pictures.run.options import PicturesConfig

KEPT = Kept("diffusion")
SEEDS = (0, 1, 2)
UNLIMITED, ANCHOR = "unlimited", "100mbit"
LINKS = {UNLIMITED: "none", "1gbit": "1gbit,1ms", ANCHOR: "100mbit,5ms", "20mbit": "20mbit,20ms"}
CODED = {
    "attention": "Coding(Scheme({codec}{change}, keyframe=Cast('float16')), 1)",
    "output": "Coding(Scheme(Uniform(6, scale='token'), Delta(), keyframe=Cast('float16')), 1)",
}


def coded(codec: str, residual: bool) -> str:
    """Return the spec that sends keys and values by a codec: what has changed in them, or as they are."""
    change = ", Delta()" if residual else ""
    return ", ".join(f"{role}={text.format(codec=codec, change=change)}" for role, text in CODED.items())


WAYS = {name: name for name in (
    "one", "fp16", "int8", "displaced", "ulysses", "pipe-fp16", "lowrank", "compact", "compact:bits=2",
    "compact-pipe",
)}  # fmt: skip
CODING = {
    **{f"{label}, direct": coded(codec, False) for label, codec in (
        ("1 bit", "RankOne(1)"), ("2 bits", "RankOne(2)"), ("4 bits", "Uniform(4, group=64)"))},
    **{f"{label}, residual": coded(codec, True) for label, codec in (
        ("1 bit", "RankOne(1)"), ("2 bits", "RankOne(2)"), ("4 bits", "Uniform(4, group=64)"))},
    **{name: name for name in (
        "compact:order=1,early=0", "compact:early=0", "compact:order=1", "compact:bits=2,order=1,early=0",
        "compact:bits=2,early=0", "displaced:warmup=2", "compact:warmup=2", "displaced:warmup=4",
        "compact:warmup=4", "pipe-fp16:warmup=4", "compact-pipe:warmup=4", "compact-pipe:order=1,early=0",
        "compact-pipe:bits=2", "compact-pipe:bits=8",
    )},
}  # fmt: skip


class Group(NamedTuple):
    ways: dict[str, str]  # by label
    links: tuple[str, ...]
    options: dict[str, Any]
    seeds: tuple[int, ...] = SEEDS


GROUPS = {
    "two": Group(WAYS, tuple(LINKS), {}),
    "four": Group(  # six heads cannot be shared by four
        {name: way for name, way in WAYS.items() if name != "ulysses"}, (UNLIMITED,), {"ranks": 4}, SEEDS[:1]
    ),
    "coding": Group(CODING, (UNLIMITED,), {}),
    "guided": Group(
        {name: name for name in ("one", "guidance", "fp16", "compact", "compact-pipe")},
        (ANCHOR,),
        {"guidance": 3.0},
        SEEDS[:1],
    ),
    "several": Group(
        {name: name for name in ("one", "batch", "compact")}, (ANCHOR,), {"pictures": 2}, SEEDS[:1]
    ),
}


class Cell(NamedTuple):
    group: str
    link: str
    seed: int


def cells() -> Iterator[Cell]:
    """Yield all cells."""
    for name, group in GROUPS.items():
        for link in group.links:
            for seed in group.seeds:
                yield Cell(name, link, seed)


def measure(cell: Cell) -> dict[str, Any]:
    """Run a cell; return the figures of each way by its label."""
    group = GROUPS[cell.group]
    options = {"link": LINKS[cell.link], "emulate": cell.link != UNLIMITED, "seed": cell.seed}
    return {"ways": generated(group.ways, **options, **group.options)}


def generated(ways: dict[str, str], **options: Any) -> dict[str, Any]:
    """Run ``thinwire generate``, all ways in turn; return the figures of each by its label."""
    with tempfile.TemporaryDirectory() as out:
        folders = launch(PicturesConfig(recipes=shlex.join(ways.values()), out=out, quiet=True, **options))
        return {label: figures(load_run(f).to_dict()) for label, f in zip(ways, folders, strict=True)}


def figures(record: dict[str, Any]) -> dict[str, Any]:
    """Return what a cell keeps of a record."""
    names = ("mode", "ranks", "step_seconds", "bytes", "quality", "compute_s", "wait_s", "code_s", "memory")
    kept = {name: record[name] for name in (*names, "exchanges", "predicted_s")}
    return kept | {"seconds": record["totals"]["seconds"]}


def summary() -> dict[str, Any]:
    """Return for each group, link and way: medians of seconds, means of quality, and bytes."""
    rows = []
    for name, group in GROUPS.items():
        for link in group.links:
            kept = [KEPT.get(Cell(name, link, seed)) for seed in group.seeds]
            found = [cell["ways"] for cell in kept if cell]
            for label in group.ways if found else ():
                rows.append({"group": name, "link": link, "way": label} | joined([f[label] for f in found]))
    return {"links": LINKS, "rows": rows}


def joined(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a way's figures over all seeds."""
    db = [f["quality"]["psnr_db"] for f in found if f["quality"]["psnr_db"] is not None]
    return {
        "mode": found[0]["mode"],
        "seeds": len(found),
        "seconds": median(f["seconds"] for f in found),
        "step_seconds": median(f["step_seconds"] for f in found),
        "predicted_s": median(f["predicted_s"] for f in found if f["predicted_s"] is not None),
        "bytes": {key: median(f["bytes"][key] for f in found) for key in found[0]["bytes"]},
        "psnr_db": sum(db) / len(db) if db else None,
        "psnr_worst": min(db, default=None),
        "ssim": sum(f["quality"]["ssim"] for f in found) / len(found),
    }


if __name__ == "__main__":
    run_study("diffusion", sys.argv[1:], cells, measure, summary)
