"""Transforms: make a tensor easier to code, and undo it to the same bits on every device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs.codec import (
    Codec,
    Layout,
    check_layout,
    decode_as,
    fixed_layout,
    head,
    layout_nbytes,
    require_codec,
    roundtrip,
    saturated,
    tuned,
    writable,
)
from thinwire.codecs.kernels import uniform_calls
from thinwire.codecs.kernels.scales import block_rows, scratch
from thinwire.codecs.uniform import Uniform
from thinwire.spec import Spec
from thinwire.types import InputError, Payload, TensorSpec, require


@dataclass(frozen=True, repr=False)
class Hadamard(Spec):
    """Mix each ``block`` consecutive values of a row by a Hadamard matrix, then code them by ``inner``.

    An outlier is spread over its block, which suits a coarse quantiser. ``block`` is a power of two; what is
    left of a row after whole blocks stays as it is. The factor 1/block is on the encoder's side, so decoding
    is additions and subtractions in a fixed order: the same bits everywhere. Ashkboos et al. 2024, "QuaRot".

    >>> import torch
    >>> codec = Hadamard(Uniform(bits=2), block=4)
    >>> codec.encode(torch.tensor([0.0, 0.0, 8.0, 0.0])).parts[1]
    tensor([2.], dtype=torch.bfloat16)
    >>> codec.decode(codec.encode(torch.tensor([0.0, 0.0, 8.0, 0.0])))
    tensor([0., 0., 8., 0.])
    """

    inner: Codec
    block: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        require_codec("inner", self.inner)
        power = self.block >= 2 and not self.block & (self.block - 1)
        require(power and self.block <= 4096, InputError, f"block={self.block} is no power of two in 2..4096")

    def tuned(self, x: Tensor) -> Hadamard:
        """Return the codec for residuals of ``x``."""
        return replace(self, inner=tuned(self.inner, self._mixed(x)))

    def encode(self, x: Tensor) -> Payload:
        if fused := self._fused(x, None, False):
            return fused[0]
        return Payload(TensorSpec.of(x), self.inner.encode(self._mixed(x)).parts)

    def roundtrip(self, x: Tensor) -> tuple[Payload, Tensor]:
        if fused := self._fused(x, None, True):
            return fused
        payload = self.encode(x)
        return payload, self.decode(payload)

    def roundtrip_against(self, x: Tensor, reference: Tensor) -> tuple[Payload, Tensor] | None:
        return self._fused(x, reference, True)

    def decode(self, payload: Payload) -> Tensor:
        x = self.decode_against(payload, None)
        if x is not None:
            return x
        mixed = decode_as(self.inner, _single(payload.spec), payload.parts)
        return saturated(self._mix(mixed, 1.0), payload.spec.dtype)

    def decode_against(self, payload: Payload, reference: Tensor | None) -> Tensor | None:
        if self._form is None:
            return None
        check_layout(payload, self.layout(payload.spec))
        return uniform_calls.decode(self._form, payload, reference)

    @cached_property
    def _form(self) -> uniform_calls.Form | None:
        """What kernels are told, which do the transform and ``Uniform``; they know no other."""
        inner = self.inner
        if type(inner) is not Uniform or inner.rounding != "nearest":
            return None
        return inner.form._replace(block=self.block)

    def _fused(self, x: Tensor, reference: Tensor | None, back: bool) -> Any:
        return self._form and uniform_calls.roundtrip(self._form, x, reference, back)

    def layout(self, spec: TensorSpec) -> Layout:
        return fixed_layout(self.inner, _single(spec))

    def nbytes(self, spec: TensorSpec) -> int:
        return self.inner.nbytes(_single(spec))

    def _mixed(self, x: Tensor) -> Tensor:
        return self._mix(x.detach().to(torch.float32), 1 / self.block)

    def _mix(self, x: Tensor, factor: float) -> Tensor:
        last = x.shape[-1] if x.dim() else 0
        whole = last // self.block * self.block
        if not whole or not x.numel():
            return x
        y = _butterflies(x[..., :whole].reshape(-1, self.block), factor).reshape(*x.shape[:-1], whole)
        return y if whole == last else torch.cat([y, x[..., whole:]], -1)


@dataclass(frozen=True, repr=False)
class ChannelMean(Spec):
    """Send each channel's mean (over all but the last dimension) as float16, and the rest by ``inner``.

    A few constant outlier channels carry most of the energy of a language model's hidden state.

    >>> import torch
    >>> codec = ChannelMean(Uniform(bits=2))
    >>> codec.decode(codec.encode(torch.tensor([[100.0, 1.0], [100.0, 3.0]])))
    tensor([[100.,   1.],
            [100.,   3.]])
    """

    inner: Codec

    def __post_init__(self) -> None:
        super().__post_init__()
        require_codec("inner", self.inner)

    def tuned(self, x: Tensor) -> ChannelMean:
        """Return the codec for residuals of ``x``."""
        return replace(self, inner=tuned(self.inner, self._split(x)[1]))

    def encode(self, x: Tensor) -> Payload:
        mean, rest = self._split(x)
        return Payload(TensorSpec.of(x), (mean, *self.inner.encode(rest).parts))

    def roundtrip(self, x: Tensor) -> tuple[Payload, Tensor]:
        mean, rest = self._split(x)
        payload, rest_hat = roundtrip(self.inner, rest)
        payload = Payload(TensorSpec.of(x), (mean, *payload.parts))
        return payload, self._join(payload, rest_hat)

    def decode(self, payload: Payload) -> Tensor:
        head(payload, torch.float16, _channels(payload.spec.shape))
        return self._join(payload, decode_as(self.inner, _single(payload.spec), payload.parts[1:]))

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.detach().to(torch.float32)
        rows = y.reshape(-1, _channels(x.shape)) if y.numel() else y.new_zeros((1, _channels(x.shape)))
        mean = rows.mean(0).clamp_(-65504.0, 65504.0).to(torch.float16)
        return mean, (y - mean).reshape(x.shape)

    def _join(self, payload: Payload, rest: Tensor) -> Tensor:
        mean, rest = payload.parts[0], writable(rest, payload.parts)
        return saturated(rest.add_(mean) if rest.dim() else rest.add_(mean[0]), payload.spec.dtype)

    def layout(self, spec: TensorSpec) -> Layout:
        return (torch.float16, _channels(spec.shape)), *fixed_layout(self.inner, _single(spec))

    def nbytes(self, spec: TensorSpec) -> int:
        return 2 * _channels(spec.shape) + self.inner.nbytes(_single(spec))


@dataclass(frozen=True, repr=False)
class Sink(Spec):
    """Code the first ``positions`` of each sequence by ``first``, the others by ``inner``.

    ``x`` is [batch, sequence, ..., channels]; a tensor of fewer than three dimensions has no sequence and
    goes to ``inner`` whole. The first token of a sequence draws the attention nothing else wants, and
    carries nearly all of the hidden state's energy (Xiao et al. 2023, "Efficient streaming language models
    with attention sinks"). ``first`` must have a fixed rate, so the receiver knows which parts are its own.

    >>> import torch
    >>> x = torch.ones(2, 5, 4)
    >>> x[:, 0] *= 1000
    >>> codec = Sink(Uniform(bits=3))
    >>> bool((codec.decode(codec.encode(x)) - x).abs().max() < 4)
    True
    """

    inner: Codec
    first: Codec = Uniform(bits=8)  # noqa: RUF009 -- frozen
    positions: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_codec("inner", self.inner)
        require_codec("first", self.first)
        require(self.positions >= 1, InputError, f"positions={self.positions} is not 1 or more")
        fixed_layout(self.first, TensorSpec((1, 1, 1)))

    def tuned(self, x: Tensor) -> Sink:
        """Return the codec for residuals of ``x``."""
        rest = x if x.dim() < 3 else x[:, self.positions :]
        return replace(self, inner=tuned(self.inner, rest))

    def encode(self, x: Tensor) -> Payload:
        spec = TensorSpec.of(x)
        if x.dim() < 3:
            return Payload(spec, self.inner.encode(x).parts)
        lead, rest = x.detach()[:, : self.positions], x.detach()[:, self.positions :]
        return Payload(spec, self.first.encode(lead).parts + self.inner.encode(rest).parts)

    def roundtrip(self, x: Tensor) -> tuple[Payload, Tensor]:
        spec = TensorSpec.of(x)
        if x.dim() < 3:
            payload, x_hat = roundtrip(self.inner, x)
            return Payload(spec, payload.parts), x_hat
        lead, lead_hat = roundtrip(self.first, x.detach()[:, : self.positions])
        rest, rest_hat = roundtrip(self.inner, x.detach()[:, self.positions :])
        return Payload(spec, lead.parts + rest.parts), torch.cat([lead_hat, rest_hat], 1)

    def decode(self, payload: Payload) -> Tensor:
        spec = payload.spec
        if len(spec.shape) < 3:
            return decode_as(self.inner, spec, payload.parts)
        lead, rest = self._split(spec)
        n = len(fixed_layout(self.first, lead))
        first = decode_as(self.first, lead, payload.parts[:n])
        return torch.cat([first, decode_as(self.inner, rest, payload.parts[n:])], 1)

    def layout(self, spec: TensorSpec) -> Layout:
        if len(spec.shape) < 3:
            return fixed_layout(self.inner, spec)
        lead, rest = self._split(spec)
        return fixed_layout(self.first, lead) + fixed_layout(self.inner, rest)

    def nbytes(self, spec: TensorSpec) -> int:
        if len(spec.shape) < 3:
            return self.inner.nbytes(spec)
        lead, rest = self._split(spec)
        return layout_nbytes(fixed_layout(self.first, lead)) + self.inner.nbytes(rest)

    def _split(self, spec: TensorSpec) -> tuple[TensorSpec, TensorSpec]:
        batch, length, *others = spec.shape
        lead = min(self.positions, length)
        return (
            TensorSpec((batch, lead, *others), spec.dtype),
            TensorSpec((batch, length - lead, *others), spec.dtype),
        )


def _single(spec: TensorSpec) -> TensorSpec:
    return TensorSpec(spec.shape, torch.float32)


def _channels(shape: tuple[int, ...]) -> int:
    return shape[-1] if shape else 1


def _butterflies(rows: Tensor, factor: float) -> Tensor:
    """Return ``factor`` times the Hadamard transform of each row of [n, power of two]."""
    out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    step = block_rows(len(rows), rows.shape[1], rows.device)
    for at in range(0, len(rows), step):
        some = rows[at : at + step]
        # Blocks along the columns: every butterfly then adds whole contiguous rows.
        y = scratch((rows.shape[1], len(some)), rows.dtype, rows.device).copy_(some.t())
        out[at : at + step].copy_(_stages(y.mul_(factor) if factor != 1.0 else y).t())
    return out


def _stages(y: Tensor) -> Tensor:
    """Return the Hadamard transform of each column; overwrites ``y``."""
    z = scratch(tuple(y.shape), y.dtype, y.device, slot=1)
    half = len(y) // 2
    while half:
        pairs, out = y.view(-1, 2, half, y.shape[1]), z.view(-1, 2, half, y.shape[1])
        torch.add(pairs[:, 0], pairs[:, 1], out=out[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=out[:, 1])
        y, z, half = z, y, half // 2
    return y
