"""A small residual network that holds all widths of all layers at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from thinwire.types import InputError, require
from thinwire.uses.models.oneshot.layers import EDGES, Head, Pair, SharedConv
from thinwire.uses.models.oneshot.quantiser import Steps

Configuration = tuple[Pair, ...]  # of the layers in order
WIDTHS = (2, 3, 4, 5, 6)


@dataclass(frozen=True)
class Shape:
    """The shape of a network: a block for each of ``channels``, each but the first halves the maps."""

    channels: tuple[int, ...] = (16, 32, 64)
    stride: int = 2  # of the first layer
    images: int = 1  # channels of an image
    classes: int = 10
    widths: tuple[int, ...] = WIDTHS

    def __post_init__(self) -> None:
        good = bool(self.widths) and list(self.widths) == sorted({*self.widths}) and self.widths[0] >= 2
        told = f"widths are {self.widths}; give each once, from 2 bits, the smallest first"
        require(good, InputError, told)


class Block(nn.Module):
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
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            first = shape.channels[0]
            self.stem = SharedConv((shape.images, first), 3, shape.stride, (EDGES,), signed=True)
            strides = (1, *(2 for _ in shape.channels[1:]))
            joints = pairwise((first, *shape.channels))
            self.blocks = nn.ModuleList(
                Block(c, s, shape.widths) for c, s in zip(joints, strides, strict=True)
            )
            self.head = Head(shape.channels[-1], shape.classes)
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

    def steps(self) -> Iterator[Steps]:
        """Yield all learned steps, those of the first and last layer included."""
        yield from (module for module in self.modules() if isinstance(module, Steps))
