"""The codec contract: a frozen, stateless map tensor -> payload -> tensor; and what codecs are asked."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from thinwire.types import InputError, Payload, PayloadError, TensorSpec

BOTH_WAYS = ("encode", "decode")
Layout = tuple[tuple[torch.dtype, int], ...]


@runtime_checkable
class Codec(Protocol):
    """Turn a tensor into fewer bytes and back. Frozen, stateless, seeded if random.

    ``decode(encode(x))`` has the shape, dtype and device of ``x`` and is the same bits on every device,
    because both ends of a channel build their references on it. A codec's first dimension is the batch of
    samples, its last one the channels; fields are its configuration, its repr and its equality.
    """

    def encode(self, x: Tensor) -> Payload:
        """Encode ``x`` (any shape, floating point). Never writes to ``x``."""
        ...

    def decode(self, payload: Payload) -> Tensor:
        """Decode a payload; ``PayloadError`` where its parts do not fit its spec."""
        ...

    def nbytes(self, spec: TensorSpec) -> int:
        """Return the largest payload in bytes for such a tensor; exact for fixed-rate codecs."""
        ...


@runtime_checkable
class FixedRate(Codec, Protocol):
    """A codec whose payload sizes follow from the tensor's spec alone."""

    def layout(self, spec: TensorSpec) -> Layout:
        """Return dtype and length of each part."""
        ...


def roundtrip(codec: Codec, x: Tensor) -> tuple[Payload, Tensor]:
    """Return the payload of ``x`` and the tensor it decodes to, to the last bit.

    By the codec's short cut, a ``roundtrip(x)`` of its own, if it has one.
    """
    if is_up_to_date(codec, "roundtrip"):
        found: tuple[Payload, Tensor] = codec.roundtrip(x)  # type: ignore[attr-defined]
        return found
    payload = codec.encode(x)
    return payload, codec.decode(payload)


def roundtrip_against(codec: Codec, x: Tensor, reference: Tensor) -> tuple[Payload, Tensor]:
    """Return the payload of ``x - reference``, and ``reference`` plus what it decodes to, to the last bit.

    ``reference`` is float32, and so is the difference; ``x`` may be narrower. The codec is as ``tuned(x)``
    makes it. By its short cut, a ``roundtrip_against(x, reference)`` of its own, if it has one.
    """
    if is_up_to_date(codec, "roundtrip_against"):
        found: tuple[Payload, Tensor] | None = codec.roundtrip_against(x, reference)  # type: ignore[attr-defined]
        if found is not None:  # else it has none for such a tensor
            return found
    values = x.detach().to(torch.float32)
    payload, restored = roundtrip(tuned(codec, values), values - reference)
    return payload, reference + restored


def decode_against(codec: Codec, payload: Payload, reference: Tensor) -> Tensor:
    """Return ``reference``, float32, plus what ``payload`` decodes to, by a short cut or without."""
    if is_up_to_date(codec, "decode_against"):
        found: Tensor | None = codec.decode_against(payload, reference)  # type: ignore[attr-defined]
        if found is not None:
            return found
    return reference + decoded(codec, payload)


def decoded(codec: Codec, payload: Payload) -> Tensor:
    """Return what ``payload`` decodes to; ``PayloadError`` for another shape than it says."""
    x = codec.decode(payload)
    if tuple(x.shape) != payload.spec.shape:
        raise PayloadError(f"a payload decodes to {tuple(x.shape)}, not {payload.spec.shape}")
    return x


def is_up_to_date(codec: object, name: str) -> bool:
    """Return whether what a codec has as ``name`` is about its ``encode`` and ``decode``.

    It is not where its class has others of its own, and inherits ``name`` from one that does not know them.
    """
    return _is_up_to_date(type(codec), name)  # type: ignore[arg-type]  # classes hash


@lru_cache(maxsize=1024)  # asked for each packet
def _is_up_to_date(kind: type, name: str) -> bool:
    classes = [base.__dict__ for base in kind.__mro__]
    places = [next((k for k, own in enumerate(classes) if n in own), None) for n in (name, *BOTH_WAYS)]
    return places[0] is not None and all(k is None or places[0] <= k for k in places)


def in_a_row(x: Tensor) -> Tensor:
    """Return the values of ``x`` in a row of stride 1, which alone can be seen as bytes.

    A single value may have another, and torch still calls it contiguous.
    """
    flat = x.detach().contiguous().flatten()
    return flat.as_strided(flat.shape, (1,))


def layout_nbytes(layout: Layout) -> int:
    """Return the bytes of parts laid out so."""
    return sum(dtype.itemsize * n for dtype, n in layout)


