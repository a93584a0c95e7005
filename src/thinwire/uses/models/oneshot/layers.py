"""Convolutions whose weights serve all widths, with a batch norm for each pair of widths."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.uses.models.oneshot.quantiser import Steps

Pair = tuple[int, int]  # bits of weights, bits of what they are multiplied with
EDGES = 8  # bits of the first and the last layer, always [code]


class PairedNorm(nn.Module):
    """A batch norm a pair of widths, in tensors [widths of weights, widths of inputs, channels]."""

    mean: Tensor
    variance: Tensor

    def __init__(self, widths: int, channels: int) -> None:
        super().__init__()
        shape = widths, widths, channels
        self.scale = nn.Parameter(torch.ones(shape))
        self.shift = nn.Parameter(torch.zeros(shape))
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("variance", torch.ones(shape))
        self.momentum = 0.1

    def forward(self, x: Tensor, i: int, j: int) -> Tensor:
        """Return maps [B, C, H, W] normed by the pair at i, j."""
        known = self.mean[i, j], self.variance[i, j]
        return functional.batch_norm(
            x, *known, self.scale[i, j], self.shift[i, j], self.training, self.momentum
        )


class SharedConv(nn.Module):
    """A convolution at any pair of widths: one set of weights, a step a width, a norm a pair.

    ``signed``: whether inputs have both signs; behind a ReLU they have not.
    """

    def __init__(
        self,
        channels: tuple[int, int],
        kernel: int,
        stride: int,
        widths: Sequence[int],
        signed: bool = False,
    ) -> None:
        super().__init__()
        inputs, outputs = channels
        self.stride, self.padding, self.widths = stride, kernel // 2, tuple(widths)
        deviation = math.sqrt(2 / (outputs * kernel * kernel))
        self.weight = nn.Parameter(torch.randn(outputs, inputs, kernel, kernel) * deviation)
        self.weights, self.inputs = Steps(widths, signed=True), Steps(widths, signed)
        self.weights.begin(self.weight.detach())
        self.norm = PairedNorm(len(self.widths), outputs)

    def forward(self, x: Tensor, pair: Pair) -> Tensor:
        """Return normed maps [B, outputs, H, W] of maps [B, inputs, H, W]."""
        w, a = pair
        weight = self.weights(self.weight, w)
        y = functional.conv2d(self.inputs(x, a), weight, stride=self.stride, padding=self.padding)
        return self.norm(y, self.weights.index(w), self.inputs.index(a))


class Head(nn.Module):
    """The last layer, at eight bits: what is left of maps to logits."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, classes)
        self.weights, self.inputs = Steps((EDGES,), signed=True), Steps((EDGES,), signed=False)
        self.weights.begin(self.linear.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, classes] of features [B, inputs]."""
        weight = self.weights(self.linear.weight, EDGES)
        return functional.linear(self.inputs(x, EDGES), weight, self.linear.bias)
