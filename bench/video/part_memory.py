"""What loading a part of a transformer takes of memory: ``python -m bench.video.part_memory``.

A Wan of the shapes of 2.1 1.3B, its weights all one number, in bfloat16 and files of 500 MB. A process loads
all of it by ``from_pretrained``, or the first rank's part of several by ``load_part``, and reads each weight
once. What counts is the peak of its resident set, above what it was with all libraries imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from bench.study.cells import Kept, makers, run_study
from bench.study.tables import Draw, columns
from bench.video.wan_times import LAYERS, SHAPE
from thinwire.runs.machine.processor import forget_peak, resident_peak
from thinwire.uses.pictures.absent_block import part_of
from thinwire.uses.pictures.context_parallel.divided.loading import part_of_rank
from thinwire.uses.pictures.diffusers_names.empty_model import without_weights

KEPT = Kept("part_memory")
RANKS = (1, 2, 3, 4)
LOAD = "load"
DTYPE = torch.bfloat16


class Cell(NamedTuple):
    ranks: int


def cells() -> Iterator[Cell]:
    """Yield the cells: over how many ranks a model is divided."""
    yield from map(Cell, RANKS)


def saved(folder: str, layers: int = LAYERS, **sizes: Any) -> str:
    """Write the model to a folder; return that."""
    from diffusers import WanTransformer3DModel

    model: Any = without_weights(WanTransformer3DModel, SHAPE | sizes | {"num_layers": layers}, DTYPE)
    model = model.to_empty(device="cpu")
    for p in model.parameters():
        p.data.fill_(0.5)
    model.save_pretrained(folder, max_shard_size="500MB")
    return folder


def loaded(ranks: int, folder: str) -> dict[str, Any]:
    """Load all, or the first rank's part; return bytes of weights, the peak above the start, and blocks."""
    from diffusers import WanTransformer3DModel

    forget_peak()
    before = resident_peak(os.getpid())
    given = {"torch_dtype": DTYPE}
    if ranks == 1:
        model: Any = WanTransformer3DModel.from_pretrained(folder, **given)
    else:
        model = part_of_rank(WanTransformer3DModel, Path(folder), 0, ranks, **given)
    sum(float(p.sum()) for p in model.parameters())  # what is mapped alone counts once it is read
    peak, part = resident_peak(os.getpid()) - before, part_of(model)
    blocks = len(model.blocks) if part is None else len(part.ranges[0])
    return {"weights": sum(p.nbytes for p in model.parameters()), "peak": peak, "blocks": blocks}


def measure(cell: Cell) -> dict[str, Any]:
    """Load in a process of its own, from a folder that is gone afterwards."""
    with TemporaryDirectory() as folder:
        saved(folder)
        command = [sys.executable, "-m", "bench.video.part_memory", LOAD, str(cell.ranks), folder]
        run = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=True)
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def summary() -> dict[str, Any]:
    """Return all rows, each against the whole model."""
    found = [(cell, KEPT.get(cell)) for cell in cells()]
    rows = [{"ranks": cell.ranks, **row} for cell, row in found if row]
    whole = next((row["peak"] for row in rows if row["ranks"] == 1), None)
    told = [row | {"share": whole and row["peak"] / whole} for row in rows]
    return {"rows": told, "made_by": makers([row for _, row in found if row])}


TABLES: dict[str, Draw] = {
    "part_memory": columns(
        "rows",
        ("ranks", "{ranks}"),
        ("blocks of the first", "{blocks}"),
        ("its weights", "{weights:.0fM} MB"),
        ("most memory meanwhile", "{peak:.0fM} MB"),
        ("of the whole model's", "{share:.2f}"),
    )
}

if __name__ == "__main__":
    if sys.argv[1:2] == [LOAD]:
        sys.stdout.write(json.dumps(loaded(int(sys.argv[2]), sys.argv[3])) + "\n")
    else:
        run_study("part_memory", sys.argv[1:], cells, measure, summary)
