"""What sparse codecs share: how many values are kept, and a tensor of them and zeros."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.codecs.base import Codec
from thinwire.codecs.inner import decode_as, require_codec
from thinwire.types import InputError, Payload, PayloadError, TensorSpec, require

MAX_NUMEL = 2**28  # a few bytes may stand for a whole tensor, so its size needs a bound of its own


def check_kept(ratio: float, values: Codec) -> None:
    """Raise ``InputError`` unless ``ratio`` is a share, and ``values`` a codec."""
    require_codec("values", values)
    require(
        0 < ratio <= 1, InputError, f"ratio={ratio} is not in (0, 1]; give the share of the values to keep"
    )


def check_size(spec: TensorSpec) -> None:
    """Raise ``PayloadError`` for a tensor of more values than a sparse payload may stand for."""
    if spec.numel > MAX_NUMEL:
        raise PayloadError(f"a sparse payload for {spec.numel} values, at most {MAX_NUMEL} are allowed")


def flattened(x: Tensor) -> Tensor:
    """Return the values of ``x`` in one row; ``InputError`` if they are too many."""
    n = x.numel()
    require(n <= MAX_NUMEL, InputError, f"a sparse codec takes up to {MAX_NUMEL} values, got {n}; cut them")
    return x.detach().reshape(-1)


def kept_count(ratio: float, n: int) -> int:
    """Return how many of ``n`` values are kept."""
    return min(n, max(1, round(ratio * n)))


def vector(k: int, spec: TensorSpec) -> TensorSpec:
    """Return the spec of ``k`` values out of a tensor of ``spec``."""
    return TensorSpec((k,), spec.dtype)


def increasing(index: Tensor, n: int) -> Tensor:
    """Return ``index``, int64; ``PayloadError`` unless it is increasing and below ``n``."""
    if index.numel() and not bool((index[0] >= 0) & (index[-1] < n) & (index[1:] > index[:-1]).all()):
        raise PayloadError(f"indices that are not increasing within 0..{n - 1}")
    return index


def kept_values(payload: Payload, k: int, values: Codec) -> Tensor:
    """Return the ``k`` values that were kept."""
    check_size(payload.spec)
    return decode_as(values, vector(k, payload.spec), payload.parts[1:])


def scattered(spec: TensorSpec, index: Tensor, kept: Tensor) -> Tensor:
    """Return the tensor that has ``kept`` at ``index``, and zeros elsewhere."""
    flat = torch.zeros(spec.numel, dtype=spec.dtype, device=kept.device)
    return flat.index_copy_(0, index, kept).reshape(spec.shape)
