"""A language model packed in every way: bytes and perplexity, ``make bench-models``.

SmolLM2-135M, calibrated on 16 windows of 512 tokens of WikiText-2's training text; perplexity on as many of
its test text. The bytes are those of the whole file, entropy-coded by the same coder in every way:

- ``nearest``: one width for all in groups of 64 weights, each rounded alone, without clipping;
- ``lagrangian``: the same with widths chosen by the budget, as large as the file may be;
- ``gptq``: one width for all in groups of 64, errors fed forward, scales clipped where that costs less;
- ``rounded``, ``rows``, ``ours``: steps by one slope without feedback; with it and steps a row; and a column.

Ours has further budgets: its curve says what it takes at each rival's perplexity, and where the model breaks.
Each cell is a file of its own, kept for good. ``python -m bench.models.packed [WAY] [BITS]`` runs the cells
alone whose names hold these words; ``--list`` prints their names. Needs THINWIRE_DATA.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.models.summary import summary
from bench.models.ways import BUDGETS, SOURCE, WAYS, Ways
from bench.study.cells import RESULTS, run_cells
from thinwire.runs.data.documents import Document, read_text
from thinwire.runs.models.source import SMOLLM
from thinwire.runs.models.tokenizer import tokenise
from thinwire.runs.records.writer import read_json, write_json
from thinwire.uses.models.container import PackedModel, write_model
from thinwire.uses.models.encoding import Entries
from thinwire.uses.models.run.packing import Size, unpacked
from thinwire.uses.models.run.perplexity import losses
from thinwire.uses.models.run.source import Reading, Source, read_source, read_text_with

RESULT = RESULTS / "models.json"
CELLS = RESULT.with_suffix("")
TEXT, WINDOWS, WINDOW = "wikitext-2", 16, 512


class Cell(NamedTuple):
    way: str
    bits: float

    @property
    def words(self) -> tuple[str, ...]:
        """What chooses it."""
        return self.way, f"{self.bits:g}"


def cells() -> list[Cell]:
    """Return all cells: 3 bits in every way first."""
    every = [Cell(way, bits) for way, own in WAYS.items() for bits in own]
    return sorted(every, key=lambda cell: (cell.bits != BUDGETS[0], cell.way != SOURCE))


def file_of(cell: Cell) -> Path:
    """Return where a cell is kept."""
    return CELLS / f"{cell.way}-{cell.bits:g}.json"


class Study:
    """The model, what a text says of it, and another text to see what is left of it."""

    def __init__(self) -> None:
        self.source: Source = read_source(SMOLLM)
        self.reading: Reading = read_text_with(self.source, TEXT)
        self.test = windows_of_test(self.reading)
        self._ways = Ways(self.reading.model, Size(self.source.files))

    @cached_property
    def weights(self) -> int:
        """Weights of the model."""
        return sum(x.numel() for x in self.source.tensors.values())

    def entries(self, cell: Cell) -> Entries:
        """Return the model packed in a cell's way."""
        return self._ways.entries(cell.way, cell.bits, int(cell.bits * self.weights / 8))

    def told(self, nbytes: int) -> dict[str, Any]:
        """Return the bytes and the loss of each window, with the weights that the model has now."""
        found = losses(self.reading.net, self.test).tolist()
        return {"nbytes": nbytes, "bits": 8 * nbytes / self.weights, "losses": found}


def windows_of_test(reading: Reading) -> Tensor:
    """Return windows [windows, tokens] from all over the test text."""
    path = Path(os.environ["THINWIRE_DATA"]) / TEXT / "test.txt.xz"
    ids = tokenise(reading.tokenizer, Document(read_text(path)), limit=1 << 20)
    whole = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
    return whole[torch.linspace(0, len(whole) - 1, WINDOWS).long()]


@cache
def study() -> Study:
    """Return the study of this process."""
    return Study()


def measure(cell: Cell) -> dict[str, Any]:
    """Pack and unpack the model, and return what it takes and how well it tells the test text."""
    own = study()
    if cell.way == SOURCE:
        own.reading.put(own.source.tensors)
        return own.told(own.source.nbytes)
    packed = PackedModel(own.entries(cell), own.source.files)
    own.reading.put(unpacked(packed))
    return own.told(len(write_model(packed)))


def kept() -> Iterator[tuple[str, float, dict[str, Any]]]:
    """Yield the cells that are finished."""
    for cell in cells():
        if file_of(cell).exists():
            yield cell.way, cell.bits, read_json(file_of(cell))


def main(words: list[str]) -> None:
    if "--list" not in words and not os.environ.get("THINWIRE_DATA"):
        raise SystemExit(f"{TEXT} is in no package; set THINWIRE_DATA to the folder that has it")
    if run_cells(words, cells(), file_of, measure):
        missing = [f"{c.way}-{c.bits:g}" for c in cells() if not file_of(c).exists()]
        write_json(RESULT, summary(list(kept())) | {"missing": missing})


if __name__ == "__main__":
    main(sys.argv[1:])
