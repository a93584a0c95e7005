"""Experts spread over ranks: bytes, seconds and pictures of each schedule: ``make bench-experts``.

A cell is one run of ``thinwire generate`` with flux-fashion-moe, in which all ways of its group take turns
from the same noise; in the group ``distance`` it is one way, over as many pictures as a distance needs. Each
cell is a file of its own, kept for good. Networks are emulated.

Groups of ways:

- ``two``: two ranks, over both links: seconds;
- ``four``: four ranks, which share two cores: bytes and PSNR against one device;
- ``parts``: each part of DICE left out, with and without residuals; four ranks;
- ``distance``: how far 2,048 pictures are from real garments, two sets of noise; four ranks.

``python -m bench.experts [GROUP] [LINK] [WAY] [seed=N]`` runs the cells alone whose names hold these words;
``--list`` prints their names.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from bench.cells import run_cells
from bench.diffusion import figures
from bench.garment_distance import APART, MANY, classes, reals, told
from thinwire.lab.engines import load_run
from thinwire.lab.pictures.flux_fashion_moe import NAME
from thinwire.lab.pictures.launch import launch
from thinwire.lab.pictures.options import PicturesConfig
from thinwire.lab.records.runs import slug
from thinwire.lab.records.writer import read_json, write_json

RESULT = Path(__file__).parent / "results" / "experts.json"
CELLS = RESULT.with_suffix("")
UNLIMITED = "unlimited"
LINKS = {UNLIMITED: "none", "100mbit": "100mbit,5ms", "20mbit": "20mbit,20ms"}
SEEDS, SETS = (0, 1, 2), (0, 1)
ONE, SYNC = "one", "ep-sync"
WAYS = (SYNC, "ep-displaced", "dice", "dice-residual")
AT_ONCE = 256  # pictures of a run in the group of distances


class Group(NamedTuple):
    ways: tuple[str, ...]
    links: tuple[str, ...]
    ranks: int
    seeds: tuple[int, ...]
    apart: bool = False  # whether each way has a cell of its own


# What to add to a way's name in order to leave a part of it out; filled in where recipes have them.
WITHOUT: dict[str, str] = {}
PARTS = tuple(f"{way}:{option}" for way in ("dice", "dice-residual") for option in WITHOUT.values())

GROUPS = {
    "two": Group((ONE, *WAYS), ("100mbit", "20mbit"), 2, SEEDS),
    "four": Group((ONE, *WAYS), (UNLIMITED,), 4, SEEDS[:1]),
    "parts": Group(("dice", "dice-residual", *PARTS), (UNLIMITED,), 4, SEEDS[:1]),
    "distance": Group(WAYS, (UNLIMITED,), 4, SETS, apart=True),
}


class Cell(NamedTuple):
    group: str
    link: str
    seed: int
    ways: tuple[str, ...]

    @property
    def name(self) -> str:
        way = [slug(self.ways[0])] if GROUPS[self.group].apart else []
        return "-".join([self.group, slug(self.link), *way, str(self.seed)])

    @property
    def words(self) -> tuple[str, ...]:
        return self.group, self.link, *self.ways, f"seed={self.seed}"


def cells() -> Iterator[Cell]:
    """Yield all cells."""
    for name, group in GROUPS.items():
        for link in group.links:
            for seed in group.seeds:
                for ways in [(way,) for way in group.ways] if group.apart else [group.ways]:
                    yield Cell(name, link, seed, ways)


def config_of(cell: Cell, out: str) -> PicturesConfig:
    """Return the run of a cell, the first one of a set of pictures."""
    apart = GROUPS[cell.group].apart
    return PicturesConfig(
        recipes=shlex.join(cell.ways),
        model=NAME,
        sheet="1x1",
        pictures=AT_ONCE if apart else 32,
        link=LINKS[cell.link],
        emulate=cell.link != UNLIMITED,
        ranks=GROUPS[cell.group].ranks,
        seed=cell.seed * APART if apart else cell.seed,
        out=out,
        quiet=True,
    )


def measure(cell: Cell) -> dict[str, Any]:
    """Run a cell; return the figures of each way, and the distance where it is measured."""
    with tempfile.TemporaryDirectory() as out:
        config = config_of(cell, out)
        if not GROUPS[cell.group].apart:
            records = [load_run(folder).to_dict() for folder in launch(config)]
            return {"ways": {w: figures(r) for w, r in zip(cell.ways, records, strict=True)}}
        parts, found = list[Tensor](), list[dict[str, Any]]()
        for first in range(0, MANY, AT_ONCE):
            [folder] = launch(replace(config, seed=config.seed + first))
            found.append(figures(load_run(folder).to_dict()))
            parts.append(drawn(folder, AT_ONCE))
    db = [f["quality"]["psnr_db"] for f in found if f["quality"]["psnr_db"] is not None]
    whole = told(torch.cat(parts), classes(MANY), reals()[-1]) | {
        "psnr_db": sum(db) / len(db) if db else None
    }
    return {"ways": {cell.ways[0]: found[0] | whole}}


def drawn(folder: Path, many: int) -> Tensor:
    """Return the pictures [many, 32, 32] in 0..1 that a run left in its folder."""
    names = ["picture.png", *(f"picture-{k}.png" for k in range(2, many + 1))]
    pixels = [np.asarray(Image.open(folder / name)) for name in names]
    return torch.from_numpy(np.stack(pixels)).float() / 255


def file_of(cell: Cell) -> Path:
    """Return where a cell is kept."""
    return CELLS / f"{cell.name}.json"


def summary() -> dict[str, Any]:
    """Return for each group, link and way its figures over all seeds, and which cells are missing."""
    of = dict[tuple[str, str, str], list[dict[str, Any]]]()
    for cell in cells():
        if file_of(cell).exists():
            for way, found in read_json(file_of(cell))["ways"].items():
                of.setdefault((cell.group, cell.link, way), []).append(found)
    rows = [{"group": g, "link": link, "way": way} | joined(f) for (g, link, way), f in of.items()]
    missing = [cell.name for cell in cells() if not file_of(cell).exists()]
    return {"links": LINKS, "many": MANY, "rows": rows, "missing": missing}


def joined(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a way's figures over all seeds: medians of seconds and bytes, means of what it drew."""
    db = [f.get("psnr_db", f["quality"]["psnr_db"]) for f in found]
    known = [x for x in db if x is not None]
    row = {
        "seeds": len(found),
        "seconds": median(f["seconds"] for f in found),
        "waited": median((f["wait_s"] + f["code_s"]) / f["seconds"] for f in found),
        "bytes": {key: median(f["bytes"][key] for f in found) for key in found[0]["bytes"]},
        "psnr_db": sum(known) / len(known) if known else None,
    }
    if "distance" in found[0]:
        row["distances"] = [f["distance"] for f in found]
        row["accuracy"] = sum(f["accuracy"] for f in found) / len(found)
    return row


def main(words: list[str]) -> None:
    if run_cells(words, list(cells()), file_of, measure):
        write_json(RESULT, summary())


if __name__ == "__main__":
    main(sys.argv[1:])
