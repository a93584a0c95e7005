"""The rows of a matrix that are not all zeros: a bit for each row says which; another codec has them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.codecs.base import Codec
from thinwire.codecs.inner import decode_as, head, require_codec, tuned
from thinwire.codecs.kept import MAX_NUMEL, check_size
from thinwire.codecs.kernels.bits import pack, packed_nbytes, unpack
from thinwire.spec import Spec
from thinwire.types import InputError, Payload, TensorSpec, require


@dataclass(frozen=True, repr=False)
class Rows(Spec):
    """Send the rows, of the last dimension, that are not all zeros; ``inner`` codes them as one matrix.

    Over ``Delta`` a row that is as its reference costs one bit, so a sender that has news of some tokens
    alone sends those, in one entry. An entry a token costs 17 bytes: 512 rows of 128 at 1 bit take 18.0 kB
    so, and 9.6 kB as one [measured].

    >>> import torch
    >>> from thinwire.codecs import Raw
    >>> codec = Rows(Raw())
    >>> payload = codec.encode(torch.tensor([[0.0, 0.0], [1.0, 2.0], [0.0, 0.0]]))
    >>> payload.nbytes, codec.decode(payload).tolist()
    (9, [[0.0, 0.0], [1.0, 2.0], [0.0, 0.0]])
    """

    inner: Codec

    def __post_init__(self) -> None:
        super().__post_init__()
        require_codec("inner", self.inner)

    def tuned(self, x: Tensor) -> Rows:
        """Return the codec for residuals of ``x``."""
        return replace(self, inner=tuned(self.inner, x))

    def encode(self, x: Tensor) -> Payload:
        n, channels = _matrix(x.shape)
        text = f"a codec of rows takes up to {MAX_NUMEL} values, got {x.numel()}; cut them"
        require(x.numel() <= MAX_NUMEL, InputError, text)
        flat = x.detach().reshape(n, channels)
        marked = (flat != 0).any(1)
        chosen = self.inner.encode(flat[marked])
        return Payload(TensorSpec.of(x), (pack(marked.to(torch.uint8), 1), *chosen.parts))

    def decode(self, payload: Payload) -> Tensor:
        spec = payload.spec
        check_size(spec)
        n, channels = _matrix(spec.shape)
        index = unpack(head(payload, torch.uint8, packed_nbytes(n, 1)), 1, n).nonzero().flatten()
        rows = decode_as(self.inner, TensorSpec((index.numel(), channels), spec.dtype), payload.parts[1:])
        whole = torch.zeros((n, channels), dtype=spec.dtype, device=rows.device)
        return whole.index_copy_(0, index, rows).reshape(spec.shape)

    def nbytes(self, spec: TensorSpec) -> int:
        n, channels = _matrix(spec.shape)
        return packed_nbytes(n, 1) + self.inner.nbytes(TensorSpec((n, channels), spec.dtype))


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return how many rows there are, and the values of each."""
    return (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)
