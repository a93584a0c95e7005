"""One network for all widths against networks of one width each, on Fashion-MNIST: ``make bench-supernet``.

``bench.models.supernet_plan`` has what is compared. Groups: ``short``, one epoch on one seed, and ``full``,
three epochs on three. Each cell trains a network. From one trained at all widths at once a configuration is
then found for each budget, of bit operations and of bytes, in three ways: the method's greedy search; a
linear programme over how much the loss rises with each layer alone at each pair of widths; the same rises by
one slope for all layers. Norms are recalibrated for each. Searches see images to train on alone; those held
out are counted once a configuration.

Each cell is a file of its own, kept for good; its network is kept in the cache folder, so a search that was
stopped needs no training again. ``python -m bench.models.supernet [GROUP] [VARIANT] [seed=N]`` runs the cells
alone whose names hold these words; ``--list`` prints their names. Needs THINWIRE_DATA.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.models.supernet_plan import ALONE, BATCH, BUDGETS, GROUPS, KINDS, Cell, cells
from bench.models.supernet_rivals import rises, sites, sloped, solved
from bench.models.supernet_summary import summary
from bench.study.cells import RESULTS, run_cells
from thinwire.runs.data.batches import Batches
from thinwire.runs.data.images import FASHION, SIDE
from thinwire.runs.machine.cache import cache_folder, new_folder
from thinwire.runs.records.writer import read_json, write_json
from thinwire.uses.federated.run.tasks import Dataset, load_dataset
from thinwire.uses.models.oneshot.calibration import accuracy, batch_loss, recalibrate
from thinwire.uses.models.oneshot.costs import Costs, costs_of
from thinwire.uses.models.oneshot.search import Search
from thinwire.uses.models.oneshot.shipping import packed_nbytes, shipped
from thinwire.uses.models.oneshot.supernet import Configuration, Supernet
from thinwire.uses.models.oneshot.training import Batch, train

RESULT = RESULTS / "supernet.json"
START = 5  # bits that a search begins at [the method's code]
CALIBRATED, SEARCHED, SENSED, COUNTED = 55, 256, 512, 500  # batches; images a move, a rise, at once
POINTS = 20  # of the loss curve
CELLS = RESULT.with_suffix("")


def batches_of(data: Dataset, seed: int, size: int = BATCH, epochs: int = 1) -> Iterator[Batch]:
    """Yield images and classes to train on, in an order fixed by the seed."""
    for chosen in Batches(len(data), size, epochs=epochs, seed=seed):
        yield data.prepare(data.inputs[chosen]), data.labels[chosen]


def held_out(data: Dataset) -> Iterator[Batch]:
    """Yield all images held out."""
    parts = zip(data.test_inputs.split(COUNTED), data.test_labels.split(COUNTED), strict=True)
    yield from ((data.prepare(x), y) for x, y in parts)


def measure(cell: Cell) -> dict[str, Any]:
    """Train a cell's network, unless it is kept, and return what it comes to."""
    data = load_dataset(FASHION)
    net, told = trained(cell, data)
    costs = costs_of(net, SIDE)
    calibrated = Calibrated(net, data, costs)
    widths = {str(w): calibrated.row(net.uniform(w)) for w in net.shape.widths}
    served = [] if cell.variant in ALONE else list(serve(calibrated, cell.seed))
    return told | {"epochs": GROUPS[cell.group].epochs, "widths": widths, "served": served}


