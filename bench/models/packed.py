"""A language model packed in every way: bytes and perplexity, ``make bench-models``.

SmolLM2-135M, calibrated on 16 windows of 512 tokens of WikiText-2's training text; perplexity on as many of
its test text. The bytes are those of the whole file, entropy-coded by the same coder in every way:

- ``nearest``: one width for all in groups of 64 weights, each rounded alone, without clipping;
- ``lagrangian``: the same with widths chosen by the budget, as large as the file may be;
- ``gptq``: one width for all in groups of 64, errors fed forward, scales clipped where that costs less;
- ``rounded``, ``rows``, ``ours``: steps by one slope without feedback; with it and steps a row; and a column.

Ours has further budgets: its curve says what it takes at each rival's perplexity, and where the model breaks.
``python -m bench.models.packed [WAY] [BITS]``: the cells that have these words. Needs THINWIRE_DATA.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from bench.study.cells import Kept, interval, run_study
from bench.study.tables import DASH, Draw, Row, Rows, columns, tabled, yes
from thinwire.choosing.allocate import ByteBudget, Site
from thinwire.links.shape import LinkShape
from thinwire.runs.data.documents import Document, read_text
from thinwire.runs.models.model_source import SMOLLM
from thinwire.runs.models.tokenizer import tokenise
from thinwire.types import InputError, require
from thinwire.uses.models import choices
from thinwire.uses.models.budgets import Entries, at_width, to_budget
from thinwire.uses.models.choices import WIDTHS, grouped, grouped_site, nearest
from thinwire.uses.models.entry import PackedTensor, pack_entry
from thinwire.uses.models.moments import DAMPING, Moments
from thinwire.uses.models.packed_model import PackedModel, write_model
from thinwire.uses.models.run.calibrated_source import CalibratedModel, Source, read_source, read_text_with
from thinwire.uses.models.run.layerwise import losses
from thinwire.uses.models.run.model_folder import unpacked
from thinwire.uses.models.run.model_packing import Size
from thinwire.uses.models.weights_to_pack import Model

KEPT = Kept("models")
TEXT, WINDOWS, WINDOW = "wikitext-2", 16, 512
BUDGETS = (3.0, 3.5, 4.0)  # bits a weight
LOWER = (2.0, 2.25, 2.5, 2.75)  # of ours alone
SOURCE, OURS = "source", "ours"
WAYS: dict[str, tuple[float, ...]] = {
    SOURCE: (32.0,),
    "nearest": (3.0, 4.0),
    "gptq": (3.0, 4.0),
    "lagrangian": BUDGETS,
    "rounded": BUDGETS,
    "rows": BUDGETS,
    OURS: (*BUDGETS, *LOWER),
}
TRIES = 8  # of a width in memory whose file is as large as a budget


class Cell(NamedTuple):
    way: str
    bits: float


def cells() -> list[Cell]:
    """Return all cells: 3 bits in every way first."""
    every = [Cell(way, bits) for way, own in WAYS.items() for bits in own]
    return sorted(every, key=lambda cell: (cell.bits != BUDGETS[0], cell.way != SOURCE))


class Study:
    """The model, what a text says of it, and another text to see what is left of it."""

    def __init__(self) -> None:
        self.source: Source = read_source(SMOLLM)
        self.reading: CalibratedModel = read_text_with(self.source, TEXT)
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


def windows_of_test(reading: CalibratedModel) -> Tensor:
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


class Ways:
    """A model packed in every way; ``size`` says how large the file of entries is."""

    def __init__(self, model: Model, size: Callable[[Entries], int]) -> None:
        self._model, self._size = model, size
        self._made = dict[tuple[str, int], PackedTensor]()

    def entries(self, way: str, bits: float, most: int) -> Entries:
        """Return the model in a way: in ``most`` bytes, or at a width of ``bits`` for all."""
        match way:
            case "nearest":
                return at_width(self._model, int(bits))
            case "gptq":
                return self._fed_forward(WIDTHS.index(int(bits)))
            case "lagrangian":
                return self._lagrangian(most)
            case "rounded":
                return to_budget(alone(self._model), most, self._size)
            case "rows":
                with patch.object(choices, "COLUMNS", 0.0):
                    return to_budget(self._model, most, self._size)
        return to_budget(self._model, most, self._size)

    def _fed_forward(self, choice: int) -> Entries:
        model = self._model
        coded = {name: pack_entry(grouped(model.matrix(name), choice)) for name in model.coded}
        return model.in_order(model.kept() | coded)

    def _lagrangian(self, most: int) -> Entries:
        """Return weights rounded alone at widths by one slope, as many bits as the file has room for."""
        with patch.object(choices, "CLIPS", (1.0,)):  # the scales of nearest
            sites = [grouped_site(alone(self._model).matrix(name)) for name in self._model.coded]
        low, high, best = sum(min(s.nbytes) for s in sites), 2.0 * most, Entries()
        for _ in range(TRIES):
            budget = (low + high) / 2
            found = self._nearest(sites, ByteBudget(budget).choose(sites))
            low, high, best = (budget, high, found) if self._size(found) <= most else (low, budget, best)
        require(bool(best), InputError, f"no widths of groups make a file of {most} bytes")
        return best

    def _nearest(self, sites: list[Site], chosen: list[int]) -> Entries:
        coded = Entries()
        for site, i in zip(sites, chosen, strict=True):
            if (site.name, i) not in self._made:
                made = pack_entry(nearest(self._model.matrix(site.name), WIDTHS[i]))
                self._made[site.name, i] = made
            coded[site.name] = self._made[site.name, i]
        return self._model.in_order(self._model.kept() | coded)


def alone(model: Model) -> Model:
    """Return a model whose moments say of each column alone what its errors cost: none are fed forward."""
    return replace(model, moments={name: _cut(own) for name, own in model.moments.items()})


def _cut(moments: Moments) -> Moments:
    own = moments.columns.diagonal()
    return Moments(moments.rows, own + DAMPING * own.mean())  # damped as where errors are fed forward


def summary() -> dict[str, Any]:
    """Return a row for each way and budget, in the order of the cells."""
    found = [(*cell, kept) for cell in cells() if (kept := KEPT.get(cell))]
    return {"rows": rows_of(found)}


def rows_of(found: Sequence[tuple[str, float, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the row of each way, budget and what was found of it."""
    ours = {bits: cell for way, bits, cell in found if way == OURS}
    curve = sorted((statistics.fmean(cell["losses"]), cell["nbytes"]) for cell in ours.values())
    return [_row(way, bits, cell, ours.get(bits), curve) for way, bits, cell in found]


