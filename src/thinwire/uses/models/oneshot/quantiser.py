"""Learned steps: values become whole multiples of a step, and training moves the step.

Source: S. K. Esser et al., "Learned Step Size Quantization" (ICLR 2020), eq. 1 to 3 [from memory].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.types import InputError, require

LEAST = 1e-6  # a step that training made zero or negative would turn all signs
SPREAD = 3  # deviations from the mean that the steps of weights reach at first [code]


def limits(bits: int, signed: bool) -> tuple[int, int]:
    """Return the lowest and the highest code of a width.

    >>> limits(2, signed=True), limits(2, signed=False)
    ((-2, 1), (0, 3))
    """
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)


def codes_of(x: Tensor, step: Tensor, bits: int, signed: bool) -> Tensor:
    """Return the whole numbers that stand for values, as floats of the same shape."""
    low, high = limits(bits, signed)
    return (x / step).round_().clamp_(low, high)


within = torch.ops.aten.hardtanh_backward  # values where others are strictly between limits, else zeros


class _Rounded(torch.autograd.Function):
    """Codes times the step; gradients as if rounding were not there, none for values out of reach."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor, low: int, high: int, scale: float) -> Tensor:
        relative = x / step
        codes = relative.round().clamp_(low, high)
        ctx.save_for_backward(relative, codes)
        ctx.limits = low, high, scale
        return codes * step

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        relative, codes = ctx.saved_tensors
        low, high, scale = ctx.limits
        # ``within`` is one pass each; masks and ``where`` took six, and a quarter of a training step.
        by_step = (codes - within(relative, relative, low, high)).mul_(gradient)
        return within(gradient, relative, low, high), by_step.sum() * scale, None, None, None


def quantised(x: Tensor, step: Tensor, bits: int, signed: bool) -> Tensor:
    """Return values of any shape rounded to multiples of ``step``, a scalar, within the codes of the width.

    The step's gradient is scaled by 1 / sqrt(values x highest code), so that steps move at the pace of
    weights.

    >>> quantised(torch.tensor([-9.0, 0.2, 0.6]), torch.tensor(0.5), 2, signed=True).tolist()
    [-1.0, 0.0, 0.5]
    """
    low, high = limits(bits, signed)
    found: Tensor = _Rounded.apply(x, step, low, high, 1 / math.sqrt(x.numel() * high))
    return found


class LearnedSteps(nn.Module):
    """A learned step for each width; what they divide is shared by all widths.

    The step of a width is set from the first values that it sees: 2 mean |x| / sqrt(highest code). Weights
    set theirs by ``begin``.
    """

    begun: Tensor

    def __init__(self, widths: Sequence[int], signed: bool) -> None:
        super().__init__()
        self.widths, self.signed = tuple(widths), signed
        self.sizes = nn.Parameter(torch.ones(len(self.widths)))
        self.register_buffer("begun", torch.zeros(len(self.widths), dtype=torch.bool))

    def forward(self, x: Tensor, bits: int) -> Tensor:
        """Return values rounded at a width."""
        i = self.index(bits)
        if not self.begun[i]:
            high = limits(bits, self.signed)[1]
            self._set(i, 2 * float(x.detach().abs().mean()) / math.sqrt(high))
        return quantised(x, self.sizes[i], bits, self.signed)

    def index(self, bits: int) -> int:
        """Return the place of a width. Errors: ``InputError`` for one that is not trained."""
        told = f"{bits} bits are asked for, and the network has {', '.join(map(str, self.widths))}"
        require(bits in self.widths, InputError, told)
        return self.widths.index(bits)

    def of(self, bits: int) -> Tensor:
        """Return the step of a width, without gradient."""
        return self.sizes[self.index(bits)].detach()

    def begin(self, x: Tensor) -> None:
        """Set the steps of all widths so that three deviations of ``x`` are within their codes."""
        deviation, mean = x.std(correction=0), x.mean()
        reach = float(torch.maximum((mean - SPREAD * deviation).abs(), (mean + SPREAD * deviation).abs()))
        for i, bits in enumerate(self.widths):
            self._set(i, reach / (1 << bits - 1))

    @torch.no_grad()
    def _set(self, i: int, size: float) -> None:
        self.sizes[i] = max(size, LEAST)
        self.begun[i] = True

    @torch.no_grad()
    def keep_positive(self) -> None:
        """Move steps that an optimiser made too small back to the least."""
        self.sizes.clamp_(min=LEAST)


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
        self.weights, self.inputs = LearnedSteps(widths, signed=True), LearnedSteps(widths, signed)
        self.weights.begin(self.weight.detach())
        self.norm = PairedNorm(len(self.widths), outputs)

    def forward(self, x: Tensor, pair: Pair) -> Tensor:
        """Return normed maps [B, outputs, H, W] of maps [B, inputs, H, W]."""
        w, a = pair
        weight = self.weights(self.weight, w)
        y = functional.conv2d(self.inputs(x, a), weight, stride=self.stride, padding=self.padding)
        return self.norm(y, self.weights.index(w), self.inputs.index(a))


class Classifier(nn.Module):
    """The last layer, at eight bits: what is left of maps to logits."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, classes)
        self.weights, self.inputs = LearnedSteps((EDGES,), signed=True), LearnedSteps((EDGES,), signed=False)
        self.weights.begin(self.linear.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, classes] of features [B, inputs]."""
        weight = self.weights(self.linear.weight, EDGES)
        return functional.linear(self.inputs(x, EDGES), weight, self.linear.bias)
