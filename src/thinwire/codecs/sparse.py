"""Sparse codecs: some values, or some rows, travel; the others decode to zero.

Where the receiver cannot know which, their indices go first, coded as in ``indices``; before them, in the
same part, how many there are (int32), where it cannot know that either.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.codecs.codec import Codec, Layout, decode_as, fixed_layout, head, require_codec, tuned
from thinwire.codecs.indices import indices_nbytes, marked, pack_indices, unpack_indices
from thinwire.codecs.kernels.bits import pack, packed_nbytes, unpack
from thinwire.codecs.kernels.noise import fingerprint, uniforms
from thinwire.codecs.raw import Raw
from thinwire.spec import Spec
from thinwire.types import InputError, Payload, PayloadError, TensorSpec, require

MAX_NUMEL = 2**28  # a few bytes may stand for a whole tensor, so its size needs a bound of its own


@dataclass(frozen=True, repr=False)
class TopK(Spec):
    """Keep the largest magnitudes: ``ratio`` of all values, at least one; code them by ``values``.

    Aji and Heafield 2017, "Sparse communication for distributed gradient descent"; use with error feedback.

    >>> import torch
    >>> codec = TopK(ratio=0.5)
    >>> codec.decode(codec.encode(torch.tensor([1.0, -4.0, 0.5, 3.0])))
    tensor([ 0., -4.,  0.,  3.])
    """

    ratio: float
    values: Codec = Raw()  # noqa: RUF009 -- frozen
    finite = False  # what is not kept is not looked at

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kept(self.ratio, self.values)

    def tuned(self, x: Tensor) -> TopK:
        """Return the codec for residuals of ``x``."""
        return replace(self, values=tuned(self.values, x))

    def encode(self, x: Tensor) -> Payload:
        flat = flattened(x)
        k = kept_count(self.ratio, flat.numel())
        index = flat.abs().topk(k, sorted=False).indices.sort().values
        return Payload(TensorSpec.of(x), _chosen(flat, index, self.values))

    def decode(self, payload: Payload) -> Tensor:
        return _spread(payload, kept_count(self.ratio, payload.spec.numel), self.values)

    def layout(self, spec: TensorSpec) -> Layout:
        k = kept_count(self.ratio, spec.numel)
        indices = (torch.uint8, indices_nbytes(k, spec.numel))
        return indices, *fixed_layout(self.values, vector(k, spec))

    def nbytes(self, spec: TensorSpec) -> int:
        k = kept_count(self.ratio, spec.numel)
        return indices_nbytes(k, spec.numel) + self.values.nbytes(vector(k, spec))


@dataclass(frozen=True, repr=False)
class InTurn(Spec):
    """Keep value number ``at`` of each run of ``every`` values; code them by ``values``.

    No indices travel. With ``at`` one further at each step, every value has its turn, and all senders send
    the same ones. Use it with error feedback. Source: CocktailSGD's code (DS3Lab/CocktailSGD at 4819ed7, its
    default ``random_rolling``), which sends the largest of these in 4 bits [quoted].

    >>> import torch
    >>> codec = InTurn(every=3, at=1)
    >>> codec.decode(codec.encode(torch.tensor([1.0, -4.0, 0.5, 3.0, 2.0])))
    tensor([ 0., -4.,  0.,  0.,  2.])
    """

    every: int
    at: int = 0
    values: Codec = Raw()  # noqa: RUF009 -- frozen
    finite = False  # what is not kept is not looked at

    def __post_init__(self) -> None:
        super().__post_init__()
        require_codec("values", self.values)
        require(self.every >= 1, InputError, f"every={self.every} is not a positive number of values")
        require(0 <= self.at < self.every, InputError, f"at={self.at} is not in 0..{self.every - 1}")

    def tuned(self, x: Tensor) -> InTurn:
        """Return the codec for residuals of ``x``."""
        return replace(self, values=tuned(self.values, x))

    def encode(self, x: Tensor) -> Payload:
        return Payload(TensorSpec.of(x), self.values.encode(flattened(x)[self.at :: self.every]).parts)

    def decode(self, payload: Payload) -> Tensor:
        spec = payload.spec
        check_size(spec)
        kept = decode_as(self.values, self._kept(spec), payload.parts)
        flat = torch.zeros(spec.numel, dtype=spec.dtype, device=kept.device)
        flat[self.at :: self.every] = kept
        return flat.reshape(spec.shape)

    def layout(self, spec: TensorSpec) -> Layout:
        return fixed_layout(self.values, self._kept(spec))

    def nbytes(self, spec: TensorSpec) -> int:
        return self.values.nbytes(self._kept(spec))

    def _kept(self, spec: TensorSpec) -> TensorSpec:
        return vector(len(range(self.at, spec.numel, self.every)), spec)


@dataclass(frozen=True, repr=False)
class RandomK(Spec):
    """Keep ``ratio`` of all values, one at random out of each of as many equal runs; code them by ``values``.

    Which ones, both ends compute from the eight bytes that go first, a hash of the content and ``seed``: no
    indices travel. ``unbiased`` multiplies the kept values by the length of their run, so the expectation of
    the decoded tensor is the tensor (Stich et al. 2018, "Sparsified SGD with memory"); leave it off with
    error feedback.

    >>> import torch
    >>> RandomK(ratio=0.25).nbytes(TensorSpec((8, 8)))
    72
    """

    ratio: float
    seed: int = 0
    values: Codec = Raw()  # noqa: RUF009 -- frozen
    unbiased: bool = False
    finite = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kept(self.ratio, self.values)

    def tuned(self, x: Tensor) -> RandomK:
        """Return the codec for residuals of ``x``."""
        return replace(self, values=tuned(self.values, x))

    def encode(self, x: Tensor) -> Payload:
        flat = flattened(x)
        key = fingerprint(flat.to(torch.float32), self.seed) >> 1  # a positive int64
        index, run = self._choose(key, flat.numel(), x.device)
        kept = flat[index]
        if self.unbiased:
            limit = torch.finfo(kept.dtype).max
            kept = (kept * run).clamp_(-limit, limit)
        nonce = torch.tensor([key], dtype=torch.int64, device=x.device)
        return Payload(TensorSpec.of(x), (nonce, *self.values.encode(kept).parts))

    def decode(self, payload: Payload) -> Tensor:
        key = int(head(payload, torch.int64, 1))
        kept = kept_values(payload, kept_count(self.ratio, payload.spec.numel), self.values)
        index, _ = self._choose(key, payload.spec.numel, kept.device)
        return scattered(payload.spec, index, kept)

    def layout(self, spec: TensorSpec) -> Layout:
        k = kept_count(self.ratio, spec.numel)
        return (torch.int64, 1), *fixed_layout(self.values, vector(k, spec))

    def nbytes(self, spec: TensorSpec) -> int:
        return 8 + self.values.nbytes(vector(kept_count(self.ratio, spec.numel), spec))

    def _choose(self, key: int, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the indices that ``key`` stands for, increasing, and the length of the run of each."""
        k = kept_count(self.ratio, n)
        edge = torch.arange(k + 1, dtype=torch.int64, device=device) * n // max(1, k)
        run = edge[1:] - edge[:-1]
        return edge[:-1] + (uniforms(key, k, device) * run >> 32), run