def _row(
    way: str, bits: float, cell: dict[str, Any], ours: dict[str, Any] | None, curve: list[tuple[float, int]]
) -> dict[str, Any]:
    row = {"way": way, "asked": bits, "nbytes": cell["nbytes"], "bits": cell["bits"]}
    row["perplexity"] = exponential(cell["losses"])
    if ours is not None and way not in (OURS, SOURCE):
        apart = [a - b for a, b in zip(cell["losses"], ours["losses"], strict=True)]
        row["over_ours"] = exponential(apart)
        loss, (worst, fewest) = statistics.fmean(cell["losses"]), curve[-1]
        # Where even our smallest file tells the text better, it is a bound.
        same = fewest if loss > worst else nbytes_at(loss, curve)
        row["ours_saves"] = None if same is None else 1 - same / cell["nbytes"]
        row["at_least"] = loss > worst
    return row


def exponential(losses: Sequence[float]) -> list[float]:
    """Return the exponential of a mean, and from where to where it lies with 95 %, by window.

    >>> [round(x, 3) for x in exponential([1.0] * 8 + [1.2] * 8)]
    [3.004, 2.843, 3.174]
    """
    mean, half = interval(losses)
    return [math.exp(min(x, 700.0)) for x in (mean, mean - half, mean + half)]


def nbytes_at(loss: float, curve: Sequence[tuple[float, int]]) -> float | None:
    """Return the bytes that a curve of (loss, bytes) takes at a loss, between its points; None beyond them.

    >>> nbytes_at(1.5, [(1.0, 400), (2.0, 300)])
    350.0
    """
    for (low, more), (high, fewer) in pairwise(curve):
        if low <= loss <= high:
            return more + (fewer - more) * (loss - low) / (high - low)
    return None


LABELS = {
    "source": "as it was",
    "nearest": "one width, rounded to the nearest in groups of 64",
    "lagrangian": "widths chosen by the budget, rounded to the nearest",
    "gptq": "one width in groups of 64, GPTQ's feedback",
    "rounded": "`thinwire` without feedback",
    "rows": "`thinwire` without steps a column",
    "ours": "`thinwire`",
}
FEWER = {"nearest": 0.2, "lagrangian": 0.08}  # of a rival's bytes


