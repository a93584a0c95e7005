"""What a configuration costs: bit operations of an image, and bytes of what is sent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from thinwire.uses.models.oneshot.layers import EDGES
from thinwire.uses.models.oneshot.supernet import Configuration, Supernet

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
