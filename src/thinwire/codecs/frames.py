"""Frames that are alike: each is coded as what it has other than the one before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.codecs.codec import (
    Codec,
    Layout,
    check_layout,
    decode_as,
    fixed_layout,
    layout_nbytes,
    require_codec,
    roundtrip,
    saturated,
    tuned,
)
from thinwire.spec import Spec
from thinwire.types import InputError, Payload, TensorSpec, require


@dataclass(frozen=True, repr=False)
class FrameChain(Spec):
    """Code the second dimension in ``frames`` parts, each against what the part before it decodes to.

    ``x`` is [batch, frames * tokens, ..., channels]; a tensor of another form goes to ``inner`` whole. Frames
    of a video move little from one to the next, and so do their residuals. ``inner`` must have a fixed rate.
    Parts are decoded one after the other, by one addition each: the same bits everywhere.

    >>> import torch
    >>> from thinwire.codecs import Uniform
    >>> x = torch.tensor([[[8.0], [9.0], [8.5], [9.5]]])
    >>> codec = FrameChain(Uniform(bits=4, scale="tensor"), frames=2)
    >>> codec.decode(codec.encode(x)).flatten().tolist()
    [7.734375, 9.0234375, 8.50341796875, 9.462890625]
    """

    inner: Codec
    frames: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        require_codec("inner", self.inner)
        require(self.frames >= 1, InputError, f"frames={self.frames} is not 1 or more")
        fixed_layout(self.inner, TensorSpec((1, 1, 1)))

    def tuned(self, x: Tensor) -> FrameChain:
        """Return the codec for residuals of ``x``."""
        return replace(self, inner=tuned(self.inner, x))

    def encode(self, x: Tensor) -> Payload:
        return self.roundtrip(x)[0]

    def roundtrip(self, x: Tensor) -> tuple[Payload, Tensor]:
        spec = TensorSpec.of(x)
        if not self._divides(spec):
            payload, x_hat = roundtrip(self.inner, x)
            return Payload(spec, payload.parts), x_hat
        coded, found, last = list[Payload](), list[Tensor](), torch.zeros((), device=x.device)
        for frame in x.detach().to(torch.float32).chunk(self.frames, 1):
            payload, change = roundtrip(self.inner, frame - last)
            last = last + change
            coded.append(payload)
            found.append(last)
        parts = zip(*(payload.parts for payload in coded), strict=True)
        joined = tuple(torch.cat(same) for same in parts)
        return Payload(spec, joined), saturated(torch.cat(found, 1), spec.dtype)

    def decode(self, payload: Payload) -> Tensor:
        spec = payload.spec
        if not self._divides(spec):
            return decode_as(self.inner, spec, payload.parts)
        check_layout(payload, self.layout(spec))
        found = list[Tensor]()
        for parts in self._split(payload):
            change = decode_as(self.inner, self._frame(spec), parts)
            found.append(found[-1] + change if found else change)
        return saturated(torch.cat(found, 1), spec.dtype)

    def layout(self, spec: TensorSpec) -> Layout:
        if not self._divides(spec):
            return fixed_layout(self.inner, spec)
        each = fixed_layout(self.inner, self._frame(spec))
        return tuple((dtype, n * self.frames) for dtype, n in each)

    def nbytes(self, spec: TensorSpec) -> int:
        return layout_nbytes(self.layout(spec))

    def _divides(self, spec: TensorSpec) -> bool:
        shape = spec.shape
        return len(shape) >= 3 and shape[1] > 0 and shape[1] % self.frames == 0

    def _frame(self, spec: TensorSpec) -> TensorSpec:
        batch, tokens, *others = spec.shape
        return TensorSpec((batch, tokens // self.frames, *others), torch.float32)

    def _split(self, payload: Payload) -> Iterator[tuple[Tensor, ...]]:
        """Yield the parts of each frame."""
        yield from zip(*(part.chunk(self.frames) for part in payload.parts), strict=True)
