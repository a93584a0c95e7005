"""Entropy coding of what another codec wrote: range coding, and Zstandard where much repeats.

Each part becomes bytes of its own (see ``tagged``). Codes go into a frame in the aligned form (see ``bits``),
few of them one by one, and uncompressed in the dense form.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, TypeGuard

import torch
from torch import Tensor

from thinwire.codecs import tagged
from thinwire.codecs.codec import (
    Codec,
    decode_against,
    is_up_to_date,
    require_codec,
    roundtrip,
    roundtrip_against,
    tuned,
)
from thinwire.codecs.matrices.factors import Cut, placed
from thinwire.spec import Spec
from thinwire.types import InputError, Payload, PayloadError, TensorSpec, require

MAX_PARTS = 16  # as many as a packet may hold


class Quantiser(Protocol):
    """A codec that makes one small code a value, and scales; its codes are packed one symbol a byte here."""

    bits: int

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]: ...

    def dequantise(self, codes: Tensor, stored: Tensor, spec: TensorSpec) -> Tensor: ...

    def scale_layout(self, spec: TensorSpec) -> tuple[torch.dtype, int]: ...


@dataclass(frozen=True, repr=False)
class Entropy(Spec):
    """Compress the payload of ``inner`` losslessly, each part by itself, by the odds of its symbols.

    It comes within 2 % of the entropy of codes, also of less than a bit each, and knows no repetitions. Those
    Zstandard finds: it is tried for small parts and for those of which little is left, and with a ``level``
    from 2 on, which is Zstandard's, for all. Put it next to the quantiser (``Hadamard(Entropy(Uniform()))``):
    there it sees the codes, not packed bytes. Needs the extra ``entropy``; without it, use raises
    ``MissingExtra``.

    An inner codec with ``part_forms`` says of its first parts how many planes they are, and how many bits a
    symbol has (``DeadZone``).

    >>> from thinwire.codecs.uniform import Uniform
    >>> x = torch.linspace(-1, 1, 4096) ** 9
    >>> codec = Entropy(Uniform(bits=4))
    >>> codec.encode(x).nbytes < Uniform(bits=4).encode(x).nbytes
    True
    """

    inner: Codec
    level: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_codec("inner", self.inner)
        require(self.level in range(1, 20), InputError, f"level={self.level} is not in 1..19")

    def tuned(self, x: Tensor) -> Entropy:
        """Return the codec for residuals of ``x``."""
        return replace(self, inner=tuned(self.inner, x))

    def placed(self, cut: Cut) -> Entropy:
        """Return the codec for tensors whose matrices are those of ``cut``."""
        return replace(self, inner=placed(self.inner, cut))

    def encode(self, x: Tensor) -> Payload:
        inner = self.inner
        if is_quantiser(inner):
            return self._symbols(TensorSpec.of(x), inner.bits, *inner.quantise(x))
        return self._parts(inner.encode(x))

    def roundtrip(self, x: Tensor) -> tuple[Payload, Tensor]:
        inner = self.inner
        if is_quantiser(inner):
            spec, coded = TensorSpec.of(x), inner.quantise(x)
            return self._symbols(spec, inner.bits, *coded), inner.dequantise(*coded, spec)
        payload, x_hat = roundtrip(inner, x)
        return self._parts(payload), x_hat

    def _symbols(self, spec: TensorSpec, bits: int, codes: Tensor, stored: Tensor) -> Payload:
        parts = tagged.Symbols.of_codes(codes, bits), tagged.Symbols.of(stored)
        return Payload(spec, tagged.compressed(parts, self.level))

    def _parts(self, payload: Payload) -> Payload:
        n = len(payload.parts)
        require(n <= MAX_PARTS, InputError, f"{self} nests too deep: {n} parts")
        forms = *part_forms(self.inner), *((1, 8),) * n
        parts = [tagged.Symbols.of(p, *form) for p, form in zip(payload.parts, forms, strict=False)]
        return Payload(payload.spec, tagged.compressed(parts, self.level))

    def roundtrip_against(self, x: Tensor, reference: Tensor) -> tuple[Payload, Tensor] | None:
        if is_quantiser(self.inner):
            return None
        payload, restored = roundtrip_against(self.inner, x, reference)
        return self._parts(payload), restored

    def decode_against(self, payload: Payload, reference: Tensor) -> Tensor | None:
        if is_quantiser(self.inner):
            return None
        return decode_against(self.inner, self._expanded(payload), reference)

    def decode(self, payload: Payload) -> Tensor:
        spec, inner = payload.spec, self.inner
        if is_quantiser(inner):
            if len(payload.parts) != 2:
                raise PayloadError(f"an entropy-coded payload of {len(payload.parts)} parts, expected 2")
            coded, stored = tagged.arrived(payload.parts)
            codes = tagged.expand_codes(coded, inner.bits, spec.numel)
            return inner.dequantise(codes, _scales(stored, *inner.scale_layout(spec)), spec)
        return inner.decode(self._expanded(payload))

    def _expanded(self, payload: Payload) -> Payload:
        if len(payload.parts) > MAX_PARTS:
            raise PayloadError(f"an entropy-coded payload of {len(payload.parts)} parts, at most {MAX_PARTS}")
        bound = self.inner.nbytes(payload.spec)
        parts = tuple(tagged.expand(p, bound) for p in tagged.arrived(payload.parts))
        return Payload(payload.spec, parts)

    def nbytes(self, spec: TensorSpec) -> int:
        return self.inner.nbytes(spec) + (2 if is_quantiser(self.inner) else MAX_PARTS)


def is_quantiser(codec: object) -> TypeGuard[Quantiser]:
    """Return whether ``codec`` is a ``Quantiser``: asked for each packet, so by its names alone."""
    names = "dequantise", "scale_layout"
    return is_up_to_date(codec, "quantise") and all(is_up_to_date(codec, name) for name in names)


def part_forms(codec: object) -> tuple[tuple[int, int], ...]:
    """Return planes and bits a symbol of a codec's first parts, as far as it says them."""
    return codec.part_forms if is_up_to_date(codec, "part_forms") else ()  # type: ignore[attr-defined]


def _scales(part: tagged.Arrived, dtype: torch.dtype, n: int) -> Tensor:
    stored = tagged.expand(part, n * dtype.itemsize)
    if stored.dtype != dtype or stored.numel() != n:
        raise PayloadError(f"{stored.numel()} scales of {stored.dtype}, expected {n} of {dtype}")
    return stored