@dataclass(frozen=True, repr=False)
class HardThreshold(Spec):
    """Keep the values of magnitude ``threshold`` and above, however many; code them by ``values``.

    Sahu et al. 2021, "Rethinking gradient sparsification as total error minimization". A NaN is kept too, so
    that ``values`` passes it on or refuses it.

    >>> import torch
    >>> codec = HardThreshold(threshold=1.0)
    >>> codec.decode(codec.encode(torch.tensor([0.5, -2.0])))
    tensor([ 0., -2.])
    """

    threshold: float
    values: Codec = Raw()  # noqa: RUF009 -- frozen
    finite = False  # what is not kept is not looked at

    def __post_init__(self) -> None:
        super().__post_init__()
        require_codec("values", self.values)
        require(self.threshold >= 0, InputError, f"threshold={self.threshold} is not 0 or more")

    def tuned(self, x: Tensor) -> HardThreshold:
        """Return the codec for residuals of ``x``."""
        return replace(self, values=tuned(self.values, x))

    def encode(self, x: Tensor) -> Payload:
        flat = flattened(x)
        mask = (flat.abs() < self.threshold).logical_not_()  # which keeps a NaN
        index = marked(mask)
        count = torch.full((1,), index.numel(), dtype=torch.int32, device=x.device)
        indices, *kept = _chosen(flat, index, self.values, mask)
        return Payload(TensorSpec.of(x), (torch.cat([count.view(torch.uint8), indices]), *kept))

    def decode(self, payload: Payload) -> Tensor:
        parts, n = payload.parts, payload.spec.numel
        if not parts or parts[0].dtype != torch.uint8 or parts[0].dim() != 1 or parts[0].numel() < 4:
            raise PayloadError("a sparse payload does not begin with a count and indices")
        k = int(parts[0][:4].clone().view(torch.int32))  # a clone begins at an aligned address
        require(0 <= k <= n, PayloadError, f"a sparse payload of {k} out of {n} values")
        return _spread(Payload(payload.spec, (parts[0][4:], *parts[1:])), k, self.values)

    def nbytes(self, spec: TensorSpec) -> int:
        mask = indices_nbytes(spec.numel, spec.numel)  # the most that any number of indices takes
        return 4 + mask + self.values.nbytes(vector(spec.numel, spec))


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
        n, channels = _rows_and_width(x.shape)
        text = f"a codec of rows takes up to {MAX_NUMEL} values, got {x.numel()}; cut them"
        require(x.numel() <= MAX_NUMEL, InputError, text)
        flat = x.detach().reshape(n, channels)
        marked = (flat != 0).any(1)
        chosen = self.inner.encode(flat[marked])
        return Payload(TensorSpec.of(x), (pack(marked.to(torch.uint8), 1), *chosen.parts))

    def decode(self, payload: Payload) -> Tensor:
        spec = payload.spec
        check_size(spec)
        n, channels = _rows_and_width(spec.shape)
        index = unpack(head(payload, torch.uint8, packed_nbytes(n, 1)), 1, n).nonzero().flatten()
        rows = decode_as(self.inner, TensorSpec((index.numel(), channels), spec.dtype), payload.parts[1:])
        whole = torch.zeros((n, channels), dtype=spec.dtype, device=rows.device)
        return whole.index_copy_(0, index, rows).reshape(spec.shape)

    def nbytes(self, spec: TensorSpec) -> int:
        n, channels = _rows_and_width(spec.shape)
        return packed_nbytes(n, 1) + self.inner.nbytes(TensorSpec((n, channels), spec.dtype))


def _rows_and_width(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return how many rows there are, and the values of each."""
    return (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def _chosen(flat: Tensor, index: Tensor, values: Codec, mask: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return the parts that stand for the values at ``index``: the indices, and what ``values`` makes."""
    return pack_indices(index, flat.numel(), mask), *values.encode(flat[index]).parts


def _spread(payload: Payload, k: int, values: Codec) -> Tensor:
    """Return the tensor of ``k`` values that the parts of ``payload`` stand for, with zeros elsewhere."""
    n = payload.spec.numel
    index = unpack_indices(head(payload, torch.uint8, indices_nbytes(k, n)), k, n)
    return scattered(payload.spec, index, kept_values(payload, k, values))


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


def kept_values(payload: Payload, k: int, values: Codec) -> Tensor:
    """Return the ``k`` values that were kept."""
    check_size(payload.spec)
    return decode_as(values, vector(k, payload.spec), payload.parts[1:])


def scattered(spec: TensorSpec, index: Tensor, kept: Tensor) -> Tensor:
    """Return the tensor that has ``kept`` at ``index``, and zeros elsewhere."""
    flat = torch.zeros(spec.numel, dtype=spec.dtype, device=kept.device)
    return flat.index_copy_(0, index, kept).reshape(spec.shape)
