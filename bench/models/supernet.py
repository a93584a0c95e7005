"""One network for all widths against networks of one width each, on Fashion-MNIST: ``make bench-supernet``.

Groups: ``short``, one epoch on one seed; ``full``, three epochs on three; ``large``, a network of a million
weights on five. Each cell trains a network. From one trained at all widths at once a configuration is
then found for each budget, of bit operations and of bytes, in three ways: the method's greedy search; a
linear programme over how much the loss rises with each layer alone at each pair of widths; the same rises by
one slope for all layers. Norms are recalibrated for each. Searches see images to train on alone; those held
out are counted once a configuration. Of ``large`` networks, configurations drawn at random are counted too,
and bits are chosen by the slope alone.

A cell's network is kept in the cache folder, so a search that was stopped needs no training again.
``python -m bench.models.supernet [GROUP] [VARIANT] [seed=N]``: the cells that have these words. Needs
THINWIRE_DATA.
"""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.models.subnets import moved, movements, sampled, spreads
from bench.study.cells import Kept, interval, run_study
from bench.study.tables import DASH, Draw, Row, Rows, tabled
from thinwire.choosing.allocate import ByteBudget, Site
from thinwire.runs.data.batches import Batches
from thinwire.runs.data.fashion import FASHION, SIDE
from thinwire.runs.machine.cache import cache_folder, new_folder
from thinwire.runs.records.writer import read_json, write_json
from thinwire.uses.federated.run.datasets import Dataset, load_dataset
from thinwire.uses.models.oneshot.shipping import packed_nbytes, shipped
from thinwire.uses.models.oneshot.supernet import (
    WIDTHS,
    Configuration,
    Costs,
    Shape,
    Supernet,
    accuracy,
    batch_loss,
    costs_of,
    recalibrate,
)
from thinwire.uses.models.oneshot.supernet_training import Batch, TrainingMethod, train
from thinwire.uses.models.oneshot.width_search import Search

KEPT = Kept("supernet")
START = 5  # bits that a search begins at [the method's code]
CALIBRATED, SEARCHED, SENSED, COUNTED = 55, 256, 512, 500  # batches; images a move, a rise, at once
POINTS = 20  # of the loss curve
BATCH = 128
BUDGETS = (2.5, 3.0, 3.5, 4.0, 5.0)  # what uniform widths of so many bits would cost
KINDS = ("bitops", "nbytes")
ONESHOT = {
    "both": {},
    "no-scheduler": {"freezing": None},
    "no-mitigation": {"mitigation": 0.0},
    "neither": {"freezing": None, "mitigation": 0.0},
}
ALONE = {f"apart-{bits}": bits for bits in WIDTHS}  # nets of one width, trained apart
VARIANTS = (*ONESHOT, *ALONE)
Found = Mapping[str, Any]  # of a cell
APART = "apart"
WAYS = ("search", "programme", "slope")
Rises = list[list[float]]  # by layer and pair of widths
PRIOR = 1e-3  # of a rise: where none is measured, bits still go where they lower the rounding error most


