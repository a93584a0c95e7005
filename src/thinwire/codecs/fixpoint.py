"""The fixed-point quantiser of AQ-SGD's released code: one level more below zero than above."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.codec import Layout, check_layout, layout_nbytes, saturated
from thinwire.codecs.kernels import scales
from thinwire.codecs.kernels.bits import pack, packed_nbytes, unpack
from thinwire.codecs.kernels.scales import Grid
from thinwire.spec import Spec
from thinwire.types import InputError, Payload, TensorSpec, require

_ROUNDER = 1.5 * 2**23  # adding it rounds to an integer, and leaves that in the low byte
_SCALES = ("float16", "bfloat16")


@dataclass(frozen=True, repr=False)
class FixedPoint(Spec):
    """Round to ``bits`` bits in two's complement, relative to the largest magnitude of each channel.

    With f = bits - 1 the levels are -2**f .. 2**f - 1 in units of scale / 2**f, so a channel's maximum always
    saturates where it is positive: at 2 bits everything above 3/4 of it is wrong by up to a half. Kept so for
    comparison; ``Uniform`` is the better codec. Rounding is to nearest.

    Source: AQ-SGD's released code (DS3Lab/AC-SGD at 95a0f2e, compress/fixpoint.py). It adds 1e-6 to the scale
    against a division by zero; here the smallest scale does that, since without the loss scaling of training
    in float16, 1e-6 may be as large as a gradient. Errors: ``InputError`` for a NaN or an infinity.

    >>> x = torch.tensor([[4.0, -4.0], [1.0, 1.2]])
    >>> codec = FixedPoint(bits=3)
    >>> codec.decode(codec.encode(x))
    tensor([[ 3., -4.],
            [ 1.,  1.]])
    """

    bits: int = 4
    scale_dtype: str = "float16"
    finite = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.bits in range(1, 9), InputError, f"bits={self.bits} is not in 1..8")
        require(
            self.scale_dtype in _SCALES,
            InputError,
            f"scale_dtype={self.scale_dtype!r} is not one of {', '.join(_SCALES)}",
        )

    @property
    def half(self) -> int:
        """The number of levels below zero."""
        return 1 << (self.bits - 1)

    def encode(self, x: Tensor) -> Payload:
        spec = TensorSpec.of(x)
        grid = Grid.of(spec, "channel", 1)
        values = grid.spread(x.detach().to(torch.float32).contiguous())
        peaks = grid.peaks(values) if values.numel() else values.new_zeros(grid.scales)
        if peaks.numel() and not bool(peaks.amax().isfinite()):
            raise InputError(
                "a NaN or infinite value cannot be quantised; look for the overflow that made it"
            )
        stored = scales.store(peaks, self.scale_dtype)
        inverse = scales.load(stored, self.scale_dtype).reciprocal().mul_(self.half)
        codes = torch.empty(values.shape, dtype=torch.uint8, device=x.device)
        for at, block, factor in grid.blocks(values, inverse):
            y = (block * factor).clamp_(-self.half, self.half - 1).add_(_ROUNDER + self.half)
            codes[at : at + len(block)].copy_(y.view(torch.int32))  # keeps the low byte
        return Payload(spec, (pack(grid.gather(codes), self.bits), stored))

    def decode(self, payload: Payload) -> Tensor:
        spec = payload.spec
        check_layout(payload, self.layout(spec))
        packed, stored = payload.parts
        grid = Grid.of(spec, "channel", 1)
        step = scales.load(stored, self.scale_dtype).mul_(1 / self.half)  # by a power of two: exact
        codes = grid.spread(unpack(packed, self.bits, spec.numel).reshape(spec.shape))
        x = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
        for at, block, unit in grid.blocks(codes, step):
            torch.mul((block - self.half).view(torch.int8), unit, out=x[at : at + len(block)])
        return saturated(grid.gather(x), spec.dtype).reshape(spec.shape)

    def layout(self, spec: TensorSpec) -> Layout:
        grid = Grid.of(spec, "channel", 1)
        return (
            (torch.uint8, packed_nbytes(spec.numel, self.bits)),
            (scales.FORMATS[self.scale_dtype].dtype, grid.scales),
        )

    def nbytes(self, spec: TensorSpec) -> int:
        return layout_nbytes(self.layout(spec))