def check_layout(payload: Payload, layout: Layout) -> None:
    """Raise ``PayloadError`` unless the parts of ``payload`` have exactly this layout."""
    found = tuple((p.dtype, p.numel()) for p in payload.parts)
    if found != layout:
        raise PayloadError(f"payload for {payload.spec.shape} has parts {found}, expected {layout}")


def is_fixed_rate(codec: Codec) -> TypeGuard[FixedRate]:
    """Return whether the payload sizes of ``codec`` and all codecs inside it follow from the spec alone."""
    return _is_fixed_rate(codec)  # type: ignore[arg-type]  # every codec is frozen, so it hashes


@lru_cache(maxsize=256)  # asked for each packet, and a check against a protocol costs as much as a pass
def _is_fixed_rate(codec: Codec) -> bool:
    fixed = isinstance(codec, FixedRate) and is_up_to_date(codec, "layout")
    return fixed and all(is_fixed_rate(c) for c in _members(codec))


def tuned(codec: Codec, x: Tensor) -> Codec:
    """Return ``codec`` as it encodes residuals of ``x``: itself, but for one that looks at more than those.

    Such a codec says so by ``by_tensor``; it and those around it, each of which passes on what it makes of
    ``x``, have a ``tuned(x)`` of their own. Whatever a tuned codec encodes, the untuned one decodes.
    """
    if not _looks_at_the_tensor(codec):  # type: ignore[arg-type]  # every codec is frozen, so it hashes
        return codec
    found: Codec = codec.tuned(x)  # type: ignore[attr-defined]
    return found


@lru_cache(maxsize=256)  # asked for each packet
def _looks_at_the_tensor(codec: Any) -> bool:
    inside: list[Any] = _members(codec)
    return bool(getattr(codec, "by_tensor", False)) or any(_looks_at_the_tensor(c) for c in inside)


def coded_apart(codec: Codec, n: int) -> bool:
    """Return whether ``codec`` makes of each ``n`` values in a row the same as of these alone.

    A codec whose ``decode`` then gives the same bits says so by a ``coded_apart(n)`` of its own.
    """
    return is_up_to_date(codec, "coded_apart") and bool(codec.coded_apart(n))  # type: ignore[attr-defined]


@lru_cache(maxsize=256)  # asked for each packet
def is_finite(codec: Any) -> bool:
    """Return whether ``codec`` and all inside it refuse a NaN or an infinity, and so decode to none.

    A codec says so by ``finite``; one that does not is as those inside it.
    """
    if is_up_to_date(codec, "finite"):
        return bool(codec.finite)
    inside: list[Any] = _members(codec)
    return bool(inside) and all(is_finite(c) for c in inside)


def fixed_layout(codec: Codec, spec: TensorSpec) -> Layout:
    """Return the layout of a fixed-rate codec; ``InputError`` for any other."""
    if not is_fixed_rate(codec):
        raise InputError(f"{codec} has no fixed payload size; use one that has, such as Uniform(bits=4)")
    return codec.layout(spec)


def decode_as(codec: Codec, spec: TensorSpec, parts: tuple[Tensor, ...]) -> Tensor:
    """Decode ``parts`` that ``codec`` made of a tensor of ``spec``."""
    return codec.decode(Payload(spec, parts))


def saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 values in a dtype; float16 ends at the largest that it has, as then ``x`` does too."""
    return (x.clamp_(-65504.0, 65504.0) if dtype == torch.float16 else x).to(dtype)


def head(payload: Payload, dtype: torch.dtype, n: int) -> Tensor:
    """Return the first part of a payload; ``PayloadError`` unless it is ``n`` values of ``dtype``."""
    part = payload.parts[0] if payload.parts else None
    if part is None or part.dtype != dtype or part.shape != (n,):
        found = "nothing" if part is None else f"{part.numel()} values of {part.dtype}"
        raise PayloadError(f"payload for {payload.spec.shape} begins with {found}, expected {n} of {dtype}")
    return part


def writable(x: Tensor, parts: tuple[Tensor, ...]) -> Tensor:
    """Return ``x``, or a copy where it shares memory with one of ``parts``: a payload is never written to."""
    own = x.untyped_storage().data_ptr()
    return x.clone() if any(p.untyped_storage().data_ptr() == own for p in parts) else x


def require_codec(name: str, value: Any) -> None:
    """Raise ``InputError`` unless ``value`` is a codec."""
    if not issubclass(type(value), Codec):  # which Python remembers, as it does not of an instance
        raise InputError(f"{name}={value!r} is not a codec; give one such as Uniform(bits=4)")


def _members(codec: Any) -> list[Codec]:
    values = [getattr(codec, f.name) for f in fields(codec)] if is_dataclass(codec) else []
    return [v for v in values if isinstance(v, Codec)]
