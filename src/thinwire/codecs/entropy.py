"""Entropy coding of what another codec wrote, by Zstandard (RFC 8878): its Huffman stage on the codes.

Each part becomes bytes of its own: one tag byte (bit 7: compressed; the rest: the part's dtype), then a
frame, or the part as it was where that is not larger. Codes go into a frame in the aligned form (see
``bits``), and uncompressed in the dense one. A frame states its size, which is checked before anything is
allocated: against what the inner codec could have written for the spec, and against
``FREE + RATIO * length``, beyond which the encoder does not compress either.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, TypeGuard

import torch
from torch import Tensor

from thinwire.codecs import zstd
from thinwire.codecs.codec import Codec, is_up_to_date, require_codec, roundtrip, tuned
from thinwire.codecs.kernels.bits import (
    aligned_nbytes,
    pack,
    pack_aligned,
    packed_nbytes,
    unpack,
    unpack_aligned,
)
from thinwire.spec import Spec
from thinwire.types import InputError, Payload, PayloadError, TensorSpec, require

FREE = 1 << 24  # bytes a frame of any length may grow to
RATIO = 256
SMALLEST = 11  # bytes that a frame can make fewer: it takes 10 itself
MAX_PARTS = 16  # as many as a packet may hold
_COMPRESSED = 0x80
_DTYPES = (
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.int16,
)


class Quantiser(Protocol):
    """A codec that makes one small code a value, and scales; its codes are packed one symbol a byte here."""

    bits: int

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]: ...

    def dequantise(self, codes: Tensor, stored: Tensor, spec: TensorSpec) -> Tensor: ...

    def scale_layout(self, spec: TensorSpec) -> tuple[torch.dtype, int]: ...


@dataclass(frozen=True, repr=False)
class Entropy(Spec):
    """Compress the payload of ``inner`` losslessly, each part by itself, with Zstandard at ``level``.

    Level 1 comes within 3 % of the entropy of codes of a bit a byte or more (see ``codecs.zstd``); higher
    ones cost time and gain nothing on noise. Put it next to the quantiser (``Hadamard(Entropy(Uniform()))``):
    there it sees the codes, not packed bytes. Needs the extra ``entropy``; without it, use raises
    ``MissingExtra``.

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
        symbols = _compress(pack_aligned(codes, bits), self.level, packed_nbytes(codes.numel(), bits))
        part = _store(pack(codes, bits)) if symbols is None else symbols
        return Payload(spec, (part, _shrink(stored, self.level)))

    def _parts(self, payload: Payload) -> Payload:
        n = len(payload.parts)
        require(n <= MAX_PARTS, InputError, f"{self} nests too deep: {n} parts")
        return Payload(payload.spec, tuple(_shrink(p, self.level) for p in payload.parts))

    def decode(self, payload: Payload) -> Tensor:
        spec, inner = payload.spec, self.inner
        if is_quantiser(inner):
            if len(payload.parts) != 2:
                raise PayloadError(f"an entropy-coded payload of {len(payload.parts)} parts, expected 2")
            codes = _codes(payload.parts[0], inner.bits, spec.numel)
            return inner.dequantise(codes, _scales(payload.parts[1], *inner.scale_layout(spec)), spec)
        if len(payload.parts) > MAX_PARTS:
            raise PayloadError(f"an entropy-coded payload of {len(payload.parts)} parts, at most {MAX_PARTS}")
        bound = inner.nbytes(spec)
        return inner.decode(Payload(spec, tuple(_expand(p, bound) for p in payload.parts)))

    def nbytes(self, spec: TensorSpec) -> int:
        return self.inner.nbytes(spec) + (2 if is_quantiser(self.inner) else MAX_PARTS)


def is_quantiser(codec: object) -> TypeGuard[Quantiser]:
    """Return whether ``codec`` is a ``Quantiser``: asked for each packet, so by its names alone."""
    return all(is_up_to_date(codec, name) for name in ("quantise", "dequantise", "scale_layout"))


def _codes(part: Tensor, bits: int, n: int) -> Tensor:
    aligned = part.numel() > 0 and bool(int(part[0]) & _COMPRESSED)
    raw = _expand(part, aligned_nbytes(n, bits) if aligned else packed_nbytes(n, bits))
    return (unpack_aligned if aligned else unpack)(raw, bits, n)


def _scales(part: Tensor, dtype: torch.dtype, n: int) -> Tensor:
    stored = _expand(part, n * dtype.itemsize)
    if stored.dtype != dtype or stored.numel() != n:
        raise PayloadError(f"{stored.numel()} scales of {stored.dtype}, expected {n} of {dtype}")
    return stored


def _shrink(part: Tensor, level: int) -> Tensor:
    coded = _compress(part, level, part.numel() * part.element_size())
    return _store(part) if coded is None else coded


def _compress(part: Tensor, level: int, room: int) -> Tensor | None:
    """Return the tagged frame of ``part``, or None where it does not fit in less than ``room`` bytes."""
    zstd.package()  # missing, it is missed at the first message, however short
    nbytes = part.numel() * part.element_size()
    if nbytes < SMALLEST:
        return None
    frame = zstd.smallest(_bytes(part).cpu().numpy(), level)
    if len(frame) >= room or nbytes > FREE + RATIO * len(frame):
        return None
    coded = torch.frombuffer(bytearray((_COMPRESSED | _tag(part),)) + frame, dtype=torch.uint8)
    return coded.to(part.device)


def _store(part: Tensor) -> Tensor:
    tag = torch.full((1,), _tag(part), dtype=torch.uint8, device=part.device)
    return torch.cat([tag, _bytes(part)])


def _expand(part: Tensor, bound: int) -> Tensor:
    """Return the part that was coded, of at most ``bound`` bytes; ``PayloadError`` for anything else."""
    if part.dtype != torch.uint8 or part.dim() != 1 or not part.numel():
        raise PayloadError(f"an entropy-coded part of {part.dtype} and shape {tuple(part.shape)}")
    tag = int(part[0])
    kind = tag & ~_COMPRESSED
    if kind >= len(_DTYPES):
        raise PayloadError(f"unknown tag {tag} of an entropy-coded part")
    raw = _decompress(part[1:], bound) if tag & _COMPRESSED else part[1:]
    dtype = _DTYPES[kind]
    if raw.numel() > bound or raw.numel() % dtype.itemsize:
        raise PayloadError(
            f"an entropy-coded part of {raw.numel()} bytes of {dtype}, expected at most {bound}"
        )
    return raw if dtype == torch.uint8 else raw.clone().view(dtype)  # a clone begins at an aligned address


def _decompress(frame: Tensor, bound: int) -> Tensor:
    data = frame.contiguous().cpu().numpy()
    size = zstd.content_size(data)
    if not 0 <= size <= min(bound, FREE + RATIO * len(data)):
        raise PayloadError(f"a frame of {len(data)} bytes claims {size}, expected at most {bound}")
    raw = zstd.decompress(data)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(frame.device) if raw else frame[:0]


def _bytes(part: Tensor) -> Tensor:
    return part.contiguous().view(torch.uint8)


def _tag(part: Tensor) -> int:
    require(part.dtype in _DTYPES, InputError, f"values of {part.dtype} cannot be entropy-coded; cast them")
    return _DTYPES.index(part.dtype)
