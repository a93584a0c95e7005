"""A matrix of low rank instead of a tensor: the product of two thin factors of 8-bit integers.

The parts: the left factors, int8 [matrices, rows, k]; the right ones, int8 [matrices, width, k]; the powers
of two of the rows and of the columns, int8; k is the rank, or the rows or the width where fewer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.codec import Layout, check_layout, layout_nbytes, saturated
from thinwire.codecs.kernels.noise import uniforms
from thinwire.codecs.kernels.scales import matrices, powers_of_two
from thinwire.spec import Spec
from thinwire.types import InputError, Payload, PayloadError, TensorSpec, require
from thinwire.verdicts import refuse

_MOST = 1024  # times 128 * 128 is 2**24, up to which float32 has all whole numbers
_PASSES = 2
# The powers of two of rows and of columns: a product of two, from one up to 2**24 times, is a normal float32.
_ROWS, _COLUMNS = (-40, -6), (-86, 100)


@dataclass(frozen=True, repr=False)
class LowRank(Spec):
    """Send a matrix of ``rank`` at most that is near to each sample's, as two factors.

    A row is the values along the last dimension; in a tensor of two dimensions or fewer, each sample is a row
    of one matrix. Two passes of subspace iteration from a fixed start find the factors. Each row of the left
    one, and each column's of the right one, are 8-bit integers times a power of two; sums of their products
    are whole numbers below 2**24, so float32 has them exactly in any order of summation, on any device.

    Source: the low-rank code of CompactFusion (arXiv 2507.17511), with integers in place of halves. Any
    shape, any float dtype (the factors are found in float64). Magnitudes above 2**100 may saturate. Errors:
    ``InputError`` for a NaN or an infinity.

    >>> x = torch.tensor([[64.0, 32.0], [32.0, 16.0]])
    >>> codec = LowRank(rank=1)
    >>> bool((codec.decode(codec.encode(x)) - x).norm() < 0.02 * x.norm())
    True
    """

    rank: int = 8
    finite = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.rank <= _MOST, InputError, f"rank={self.rank} is not in 1..{_MOST}")

    def encode(self, x: Tensor) -> Payload:
        spec = TensorSpec.of(x)
        values = x.detach().to(torch.float64).contiguous().reshape(matrices(spec))
        check_finite(values)
        left, right = _factors(values, self._kept(spec))
        (u, rows), (v, columns) = _integers(left, _ROWS), _integers(right, _COLUMNS)
        return Payload(spec, (u.flatten(), v.flatten(), rows.flatten(), columns.flatten()))

    def decode(self, payload: Payload) -> Tensor:
        spec, k = payload.spec, self._kept(payload.spec)
        check_layout(payload, self.layout(spec))
        count, height, width = matrices(spec)
        u, v, rows, columns = payload.parts
        left, right = (p.reshape(count, n, k).to(torch.float32) for p, n in ((u, height), (v, width)))
        row, column = _powers("row", rows, _ROWS), _powers("column", columns, _COLUMNS)
        x = left.new_empty((count, height, width))
        x.baddbmm_(left, right.transpose(1, 2), beta=0)  # in place, which no autocast of the model's touches
        x.mul_(row.reshape(count, height, 1)).mul_(column.reshape(count, 1, width))
        return saturated(x, spec.dtype).reshape(spec.shape)

    def layout(self, spec: TensorSpec) -> Layout:
        count, rows, width = matrices(spec)
        sizes = rows * self._kept(spec), width * self._kept(spec), rows, width
        return tuple((torch.int8, count * n) for n in sizes)

    def nbytes(self, spec: TensorSpec) -> int:
        return layout_nbytes(self.layout(spec))

    def _kept(self, spec: TensorSpec) -> int:
        return min(self.rank, *matrices(spec)[1:])


def check_finite(values: Tensor) -> None:
    """Refuse values of matrices that are not finite: ``InputError``, without a wait for a device."""
    text = "a NaN or infinite value has no near matrix; look for the overflow that made it"
    if values.numel():
        refuse(~torch.stack(torch.aminmax(values)).isfinite().all(), lambda: InputError(text))


def _factors(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return float64 [matrices, rows, k], with columns of length 1, and [matrices, width, k].

    Thin factors are multiplied as wide ones from the left, which is up to ten times as fast on a CPU.
    """
    count, _, width = x.shape
    if not x.numel():
        return x, x
    start = uniforms(0, k * width, x.device).to(torch.float64) / 2**31 - 1
    left, right = x, start.reshape(1, k, width).expand(count, -1, -1)
    for _ in range(_PASSES):
        left = torch.linalg.qr(torch.bmm(right, x.transpose(1, 2)).transpose(1, 2))[0]
        right = torch.bmm(left.transpose(1, 2), x)
    return left, right.transpose(1, 2)


def _integers(factor: Tensor, bounds: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return a factor as int8, and the powers of two, int8, of its rows that they are to be taken times."""
    peaks = factor.abs().amax(2) if factor.numel() else factor.new_zeros(factor.shape[:2])
    powers = (torch.frexp(peaks).exponent - 7).clamp_(*bounds)
    numbers = (factor * powers_of_two(-powers[:, :, None])).round_().clamp_(-127, 127)
    return numbers.to(torch.int8), powers.to(torch.int8)


def _powers(name: str, stored: Tensor, bounds: tuple[int, int]) -> Tensor:
    """Return the powers of two that a part holds, float32; ``PayloadError`` for one that nobody writes."""
    if stored.numel():
        low, high = torch.aminmax(stored)
        wrong = (low < bounds[0]) | (high > bounds[1])
        text = f"the power of two of a {name} lies outside {bounds[0]}..{bounds[1]}"
        refuse(wrong, lambda: PayloadError(text))
    return powers_of_two(stored.clamp(*bounds))