def _shown(found: Row) -> Iterator[Row]:
    """Yield every way at 3, 3.5 and 4 bits a weight."""
    budgets = sorted({r["asked"] for r in found["rows"] if r["way"] == "rounded"})
    yield from (r | {"name": LABELS[SOURCE], "bits": None} for r in found["rows"] if r["way"] == SOURCE)
    for bits in budgets:
        own = {r["way"]: r for r in found["rows"] if r["asked"] == bits}
        yield from (own[w] | {"name": f"{LABELS[w]}, {bits:g} bits"} for w in LABELS if w in own)


def _perplexity(r: Row) -> str:
    return _between(r["perplexity"])


ways = columns(
    _shown,
    ("packed by", "{name}"), ("bytes", "{nbytes:,.1fM} MB"), ("bits a weight", "{bits:.2f}"),
    ("perplexity", _perplexity),
    ("times ours", lambda r: _between(r["over_ours"], 2) if "over_ours" in r else DASH),
    ("bytes that ours saves at its perplexity", lambda r: _saved(r)),
)  # fmt: skip
curve = columns(  # ours at every budget
    lambda found: sorted((r for r in found["rows"] if r["way"] == OURS), key=lambda r: r["nbytes"]),
    ("bits a weight", "{bits:.2f}"), ("bytes", "{nbytes:,.1fM} MB"), ("perplexity", _perplexity),
)  # fmt: skip


@tabled("goal at 3 bits", "wanted", "found", "met")
def goals(found: Any) -> Rows:
    """What was to be reached at 3 bits, and what was."""
    for r in found["rows"]:
        if r["asked"] == 3 and "over_ours" in r:
            wanted, least = f"lower perplexity than {LABELS[r['way']]}", r["over_ours"][1]
            yield [
                wanted,
                "more than 1 times ours",
                f"{_between(r['over_ours'], 2)} times",
                yes(least > 1, "**no**"),
            ]
    for way, least in FEWER.items():
        for r in (r for r in found["rows"] if r["way"] == way and r["asked"] == 3):
            saves, wanted = r["ours_saves"], f"fewer bytes than {LABELS[way]} at its perplexity"
            yield [
                wanted,
                f"{100 * least:.0f} %",
                _saved(r),
                yes(saves is not None and saves >= least, "**no**"),
            ]


def _saved(r: dict[str, Any]) -> str:
    saves = r.get("ours_saves")
    return DASH if saves is None else f"{'at least ' * r['at_least']}{100 * saves:.0f} %"


def _between(x: list[float], digits: int = 1) -> str:
    mean, low, high = (f"{v:,.{digits}f}" if v < 1000 else f"{v:,.0f}" for v in x)
    return f"{mean} ({low} to {high})"


def _packed(record: Row) -> Iterator[Row]:
    """Yield what the demo shows: a model as it was, as it was packed, and as others pack it."""
    ours = f"`thinwire`, {record['bits_a_weight']:.2f} bits a weight"
    link = LinkShape.parse(record["config"]["link"])
    for name, nbytes, perplexity in [
        ("as it was", record["source_nbytes"], record["perplexity_source"]),
        (ours, record["packed_nbytes"], record["perplexity"]),
        *((rival["name"], rival["nbytes"], rival["perplexity"]) for rival in record["rivals"]),
    ]:
        seconds = nbytes / (link.rate or 1) + link.delay
        yield {"name": name, "nbytes": nbytes, "seconds": seconds, "perplexity": perplexity}


packed = columns(
    _packed,
    ("packed by", "{name}"), ("bytes", "{nbytes:,.1fM} MB"), ("seconds", "{seconds:,.0f} s"),
    ("perplexity", "{perplexity:.1f}"),
)  # fmt: skip
TABLES: dict[str, Draw] = {"models": ways, "models-curve": curve, "models-goals": goals, "packed": packed}


if __name__ == "__main__":
    if "--list" not in sys.argv and not os.environ.get("THINWIRE_DATA"):
        raise SystemExit(f"{TEXT} is in no package; set THINWIRE_DATA to the folder that has it")
    run_study("models", sys.argv[1:], cells, measure, summary)
