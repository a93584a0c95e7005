"""A small residual network that holds all widths of all layers at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.seeding import seeded
from thinwire.types import InputError, require
from thinwire.uses.models.oneshot.quantiser import (
    EDGES,
    Classifier,
    LearnedSteps,
    Pair,
    PairedNorm,
    SharedConv,
)

Configuration = tuple[Pair, ...]  # of the layers in order
WIDTHS = (2, 3, 4, 5, 6)


@dataclass(frozen=True)
class Shape:
    """The shape of a network: ``repeats`` blocks for each of ``channels``.

    The first block of each but the first channels halves the maps.
    """

    channels: tuple[int, ...] = (16, 32, 64)
    stride: int = 2  # of the first layer
    images: int = 1  # channels of an image
    classes: int = 10
    widths: tuple[int, ...] = WIDTHS
    repeats: int = 1

    def __post_init__(self) -> None:
        good = bool(self.widths) and list(self.widths) == sorted({*self.widths}) and self.widths[0] >= 2
        told = f"widths are {self.widths}; give each once, from 2 bits, the smallest first"
        require(good, InputError, told)
        told = f"repeats is {self.repeats}; give 1 or more blocks for each of the channels"
        require(self.repeats >= 1, InputError, told)

    def blocks(self) -> Iterator[tuple[tuple[int, int], int]]:
        """Yield each block's channels, in and out, and its stride.

        >>> list(Shape(channels=(4, 8), repeats=2).blocks())
        [((4, 4), 1), ((4, 4), 1), ((4, 8), 2), ((8, 8), 1)]
        """
        all_channels = [c for c in self.channels for _ in range(self.repeats)]
        joints = pairwise((self.channels[0], *all_channels))
        yield from ((joint, 2 if i and i % self.repeats == 0 else 1) for i, joint in enumerate(joints))


class ResidualBlock(nn.Module):
    """Two convolutions, and a shortcut round them that is a third one where shapes differ."""

    def __init__(self, channels: tuple[int, int], stride: int, widths: Sequence[int]) -> None:
        super().__init__()
        inputs, outputs = channels
        self.first = SharedConv(channels, 3, stride, widths)
        self.second = SharedConv((outputs, outputs), 3, 1, widths)
        same = inputs == outputs and stride == 1
        self.shortcut = None if same else SharedConv(channels, 1, stride, widths)

    def layers(self) -> Iterator[SharedConv]:
        """Yield the layers in the order of a configuration."""
        yield from (self.first, self.second)
        if self.shortcut is not None:
            yield self.shortcut

    def forward(self, x: Tensor, pairs: Iterator[Pair], features: list[Tensor]) -> Tensor:
        """Return maps after the block, adding what each layer gave to ``features``."""
        features.append(self.first(x, next(pairs)))
        features.append(self.second(features[-1].relu(), next(pairs)))
        through = features[-1]
        if self.shortcut is not None:
            features.append(self.shortcut(x, next(pairs)))
            x = features[-1]
        return (through + x).relu()


class Supernet(nn.Module):
    """The network: images [B, images, H, W] to logits [B, classes], at the widths of a configuration.

    >>> net = Supernet(Shape(), seed=0)
    >>> len(net.layers), net(torch.zeros(1, 1, 28, 28), net.uniform(3)).shape
    (8, torch.Size([1, 10]))
    """

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        with seeded(seed):
            first = shape.channels[0]
            self.stem = SharedConv((shape.images, first), 3, shape.stride, (EDGES,), signed=True)
            self.blocks = nn.ModuleList(ResidualBlock(c, s, shape.widths) for c, s in shape.blocks())
            self.head = Classifier(shape.channels[-1], shape.classes)
        self.layers = [layer for block in self.blocks for layer in block.layers()]  # type: ignore[operator]

    def forward(self, images: Tensor, configuration: Configuration) -> Tensor:
        """Return logits [B, classes]."""
        return self.traced(images, configuration)[0]

    def traced(self, images: Tensor, configuration: Configuration) -> tuple[Tensor, list[Tensor]]:
        """Return logits, and the normed maps of each layer in order."""
        pairs, features = iter(configuration), list[Tensor]()
        x = self.stem(images, (EDGES, EDGES)).relu()
        for block in self.blocks:
            x = block(x, pairs, features)
        return self.head(x.mean((2, 3))), features

    def uniform(self, weights: int, inputs: int | None = None) -> Configuration:
        """Return the configuration of one width for all weights, and one for all inputs, else the same."""
        return ((weights, inputs or weights),) * len(self.layers)

    def steps(self) -> Iterator[LearnedSteps]:
        """Yield all learned steps, those of the first and last layer included."""
        yield from (module for module in self.modules() if isinstance(module, LearnedSteps))


@torch.no_grad()
def recalibrate(net: Supernet, configuration: Configuration, batches: Iterable[Tensor]) -> None:
    """Set the statistics of the norms that a configuration uses to the means over batches of images.

    Those of training are of inputs that all kinds of paths gave. Errors: ``InputError`` without a batch.
    """
    seen = 0
    for seen, images in enumerate(batches, 1):
        with _norms(net, 1 / seen):
            net(images, configuration)
    require(seen > 0, InputError, "no images are given to calibrate with; give one batch or more")


@torch.no_grad()
def batch_loss(net: Supernet, configuration: Configuration, images: Tensor, classes: Tensor) -> float:
    """Return the cross-entropy of a configuration on a batch, normed by the batch; statistics stay."""
    with _norms(net, 0.0):
        return float(functional.cross_entropy(net(images, configuration), classes))


@torch.no_grad()
def accuracy(net: Supernet, configuration: Configuration, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the share of images that a configuration recognises, by the statistics it has."""
    right = many = 0
    net.eval()
    for images, classes in batches:
        right += int((net(images, configuration).argmax(1) == classes).sum())
        many += len(classes)
    require(many > 0, InputError, "no images are given to count with; give one batch or more")
    return right / many


