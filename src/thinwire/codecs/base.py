"""The codec contract: a frozen, stateless map tensor -> payload -> tensor."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from thinwire.types import Payload, PayloadError, TensorSpec

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
    short_cut = getattr(codec, "roundtrip", None)  # a check against the protocol costs as much as a pass
    if short_cut is not None:
        found: tuple[Payload, Tensor] = short_cut(x)
        return found
    payload = codec.encode(x)
    return payload, codec.decode(payload)


def layout_nbytes(layout: Layout) -> int:
    """Return the bytes of parts laid out so."""
    return sum(dtype.itemsize * n for dtype, n in layout)


def check_layout(payload: Payload, layout: Layout) -> None:
    """Raise ``PayloadError`` unless the parts of ``payload`` have exactly this layout."""
    found = tuple((p.dtype, p.numel()) for p in payload.parts)
    if found != layout:
        raise PayloadError(f"payload for {payload.spec.shape} has parts {found}, expected {layout}")
