"""The codec contract: a frozen, stateless map tensor -> payload -> tensor."""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from thinwire.types import Payload, PayloadError, TensorSpec

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