def trained(cell: Cell, data: Dataset) -> tuple[Supernet, dict[str, Any]]:
    """Return a network after its training, and how that went."""
    method, net = cell.method(len(data)), Supernet(cell.shape(), cell.seed)
    key = hashlib.sha256(f"{method} {net.shape}".encode()).hexdigest()[:12]
    folder = cache_folder() / "supernet" / f"{cell.name}-{key}"
    if not folder.is_dir():
        losses, frozen, began = list[float](), [0] * len(net.layers), time.process_time()

        def note(_: int, loss: float, candidates: Any) -> None:
            losses.append(loss)
            for i, own in enumerate(candidates):
                frozen[i] += own[0] != net.shape.widths[0]

        train(net, batches_of(data, cell.seed, epochs=GROUPS[cell.group].epochs), method, cell.seed, note)
        seconds, every = time.process_time() - began, max(1, len(losses) // POINTS)
        curve = [sum(losses[i : i + every]) / every for i in range(0, every * (len(losses) // every), every)]
        shares = [n / len(losses) for n in frozen]
        with new_folder(folder) as new:
            save_file(net.state_dict(), new / "net.safetensors")
            told = {"steps": len(losses), "train_cpu_s": seconds, "curve": curve, "frozen": shares}
            write_json(new / "told.json", told)
    net.load_state_dict(load_file(folder / "net.safetensors"))
    return net, read_json(folder / "told.json")


class Calibrated:
    """A trained network, what its configurations cost, and the images that it is measured with."""

    def __init__(self, net: Supernet, data: Dataset, costs: Costs) -> None:
        self.net, self.data, self.costs = net, data, costs
        self._images = [x for (x, _), _ in zip(batches_of(data, seed=1), range(CALIBRATED), strict=False)]

    def row(self, configuration: Configuration) -> dict[str, Any]:
        """Return accuracy, bit operations and bytes of a configuration, as counted and entropy-coded."""
        recalibrate(self.net, configuration, self._images)
        found = accuracy(self.net, configuration, held_out(self.data))
        costs = {kind: getattr(self.costs, kind)(configuration) for kind in KINDS}
        packed = packed_nbytes(shipped(self.net, configuration))
        return {"accuracy": found, **costs, "packed": packed, "configuration": configuration}

    def some(self, seed: int, size: int) -> Callable[[int], Batch]:
        """Return the n-th batch of images to train on, drawn for searches."""

        def at(n: int) -> tuple[Tensor, Tensor]:
            draw = torch.Generator().manual_seed(seed * 100_000 + n)
            chosen = torch.randint(len(self.data), (size,), generator=draw)
            return self.data.prepare(self.data.inputs[chosen]), self.data.labels[chosen]

        return at


def serve(calibrated: Calibrated, seed: int) -> Iterator[dict[str, Any]]:
    """Yield what each way of choosing comes to at each budget of each kind."""
    net = calibrated.net
    batch, layers = calibrated.some(seed, SEARCHED), len(net.layers)
    loss = rises(net, calibrated.some(seed, SENSED)(0))

    def error(configuration: Configuration, move: int) -> float:
        return batch_loss(net, configuration, *batch(move))

    for kind in KINDS:
        cost = getattr(calibrated.costs, kind)
        search = Search(net.shape.widths, START, error, cost)
        for bits in BUDGETS:
            budget = budget_of(calibrated.costs, kind, bits)
            began = time.process_time()
            found = {"search": search.within(budget, layers)}
            seconds = time.process_time() - began
            found["programme"] = solved(sites(loss, net, cost), budget, net.shape.widths)
            found["slope"] = sloped(sites(loss, net, cost), budget, net.shape.widths)
            ways = {way: calibrated.row(configuration) for way, configuration in found.items()}
            print(kind, bits, {way: r["accuracy"] for way, r in ways.items()}, flush=True)
            yield {"kind": kind, "bits": bits, "budget": budget, "search_cpu_s": seconds, "ways": ways}


def budget_of(costs: Costs, kind: str, bits: float) -> float:
    """Return what uniform widths of so many bits would cost."""
    if kind == "nbytes":
        return costs.fixed_nbytes + sum(costs.weights) * bits / 8
    return costs.fixed_bitops + sum(costs.products) * bits * bits


def file_of(cell: Cell) -> Path:
    """Return where a cell is kept."""
    return CELLS / f"{cell.name}.json"


def result() -> dict[str, Any]:
    """Return the figures of all cells together, and the names of those that are missing."""
    kept = {cell: read_json(file_of(cell)) for cell in cells() if file_of(cell).exists()}
    rows = summary([(cell.group, cell.variant, found) for cell, found in kept.items()])
    return {"rows": rows, "missing": [cell.name for cell in cells() if cell not in kept]}


def main(words: list[str]) -> None:
    torch.set_num_threads(1)  # no pool of threads beside another bench
    if run_cells(words, list(cells()), file_of, measure):
        write_json(RESULT, result())


if __name__ == "__main__":
    main(sys.argv[1:])
