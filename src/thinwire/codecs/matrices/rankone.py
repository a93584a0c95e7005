"""One to four bits a value, times a scale of its row and one of its column: the residuals of attention.

The parts: the codes, packed as in ``thinwire.codecs.kernels.bits``, in the tensor's order; the rows' scales;
the columns' scales, both bfloat16 and matrix after matrix. A code counts the levels from the lowest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs.codec import Layout, check_layout, layout_nbytes, saturated
from thinwire.codecs.kernels import kernel_calls, rankone_calls, scales, triton_calls
from thinwire.codecs.kernels.bits import pack, packed_nbytes, unpack
from thinwire.codecs.kernels.scales import matrices
from thinwire.spec import Spec
from thinwire.types import InputError, Payload, PayloadError, TensorSpec, require
from thinwire.verdicts import refuse

# Smallest and largest scale: a product of two is no denormal, and finite also times the largest level.
_ROWS, _COLUMNS = (2.0**-99, 2.0**100), (2.0**-24, 2.0**24)
# Of a Gaussian, in mean magnitudes: the best ones (Lloyd 1982, Max 1960) in 8 bits at most, so that their
# product with two scales is exact. From an edge on a value has the next level.
_LEVELS = {
    1: (1.0,),
    2: (9 / 16, 15 / 8),
    3: (5 / 16, 15 / 16, 27 / 16, 43 / 16),
    4: (5 / 32, 31 / 64, 53 / 64, 19 / 16, 25 / 16, 65 / 32, 83 / 32, 55 / 16),
}
_EDGES = {
    1: (),
    2: (5 / 4,),
    3: (5 / 8, 21 / 16, 35 / 16),
    4: (21 / 64, 21 / 32, 1.0, 11 / 8, 29 / 16, 37 / 16, 3.0),
}
_PLACES = 20  # bits of the largest magnitude below its first, which the sums of magnitudes count


@dataclass(frozen=True, repr=False)
class RankOne(Spec):
    """Code each value as a level of ``bits`` bits times a scale of its row and a scale of its column.

    With 1 bit the levels are -1 and 1, with 2 bits -15/8, -9/16, 9/16 and 15/8, with 3 and 4 bits the best 8
    and 16 for a Gaussian. A row is the values along the last dimension, a column those of one index of it
    within a sample; in a tensor of two dimensions or fewer, each sample is a row and the columns go over all
    of them. A row's scale is the mean magnitude of its values, a column's is that of its own over that of
    all: the magnitudes as a matrix of rank one.

    A scale has 8 significant bits, so every product is exact in float32, and a sum that a device fuses with
    it comes to the same. Magnitudes count in the means as far as they reach 2**-20 of the sample's largest.

    Source: the 1-bit and 2-bit codes of CompactFusion (arXiv 2507.17511); 3 and 4 bits are ours. Any shape,
    any float dtype (computed in float32). Errors: ``InputError`` for a NaN or an infinity.

    >>> x = torch.tensor([[1.0, -4.0], [-2.0, 8.0]])
    >>> codec = RankOne()
    >>> codec.decode(codec.encode(x)).round(decimals=1)
    tensor([[ 1., -4.],
            [-2.,  8.]])
    """

    bits: int = 1
    finite = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.bits in _LEVELS, InputError, f"bits={self.bits} is not in 1..4")

    def encode(self, x: Tensor) -> Payload:
        if fused := self._fused(x, None, False):
            return fused[0]
        codes, rows, columns = self._coded(x)
        return self._payload(TensorSpec.of(x), codes, rows, columns)

    def roundtrip_against(self, x: Tensor, reference: Tensor) -> tuple[Payload, Tensor] | None:
        return self._fused(x, reference, True)

    def roundtrip(self, x: Tensor) -> tuple[Payload, Tensor]:
        if fused := self._fused(x, None, True):
            return fused
        spec, coded = TensorSpec.of(x), self._coded(x)
        return self._payload(spec, *coded), self._values(*coded, spec)

    def decode(self, payload: Payload) -> Tensor:
        spec = payload.spec
        check_layout(payload, self.layout(spec))
        x = self._restored(payload, None)
        if x is not None:
            return x
        packed, row, column = payload.parts
        count, rows, width = matrices(spec)
        _check("row", row, _ROWS)
        _check("column", column, _COLUMNS)
        codes = unpack(packed, self.bits, spec.numel).reshape(count, rows, width)
        return self._values(codes, row.reshape(count, rows), column.reshape(count, width), spec)

    def decode_against(self, payload: Payload, reference: Tensor) -> Tensor | None:
        check_layout(payload, self.layout(payload.spec))
        return self._restored(payload, reference)

    def _fused(self, x: Tensor, reference: Tensor | None, back: bool) -> Any:
        """Return what ``roundtrip`` does, by kernels; its second if ``back``; None where there are none."""
        x = x.detach()
        if not x.numel() or not triton_calls.there(x, reference):
            return None
        parts, restored, wrong = rankone_calls.coded(self._levels, x, reference, back)
        refuse(wrong, _not_finite)
        return Payload(
            TensorSpec(tuple(x.shape), x.dtype if reference is None else torch.float32), parts
        ), restored

    def _restored(self, payload: Payload, reference: Tensor | None) -> Tensor | None:
        spec = payload.spec
        fits = reference is None or spec.dtype == torch.float32
        if not fits or not spec.numel or not triton_calls.there(payload.parts[0], reference):
            return None
        x, wrong = rankone_calls.values(self._levels, payload.parts, spec, reference)
        refuse(wrong[0], lambda: _outside("row", _ROWS))
        refuse(wrong[1], lambda: _outside("column", _COLUMNS))
        return x

    @cached_property
    def _levels(self) -> rankone_calls.Levels:
        """What kernels are told."""
        return rankone_calls.Levels(self.bits, _EDGES[self.bits], _LEVELS[self.bits], _ROWS, _COLUMNS)

    def layout(self, spec: TensorSpec) -> Layout:
        count, rows, width = matrices(spec)
        codes = (torch.uint8, packed_nbytes(spec.numel, self.bits))
        return codes, (torch.bfloat16, count * rows), (torch.bfloat16, count * width)

    def nbytes(self, spec: TensorSpec) -> int:
        return layout_nbytes(self.layout(spec))

    def _payload(self, spec: TensorSpec, codes: Tensor, row: Tensor, column: Tensor) -> Payload:
        return Payload(spec, (pack(codes.flatten(), self.bits), row.flatten(), column.flatten()))

    def _coded(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the codes of ``x``, uint8 [matrices, rows, width], and the scales, bfloat16."""
        values = x.detach().to(torch.float32).contiguous().reshape(matrices(TensorSpec.of(x)))
        compiled = kernel_calls.there(values)
        sums = kernel_calls.magnitudes(values) if compiled else None
        row, column = _scales(*(sums or _magnitudes(values)))  # the latter says what is wrong
        scale, edges = (row.to(torch.float32), column.to(torch.float32)), _EDGES[self.bits]
        if compiled:
            codes = kernel_calls.levelled(values, *scale, rankone_calls.table(edges, values.device))
        else:
            codes = _levelled(values, *scale, edges)
        return codes, row, column

    def _values(self, codes: Tensor, row: Tensor, column: Tensor, spec: TensorSpec) -> Tensor:
        scale, levels = (row.to(torch.float32), column.to(torch.float32)), _LEVELS[self.bits]
        if kernel_calls.there(codes, *scale):
            x = kernel_calls.scaled(codes, *scale, rankone_calls.table(levels, codes.device))
        else:
            x = _scaled(codes, *scale, levels)
        return saturated(x, spec.dtype).reshape(spec.shape)


