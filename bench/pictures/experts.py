"""Experts spread over ranks: bytes, seconds and pictures of each schedule: ``make bench-experts``.

A cell is kept until a recipe in it changes, or the weights of the model or of the classifier. Groups of ways:

- ``two``: two ranks over both links, emulated: one run of ``thinwire generate``, all ways in turn: seconds;
- ``four``: four ranks in the threads of one process: bytes, and PSNR against one device;
- ``parts``: the same for each part of DICE left out or done otherwise, with residuals and without;
- ``distance``: 2,048 pictures of a way, and how far they are from real garments; three sets.

``python -m bench.pictures.experts [GROUP] [LINK] [WAY] [seed=N]``: the cells that have these words.
"""

from __future__ import annotations

import copy
import hashlib
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire
from bench.pictures.diffusion import generated
from bench.pictures.garments import APART, MANY, classes, reals, told
from bench.study.cells import Kept, run_study, words_of
from thinwire.links import Peer, connect_mesh
from thinwire.uses.pictures.expert_parallel.recipes import parse_experts_recipe
from thinwire.uses.pictures.run import classifier, flux_fashion_moe
from thinwire.uses.pictures.run.flux_fashion_moe import NAME, load
from thinwire.uses.pictures.run.recording import averaged, quality
from thinwire.uses.pictures.run.sheets import sample_each

KEPT = Kept("experts")
UNLIMITED = "unlimited"
LINKS = {UNLIMITED: "none", "100mbit": "100mbit,5ms", "20mbit": "20mbit,20ms"}
SEEDS = (0, 1, 2)  # of noise; in ``distance`` each is that of a whole set
ONE, SYNC = "one", "ep-sync"
WAYS = (SYNC, "ep-displaced", "dice", "dice-residual")
BATCH, STEPS = 32, 28
AT_ONCE = 128  # pictures of a set: a picture is the same in any batch, but for rounding
# Each of DICE's parts left out, or done otherwise, by what is added to a way's name.
PARTS = ("synced=none", "synced=deep", "mode=displaced", "stride=1", "stride=4")
# Residuals without DICE's parts, on either schedule; and other residuals.
ALONE = ("mode=sync,stride=1", "mode=displaced,synced=none,stride=1")
CODED = ("bits=1", "bits=2", "bits=8", "early=7")
WHOLE = ("dice", "dice-residual")  # that have all parts: cells of ``four``
WEIGHTS = (flux_fashion_moe.WEIGHTS, classifier.WEIGHTS)
Mesh = dict[int, Peer]
LONGEST = 3600.0  # seconds that a rank of a crowded processor may take for all


class Group(NamedTuple):
    ways: tuple[str, ...]
    links: tuple[str, ...]
    ranks: int
    pictures: int = BATCH
    at_once: int = BATCH


GROUPS = {
    "two": Group((ONE, *WAYS), ("100mbit", "20mbit"), 2),
    "four": Group((f"{SYNC}:values=own", *WAYS), (UNLIMITED,), 4),
    "parts": Group(
        (
            *(f"dice:{part}" for part in PARTS),
            *(f"dice-residual:{part}" for part in (*PARTS, *ALONE, *CODED)),
        ),
        (UNLIMITED,),
        4,
    ),
    "distance": Group((SYNC, "dice-residual", "dice", "ep-displaced"), (UNLIMITED,), 4, MANY, AT_ONCE),
}


class Cell(NamedTuple):
    group: str
    link: str
    ways: tuple[str, ...]
    seed: int


def cells() -> Iterator[Cell]:
    """Yield all cells: of one way each, but where ways take turns."""
    for name, group in GROUPS.items():
        for link in group.links:
            for seed in SEEDS:
                for ways in [group.ways] if link != UNLIMITED else [(way,) for way in group.ways]:
                    yield Cell(name, link, ways, seed)


def measure(cell: Cell) -> dict[str, Any]:
    """Run a cell; return the figures of each way, and what they are of."""
    if cell.link != UNLIMITED:
        return {"ways": timed(cell)} | identity(cell)
    [way] = cell.ways
    return {"ways": {way: drawn(way, GROUPS[cell.group], cell.seed * APART)}} | identity(cell)


def identity(cell: Cell) -> dict[str, Any]:
    """Return what each way's name stands for now, and a hash of the weights that draw and judge."""
    recipes = {way: parse_experts_recipe(way) for way in cell.ways}
    specs = {way: f"{recipe.spec}, {recipe.policy!r}" for way, recipe in recipes.items()}
    return {"specs": specs, "weights": {file.name: digest(file) for file in WEIGHTS}}


@cache
def digest(file: Path) -> str:
    """Return a short hash of a file."""
    return hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()


def stale(cell: Cell, found: dict[str, Any]) -> bool:
    """Return whether what a cell is of has changed since."""
    return not identity(cell).items() <= found.items()


