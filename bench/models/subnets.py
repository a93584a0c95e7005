"""The networks inside a trained one: how far their accuracies spread, and what moved them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from bench.study.cells import interval
from thinwire.uses.models.oneshot.supernet import Configuration, Supernet
from thinwire.uses.models.oneshot.supernet_training import (
    Batch,
    TrainingMethod,
    distortion,
    drawn,
    path_loss,
    wavering,
)

DRAW = 2401  # of all variants and seeds: they are compared on the same networks
PATHS = 6  # random ones, whose gradients are compared


def sampled(net: Supernet, many: int) -> list[Configuration]:
    """Return so many configurations, each layer's widths drawn at random; the same for every network."""
    draw = torch.Generator().manual_seed(DRAW)
    return [drawn([net.shape.widths] * len(net.layers), net.shape.widths, draw) for _ in range(many)]


def moved(net: Supernet, batch: Batch, method: TrainingMethod) -> dict[str, Any]:
    """Return what scheduler and mitigation act on, at the end of a training.

    ``wavering``: each layer's share of weights near an edge, at its lowest width. ``distortion``: the mean
    over random paths; ``pull``: the norm of the gradient of its loss over that of the rest.
    """
    lowest = net.shape.widths[0]
    found = [wavering(layer.weight, layer.weights.of(lowest), lowest) for layer in net.layers]
    far, pulls = zip(*_pulls(net, batch, method), strict=True)
    return {"wavering": found, "distortion": fmean(far), "pull": fmean(pulls)}


def _pulls(net: Supernet, batch: Batch, method: TrainingMethod) -> Iterator[tuple[float, float]]:
    widths, layers = net.shape.widths, len(net.layers)
    images, classes = batch
    weights = [layer.weight for layer in net.layers]
    was = net.training
    net.train()
    with torch.no_grad():
        logits, targets = net.traced(images, net.uniform(widths[-1]))
    for configuration in sampled(net, PATHS):
        own, features = net.traced(images, configuration)
        far = distortion(features, targets, configuration, [widths] * layers)
        rest = path_loss(own, classes, logits.softmax(1))
        pull = _norm(torch.autograd.grad(rest, weights, retain_graph=True))
        towards = _norm(torch.autograd.grad(far, weights, allow_unused=True)) if far.requires_grad else 0.0
        yield float(far.detach()), method.mitigation * towards / pull
    net.train(was)


def _norm(gradients: Sequence[Tensor | None]) -> float:
    return float(torch.stack([g.square().sum() for g in gradients if g is not None]).sum().sqrt())


Cells = Iterable[tuple[str, Mapping[str, Any]]]  # of all seeds, each with the name of its training


def spreads(found: Cells) -> list[dict[str, Any]]:
    """Return a row a variant: mean, deviation and worst of the sampled accuracies, over all seeds.

    >>> row, = spreads([("both", {"sampled": [0.5, 0.7, 0.9]}), ("both", {"sampled": [0.5, 0.6, 0.7]})])
    >>> row["many"], [round(row[name][0], 2) for name in ("mean", "deviation", "worst")]
    (3, [0.65, 0.15, 0.5])
    """
    ways: dict[str, Callable[[list[float]], float]] = {"mean": fmean, "deviation": stdev, "worst": min}
    return [
        {"variant": variant, "seeds": len(cells), "many": len(cells[0]["sampled"])}
        | {name: interval([way(cell["sampled"]) for cell in cells]) for name, way in ways.items()}
        for variant, cells in _by_variant(found).items()
    ]


def movements(found: Cells) -> list[dict[str, Any]]:
    """Return a row a variant of what ``moved`` told: the mean layer and both ends, over all seeds.

    ``frozen``: the share of layers and steps without the lowest width.
    """
    rows = list[dict[str, Any]]()
    for variant, cells in _by_variant(found).items():
        layers = [fmean(own) for own in zip(*(cell["wavering"] for cell in cells), strict=True)]
        means = {name: interval([cell[name] for cell in cells]) for name in ("distortion", "pull")}
        shares = {n: interval([fmean(cell[n]) for cell in cells]) for n in ("wavering", "frozen")}
        ends = {"least": min(layers), "most": max(layers)}
        rows.append({"variant": variant, "seeds": len(cells), **means, **shares, **ends})
    return rows


def _by_variant(found: Cells) -> dict[str, list[Mapping[str, Any]]]:
    cells: dict[str, list[Mapping[str, Any]]] = {}
    for variant, cell in found:
        cells.setdefault(variant, []).append(cell)
    return cells
