"""Codecs that keep every value: the bytes as they are, or cast to a narrower float."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.codec import Layout, check_layout, in_a_row, layout_nbytes
from thinwire.codecs.kernels.bits import pack, packed_nbytes, unpack
from thinwire.spec import Spec
from thinwire.types import InputError, Payload, TensorSpec, require

CASTS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, repr=False)
class Raw(Spec):
    """Send the tensor's own bytes, and a truth value as one bit: lossless for every dtype.

    >>> import torch
    >>> Raw().decode(Raw().encode(torch.tensor([1.0, 2.0])))
    tensor([1., 2.])
    """

    def encode(self, x: Tensor) -> Payload:
        row = in_a_row(x)
        return Payload(TensorSpec.of(x), (pack(row.to(torch.uint8), 1) if row.dtype == torch.bool else row,))

    def decode(self, payload: Payload) -> Tensor:
        spec = payload.spec
        check_layout(payload, self.layout(spec))
        part = payload.parts[0]
        flat = unpack(part, 1, spec.numel).to(torch.bool) if spec.dtype == torch.bool else part
        return flat.reshape(spec.shape)

    def layout(self, spec: TensorSpec) -> Layout:
        if spec.dtype == torch.bool:
            return ((torch.uint8, packed_nbytes(spec.numel, 1)),)
        return ((spec.dtype, spec.numel),)

    def nbytes(self, spec: TensorSpec) -> int:
        return layout_nbytes(self.layout(spec))


@dataclass(frozen=True, repr=False)
class Cast(Spec):
    """Send the values as ``dtype``: float32, float16 (which saturates at its largest value) or bfloat16.

    >>> import torch
    >>> Cast("bfloat16").nbytes(TensorSpec((4, 8)))
    64
    """

    dtype: str = "float16"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.dtype in CASTS, InputError, f"dtype {self.dtype!r} is not one of {', '.join(CASTS)}")

    def encode(self, x: Tensor) -> Payload:
        y = in_a_row(x)
        target = CASTS[self.dtype]
        if target is torch.float16 and y.dtype != target:
            top = torch.finfo(target).max
            # In bfloat16 the bound itself would be rounded up, beyond it.
            y = y.to(torch.promote_types(y.dtype, torch.float32)).clamp(-top, top)
        return Payload(TensorSpec.of(x), (y.to(target),))

    def decode(self, payload: Payload) -> Tensor:
        check_layout(payload, self.layout(payload.spec))
        return payload.parts[0].to(payload.spec.dtype).reshape(payload.spec.shape)

    def layout(self, spec: TensorSpec) -> Layout:
        return ((CASTS[self.dtype], spec.numel),)

    def nbytes(self, spec: TensorSpec) -> int:
        return layout_nbytes(self.layout(spec))