class Group(NamedTuple):
    """Cells of one network, and how it is trained and measured."""

    epochs: float
    seeds: tuple[int, ...]
    shape: Shape = Shape()
    variants: tuple[str, ...] = VARIANTS
    batch: int = BATCH
    kinds: tuple[str, ...] = KINDS
    ways: tuple[str, ...] = WAYS
    calibrated: int = CALIBRATED
    sensed: int = SENSED
    counted: int | None = None  # of the images held out, the first so many
    sampled: int = 0  # configurations drawn at random

    def steps(self, samples: int) -> int:
        """Return the steps of its training on so many samples."""
        return round(self.epochs * (samples // self.batch))


# "short" proves the way from end to end in minutes; "full" is the study; "large" is the network of a
# million weights. Its shape and steps were chosen on seed 100: a cell takes minutes, and there is room above.
LARGE = Shape(channels=(16, 48, 176), stride=4, repeats=2)
GROUPS = {
    "short": Group(1, (0,)),
    "full": Group(3, (0, 1, 2)),
    "large": Group(
        1 / 3, (0, 1, 2, 3, 4), LARGE, tuple(ONESHOT), 64, ("bitops",), ("slope",),
        calibrated=8, sensed=64, counted=5000, sampled=24,
    ),
}  # fmt: skip


class Cell(NamedTuple):
    group: str
    variant: str
    seed: int

    def shape(self) -> Shape:
        """Return the network's shape: all widths, or the one of a network trained apart."""
        shape = GROUPS[self.group].shape
        return replace(shape, widths=(ALONE[self.variant],)) if self.variant in ALONE else shape

    def method(self, samples: int) -> TrainingMethod:
        """Return how it is trained on so many samples."""
        return replace(TrainingMethod(GROUPS[self.group].steps(samples)), **ONESHOT.get(self.variant, {}))  # type: ignore[arg-type]


def cells() -> Iterator[Cell]:
    """Yield all cells; what is compared runs in turns."""
    for name, group in GROUPS.items():
        for seed in group.seeds:
            yield from (Cell(name, variant, seed) for variant in group.variants)


def batches_of(data: Dataset, seed: int, size: int = BATCH, epochs: int = 1) -> Iterator[Batch]:
    """Yield images and classes to train on, in an order fixed by the seed."""
    for chosen in Batches(len(data), size, epochs=epochs, seed=seed):
        yield data.prepare(data.inputs[chosen]), data.labels[chosen]


def held_out(data: Dataset, many: int | None = None) -> Iterator[Batch]:
    """Yield the images held out: all, or the first so many."""
    parts = zip(data.test_inputs[:many].split(COUNTED), data.test_labels[:many].split(COUNTED), strict=True)
    yield from ((data.prepare(x), y) for x, y in parts)


def measure(cell: Cell) -> dict[str, Any]:
    """Train a cell's network, unless it is kept, and return what it comes to."""
    data, group = load_dataset(FASHION), GROUPS[cell.group]
    net, told = trained(cell, data)
    calibrated = Calibrated(net, data, costs_of(net, SIDE), group)
    widths = {str(w): calibrated.row(net.uniform(w)) for w in net.shape.widths}
    served = [] if cell.variant in ALONE else list(serve(calibrated, cell.seed))
    found = told | {"epochs": group.epochs, "widths": widths, "served": served}
    if group.sampled:
        some = sampled(net, group.sampled)
        found["sampled"] = [calibrated.accuracy(configuration) for configuration in some]
        batch = calibrated.some(cell.seed, group.batch)(0)
        found |= moved(net, batch, TrainingMethod(1))
    return found


def trained(cell: Cell, data: Dataset) -> tuple[Supernet, dict[str, Any]]:
    """Return a network after its training, and how that went."""
    method, net = cell.method(len(data)), Supernet(cell.shape(), cell.seed)
    key = hashlib.sha256(f"{method} {net.shape}".encode()).hexdigest()[:12]
    folder = cache_folder() / "supernet" / f"{'-'.join(map(str, cell))}-{key}"
    if not folder.is_dir():
        losses, frozen, began = list[float](), [0] * len(net.layers), time.process_time()
        group = GROUPS[cell.group]
        batches = batches_of(data, cell.seed, group.batch, math.ceil(group.epochs))

        def note(_: int, loss: float, candidates: Any) -> None:
            losses.append(loss)
            for i, own in enumerate(candidates):
                frozen[i] += own[0] != net.shape.widths[0]

        train(net, batches, method, cell.seed, note)
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

    def __init__(self, net: Supernet, data: Dataset, costs: Costs, group: Group) -> None:
        self.net, self.data, self.costs, self.group = net, data, costs, group
        some = zip(batches_of(data, seed=1), range(group.calibrated), strict=False)
        self._images = [x for (x, _), _ in some]

    def accuracy(self, configuration: Configuration) -> float:
        """Return the share of images held out that a configuration recognises, its norms recalibrated."""
        recalibrate(self.net, configuration, self._images)
        return accuracy(self.net, configuration, held_out(self.data, self.group.counted))

    def row(self, configuration: Configuration) -> dict[str, Any]:
        """Return accuracy, bit operations and bytes of a configuration, as counted and entropy-coded."""
        found = self.accuracy(configuration)
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
    net, group = calibrated.net, calibrated.group
    batch, layers = calibrated.some(seed, SEARCHED), len(net.layers)
    loss = rises(net, calibrated.some(seed, group.sensed)(0))

    def error(configuration: Configuration, move: int) -> float:
        return batch_loss(net, configuration, *batch(move))

    for kind in group.kinds:
        cost = getattr(calibrated.costs, kind)
        search = Search(net.shape.widths, START, error, cost)
        ways: dict[str, Callable[[float], Configuration]] = {
            "search": partial(search.within, layers=layers),
            "programme": partial(solved, sites(loss, net, cost), widths=net.shape.widths),
            "slope": partial(sloped, sites(loss, net, cost), widths=net.shape.widths),
        }
        for bits in BUDGETS:
            budget = budget_of(calibrated.costs, kind, bits)
            found, seconds = dict[str, Configuration](), dict[str, float]()
            for way in group.ways:
                began = time.process_time()
                found[way] = ways[way](budget)
                seconds[way] = time.process_time() - began
            rows = {way: calibrated.row(configuration) for way, configuration in found.items()}
            print(kind, bits, {way: r["accuracy"] for way, r in rows.items()}, flush=True)
            yield {
                "kind": kind,
                "bits": bits,
                "budget": budget,
                "search_cpu_s": seconds[group.ways[0]],
                "ways": rows,
            }


def budget_of(costs: Costs, kind: str, bits: float) -> float:
    """Return what uniform widths of so many bits would cost."""
    if kind == "nbytes":
        return costs.fixed_nbytes + sum(costs.weights) * bits / 8
    return costs.fixed_bitops + sum(costs.products) * bits * bits


def pairs(widths: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pairs that a layer may have, bits of weights first."""
    return list(product(widths, widths))


def rises(net: Supernet, batch: Batch) -> Rises:
    """Return how far a batch's loss is above that of the widest path, one layer at a time.

    No rise is below zero, and of equal ones that of fewer bits is the larger.
    """
    widest = net.uniform(net.shape.widths[-1])
    least = batch_loss(net, widest, *batch)

    def one(i: int, pair: tuple[int, int]) -> float:
        rise = batch_loss(net, (*widest[:i], pair, *widest[i + 1 :]), *batch) - least
        return max(0.0, rise) + PRIOR * sum(4.0**-bits for bits in pair)

    return [[one(i, pair) for pair in pairs(net.shape.widths)] for i in range(len(widest))]


def sites(found: Rises, net: Supernet, cost: Callable[[Configuration], float]) -> list[Site]:
    """Return each layer's choices: rises against costs, which include what all choices cost, once a layer."""
    base = net.uniform(net.shape.widths[0])
    fixed = cost(base) * (len(base) - 1) / len(base)

    def spent(i: int, pair: tuple[int, int]) -> float:
        return cost((*base[:i], pair, *base[i + 1 :])) - fixed

    choices = pairs(net.shape.widths)
    return [Site(str(i), tuple(own), tuple(spent(i, p) for p in choices)) for i, own in enumerate(found)]


def sloped(found: Sequence[Site], budget: float, widths: Sequence[int]) -> Configuration:
    """Return the configuration of one slope for all layers."""
    return tuple(pairs(widths)[k] for k in ByteBudget(budget).choose(found))


def solved(found: Sequence[Site], budget: float, widths: Sequence[int]) -> Configuration:
    """Return the configuration of the least sum of rises: an integer linear programme, solved exactly."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    choices, layers = pairs(widths), len(found)
    costs = np.array([site.nbytes for site in found]).ravel()
    scale = float(costs.max())  # the solver's tolerances are absolute
    once = np.kron(np.eye(layers), np.ones(len(choices)))
    limits = [LinearConstraint(once, 1, 1), LinearConstraint(costs / scale, ub=budget / scale)]
    rise = np.array([site.costs for site in found]).ravel()
    solution = milp(rise, integrality=np.ones_like(rise), bounds=Bounds(0, 1), constraints=limits)
    assert solution.success, solution.message
    return tuple(choices[int(k)] for k in solution.x.reshape(layers, -1).argmax(1))


class Point(NamedTuple):
    """What cells of several seeds have in common."""

    group: str
    variant: str
    way: str
    kind: str
    bits: float


def rows_of(found: Iterable[tuple[str, str, Found]]) -> list[dict[str, Any]]:
    """Return a row a group, variant, way, kind of budget and budget, of the cells of all seeds.

    Networks of one width are one variant; their way is ``uniform``, as that of the others' uniform widths.
    """
    points: dict[Point, list[tuple[Found, Found]]] = {}
    for group, variant, cell in found:
        shared = APART if variant.startswith(APART) else variant
        for way, kind, bits, row in _points(cell):
            points.setdefault(Point(group, shared, way, kind, bits), []).append((cell, row))
    return [point._asdict() | _joined(cells) for point, cells in points.items()]


def _points(cell: Found) -> Iterable[tuple[str, str, float, Found]]:
    """Yield way, kind, bits and figures of all that a cell measured."""
    for bits, row in cell["widths"].items():
        yield "uniform", "", float(bits), row
    for served in cell["served"]:
        for way, row in served["ways"].items():
            yield way, served["kind"], served["bits"], row


def _joined(cells: list[tuple[Found, Found]]) -> dict[str, Any]:
    rows = [row for _, row in cells]
    each = {name: [float(row[name]) for row in rows] for name in ("accuracy", "bitops", "nbytes", "packed")}
    return {
        "epochs": cells[0][0]["epochs"],
        "seeds": len(rows),
        **{name: interval(values) for name, values in each.items()},
        "train_cpu_s": interval([cell["train_cpu_s"] for cell, _ in cells]),
    }


def summary() -> dict[str, Any]:
    """Return the figures of all cells together."""
    found = [(cell, KEPT.get(cell)) for cell in cells()]
    kept = [(cell, known) for cell, known in found if known]
    large = [(cell.variant, known) for cell, known in kept if cell.group == "large"]
    rows = rows_of((cell.group, cell.variant, known) for cell, known in kept)
    return {"rows": rows, "spread": spreads(large), "moved": movements(large)}


LABELS = {
    "both": "one-shot",
    "no-scheduler": "without scheduler",
    "no-mitigation": "without mitigation",
    "neither": "with neither",
    APART: "trained apart",
}


def _accuracy(row: Row | None) -> str:
    if row is None:
        return DASH
    return _percent(row["accuracy"])


def _percent(found: Sequence[float], places: int = 1) -> str:
    mean, *half = found
    return f"{mean:.{places}%}" + (f" ± {100 * half[0]:.{places}f}" if half else "")


def budgets(kind: str, found: Any) -> str:
    """Accuracy at each budget: of searches, allocations, uniform widths."""
    rows = [r for r in found["rows"] if r["group"] == _group(found)]
    of = {(r["variant"], r["way"], r["kind"], r["bits"]): r for r in rows}
    head = [f"{bits:g} bits" for bits in BUDGETS]

    @tabled("training", "bits chosen by", *head)
    def drawn() -> Rows:
        for variant in ONESHOT:
            for way in ("search", "programme", "slope"):
                own = [of.get((variant, way, kind, bits)) for bits in BUDGETS]
                if any(own):
                    yield [LABELS[variant], way, *map(_accuracy, own)]
        for variant in ("both", APART):
            own = [of.get((variant, "uniform", "", bits)) for bits in BUDGETS]
            if any(own):
                yield [LABELS[variant], "one width for all", *map(_accuracy, own)]

    return drawn()


@tabled("training", "epochs", "seeds", *(f"{bits} bits" for bits in (2, 3, 4, 5, 6)), "CPU-s to train")
def widths(found: Any) -> Rows:
    """Accuracy of uniform widths of one network, and of networks trained apart."""
    rows = [r for r in found["rows"] if r["group"] == _group(found) and r["way"] == "uniform"]
    for variant, label in LABELS.items():
        own = {r["bits"]: r for r in rows if r["variant"] == variant}
        if own:
            some = next(iter(own.values()))
            parts = own.values() if variant == APART else [some]
            seconds = sum(r["train_cpu_s"][0] for r in parts)
            shown = [_accuracy(own.get(bits)) for bits in (2, 3, 4, 5, 6)]
            yield [label, str(some["epochs"]), str(some["seeds"]), *shown, f"{seconds:,.0f}"]


@tabled(
    "training", "seeds", "mean", "standard deviation", "worst", "2 bits", "4 bits", "6 bits", "CPU-s to train"
)
def spread(found: Any) -> Rows:
    """Accuracy of configurations drawn at random, and of uniform widths beside them."""
    rows = [r for r in found["rows"] if r["group"] == "large" and r["way"] == "uniform"]
    of = {(r["variant"], r["bits"]): r for r in rows}
    drawn = {r["variant"]: r for r in found["spread"]}
    for variant in (v for v in ONESHOT if v in drawn):
        own = drawn[variant]
        some = [_percent(own[name], 2) for name in ("mean", "deviation", "worst")]
        uniform = [_accuracy(of[variant, bits]) for bits in (2, 4, 6)]
        seconds = of[variant, 2]["train_cpu_s"][0]
        yield [LABELS[variant], str(own["seeds"]), *some, *uniform, f"{seconds:,.0f}"]


@tabled(
    "training", "layers frozen", "weights that waver", "least layer", "most", "distortion",
    "gradient of its loss over the rest's",
)  # fmt: skip
def moved_by(found: Any) -> Rows:
    """What the scheduler and the mitigation act on, at the end of each training."""
    of = {row["variant"]: row for row in found["moved"]}
    for variant in (v for v in ONESHOT if v in of):
        own = of[variant]
        shares = [_percent(own[name]) for name in ("frozen", "wavering")]
        ends = [f"{own[name]:.1%}" for name in ("least", "most")]
        far = f"{own['distortion'][0]:.2f}"
        yield [LABELS[variant], *shares, *ends, far, _percent(own["pull"])]


@tabled("training", *(f"{bits:g} bits" for bits in BUDGETS))
def large(found: Any) -> Rows:
    """Accuracy at each budget of bit operations, bits chosen by one slope."""
    of = {
        (r["variant"], r["bits"]): r for r in found["rows"] if r["group"] == "large" and r["way"] == "slope"
    }
    for variant in ONESHOT:
        if (variant, BUDGETS[0]) in of:
            yield [LABELS[variant], *(_accuracy(of.get((variant, bits))) for bits in BUDGETS)]


def _group(found: Any) -> str:
    """Return ``full`` where one network for all widths and those apart have run on one seed at least."""
    there = {r["variant"] for r in found["rows"] if r["group"] == "full"}
    return "full" if there >= {"both", APART} else "short"


TABLES: dict[str, Draw] = {
    "supernet-widths": widths,
    "supernet-bitops": partial(budgets, "bitops"),
    "supernet-nbytes": partial(budgets, "nbytes"),
    "supernet-spread": spread,
    "supernet-large": large,
    "supernet-moved": moved_by,
}


if __name__ == "__main__":
    torch.set_num_threads(1)  # no pool of threads beside another bench
    run_study("supernet", sys.argv[1:], cells, measure, summary)