@contextmanager
def _norms(net: Supernet, momentum: float) -> Iterator[None]:
    """Norm by the batch, which counts for as much in the statistics; then as before."""
    norms = [module for module in net.modules() if isinstance(module, PairedNorm)]
    was, training = [norm.momentum for norm in norms], net.training
    net.train()
    for norm in norms:
        norm.momentum = momentum
    try:
        yield
    finally:
        for norm, old in zip(norms, was, strict=True):
            norm.momentum = old
        net.train(training)


NUMBER = 4  # bytes of a scale, a shift, a step


@dataclass(frozen=True)
class Costs:
    """What each layer has: weights, multiplications of an image; and what no configuration changes.

    >>> costs = Costs(weights=(100, 8), products=(1000, 10), fixed_bitops=64, fixed_nbytes=4)
    >>> costs.bitops(((2, 3), (4, 4))), costs.nbytes(((2, 3), (4, 4)))
    (6224, 33)
    """

    weights: tuple[int, ...]
    products: tuple[int, ...]
    fixed_bitops: int
    fixed_nbytes: int

    def bitops(self, configuration: Configuration) -> int:
        """Return bits of weights x bits of inputs x multiplications, over all layers, for one image."""
        layers = zip(self.products, configuration, strict=True)
        return self.fixed_bitops + sum(n * w * a for n, (w, a) in layers)

    def nbytes(self, configuration: Configuration) -> int:
        """Return the bytes of weights at their bits, steps, norms and both ends, without entropy coding."""
        layers = zip(self.weights, configuration, strict=True)
        return self.fixed_nbytes + sum(-(-n * w // 8) for n, (w, _) in layers)


@torch.no_grad()
def costs_of(net: Supernet, side: int) -> Costs:
    """Return the costs of a network on images of ``side`` x ``side``.

    One norm a layer counts, folded into a scale and a shift a channel: a configuration ships no other.
    """
    was = net.training
    net.eval()
    image = torch.zeros(1, net.shape.images, side, side)
    maps = net.traced(image, net.uniform(net.shape.widths[-1]))[1]
    first = net.stem(image, (EDGES, EDGES))
    net.train(was)
    weights = [layer.weight.numel() for layer in net.layers]
    products = [n * x[0, 0].numel() for n, x in zip(weights, maps, strict=True)]
    ends = net.stem.weight.numel(), net.head.linear.weight.numel()
    norms = sum(2 * x.shape[1] for x in (*maps, first))
    numbers = norms + _numel(net.head.linear.bias) + 2 * (len(weights) + len(ends))
    bitops = EDGES * EDGES * (ends[0] * first[0, 0].numel() + ends[1])
    return Costs(tuple(weights), tuple(products), bitops, sum(ends) * EDGES // 8 + NUMBER * numbers)


def _numel(bias: nn.Parameter | None) -> int:
    return 0 if bias is None else bias.numel()
