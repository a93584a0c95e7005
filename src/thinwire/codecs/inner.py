"""What codecs that are built of other codecs share."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any, TypeGuard

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, FixedRate, Layout, is_up_to_date
from thinwire.types import InputError, Payload, PayloadError, TensorSpec


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