def _magnitudes(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what ``kernel_calls.magnitudes`` does: sums of whole numbers, so no order of summation tells."""
    if not x.numel():
        return x.new_zeros((0, 0), dtype=torch.int64), x.new_zeros((0, 0)), x.new_zeros(0)
    peaks = (x.view(torch.int32) & 0x7FFFFFFF).amax((1, 2))  # magnitudes are ordered as their bits are
    refuse(peaks.amax() >= 0x7F800000, _not_finite)
    exponents = (peaks >> 23).clamp_min(27)  # what is below 2**-100 counts for nothing
    unit = scales.powers_of_two(127 + _PLACES - exponents)
    numbers = x.abs().mul_(unit[:, None, None]).to(torch.int32)
    return numbers.sum(2), numbers.sum(1), exponents


def _scales(by_row: Tensor, by_column: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales of rows and columns, bfloat16, rounded up."""
    total = by_row.sum(1, keepdim=True).clamp_min_(1).to(torch.float64)
    row = by_row.to(torch.float64) / max(1, by_column.shape[1])
    row *= scales.powers_of_two(exponents[:, None] - 127 - _PLACES)
    column = by_column.to(torch.float64) * by_column.shape[1] / total
    return _stored(row, _ROWS), _stored(column, _COLUMNS)


def _not_finite() -> InputError:
    return InputError("a NaN or infinite value cannot be quantised; look for the overflow that made it")


def _stored(scale: Tensor, bounds: tuple[float, float]) -> Tensor:
    return scales.store(scale.to(torch.float32).clamp_(*bounds), "bfloat16")


def _check(name: str, stored: Tensor, bounds: tuple[float, float]) -> None:
    if stored.numel():
        low, high = torch.aminmax(stored.to(torch.float32))
        refuse(~((low >= bounds[0]) & (high <= bounds[1])), lambda: _outside(name, bounds))  # nor a NaN


def _outside(name: str, bounds: tuple[float, float]) -> PayloadError:
    return PayloadError(f"a {name}'s scale lies outside {bounds[0]:g}..{bounds[1]:g}")


def _levelled(x: Tensor, row: Tensor, column: Tensor, edges: tuple[float, ...]) -> Tensor:
    half, size = len(edges) + 1, x.abs()
    level = torch.zeros_like(x, dtype=torch.uint8)
    for edge in edges:
        level += size >= row[:, :, None] * edge * column[:, None, :]
    return torch.where(x.view(torch.int32) >= 0, half + level, half - 1 - level)


def _scaled(codes: Tensor, row: Tensor, column: Tensor, levels: tuple[float, ...]) -> Tensor:
    signed = tuple(-level for level in reversed(levels)) + levels
    values = (
        rankone_calls.table(signed, codes.device)
        .index_select(0, codes.flatten().to(torch.int32))
        .view(codes.shape)
    )
    return values.mul_(row[:, :, None]).mul_(column[:, None, :])