def timed(cell: Cell) -> dict[str, dict[str, Any]]:
    """Make a batch in all ways of a cell, over its emulated link; return what it took."""
    options = {"model": NAME, "sheet": "1x1", "pictures": BATCH, "steps": STEPS, "emulate": True}
    place = {"link": LINKS[cell.link], "ranks": GROUPS[cell.group].ranks, "seed": cell.seed * APART}
    found = generated({way: way for way in cell.ways}, **options, **place)
    for one in found.values():
        one["nbytes"], one["psnr_db"] = one["bytes"]["total"], one["quality"]["psnr_db"]
    return found


def drawn(way: str, group: Group, first: int) -> dict[str, Any]:
    """Make a group's pictures of one garment on ranks in threads; return bytes and quality."""
    real = reals()[-1] if group.pictures == MANY else None  # first: where data are missing it says so
    model, kinds = load(), classes(group.pictures)
    with meshes(group.ranks) as ranks:
        made = spread_pictures(model, ranks, way, kinds.tolist(), first, STEPS, group.at_once)
    found: dict[str, Any] = {"nbytes": made.nbytes}
    if real is not None:
        return found | told(made.pictures, kinds, real)
    wanted = sample_each(model, kinds.tolist(), range(first, first + group.pictures), STEPS)
    pairs = zip(made.pictures, wanted, strict=True)
    return found | averaged([quality(*pair) for pair in pairs])


def summary() -> dict[str, Any]:
    """Return for each group, link and way its figures over all seeds, and which cells are missing.

    ``parts`` has the ways that they are parts of too, and seeds alone of which no cell is missing.
    """
    known = ((cell, KEPT.get(cell)) for cell in cells())
    found = {cell: None if one is None or stale(cell, one) else one for cell, one in known}
    whole = {
        seed for seed in SEEDS if all(f for c, f in found.items() if (c.group, c.seed) == ("parts", seed))
    }
    of = dict[tuple[str, str, str], list[dict[str, Any]]]()
    for cell, known in found.items():
        groups = ["parts"] if cell.group == "four" and cell.ways[0] in WHOLE else []
        for group in [cell.group, *groups]:
            if known and (group != "parts" or cell.seed in whole):
                for way in cell.ways:
                    one = known["ways"][way] | {"seed": cell.seed}
                    of.setdefault((group, cell.link, way), []).append(one)
    rows = [{"group": g, "link": link, "way": way} | joined(f) for (g, link, way), f in of.items()]
    missing = [" ".join(words_of(cell)) for cell, known in found.items() if not known]
    return {"links": LINKS, "many": MANY, "rows": rows, "missing": missing}


def joined(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a way's figures over all seeds: medians of seconds and bytes, means of what it drew."""
    row: dict[str, Any] = {"seeds": len(found), "nbytes": median(f["nbytes"] for f in found)}
    if "seconds" in found[0]:
        row["seconds"] = median(f["seconds"] for f in found)
        row["waited"] = median((f["wait_s"] + f["code_s"]) / f["seconds"] for f in found)
    if "distance" in found[0]:
        return row | {name: [f[name] for f in found] for name in ("seed", "distance", "accuracy")}
    db = [f["psnr_db"] for f in found if f["psnr_db"] is not None]
    return row | {"psnr_db": sum(db) / len(db) if db else None}


class Spread(NamedTuple):
    """Pictures [N, 32, 32] in 0..1, and the bytes that the rank of most sent for them."""

    pictures: Tensor
    nbytes: int


@contextmanager
def meshes(world: int) -> Iterator[list[Mesh]]:
    """Connect so many ranks, and close all of them at the end."""
    store = dist.HashStore()
    with ThreadPoolExecutor(world) as pool:
        ranks = list(pool.map(lambda rank: connect_mesh(rank, world, store), range(world)))
        try:
            yield ranks
        finally:
            list(pool.map(lambda peer: peer.close(), [p for rank in ranks for p in rank.values()]))


def spread_pictures(
    model: nn.Module,
    ranks: Sequence[Mesh],
    recipe: str,
    classes: Sequence[int],
    first: int,
    steps: int,
    at_once: int,
) -> Spread:
    """Return pictures of these classes from the noise of seeds from ``first`` on, ``at_once`` in a batch.

    Each rank makes its share of every batch; the number of pictures is a multiple of ``at_once``.
    """
    batches = range(0, len(classes), at_once)

    def work(rank: int, peers: Mesh) -> tuple[list[Tensor], int]:
        own = copy.deepcopy(model)
        with torch.no_grad(), thinwire.spread_experts(own, peers, recipe, deadline=LONGEST) as found:
            shares = [range(b + rank, b + at_once, len(ranks)) for b in batches]
            made = [sample_each(own, [classes[k] for k in s], [first + k for k in s], steps) for s in shares]
            return made, found.tally.nbytes

    with ThreadPoolExecutor(len(ranks)) as pool:
        found = list(pool.map(work, range(len(ranks)), ranks))
    whole = [torch.stack([made[i] for made, _ in found], 1).flatten(0, 1) for i in range(len(batches))]
    return Spread(torch.cat(whole), max(nbytes for _, nbytes in found))


if __name__ == "__main__":
    run_study("experts", sys.argv[1:], cells, measure, summary, stale=stale)
