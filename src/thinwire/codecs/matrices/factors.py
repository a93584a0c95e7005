"""Matrices as products of two thin factors of small integers: made for the moves of trained weights.

What some steps of training move in a matrix lies near few directions, the first ones of training above all.
A tensor is seen as the matrices that it has in a row, its ``Cut``, and what stands between them. The parts:
the cut, int32 [matrices, 3]; scales, float32 [matrices]; left levels, int8 [rows, k] of each matrix in turn;
right ones, int8 [k, width] of each; then the parts of the rest. k is the rank, or the rows or the width where
fewer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.codec import Codec, decoded, require_codec, roundtrip, saturated
from thinwire.codecs.kernels.noise import uniforms
from thinwire.codecs.kernels.scales import matrices
from thinwire.codecs.matrices.lowrank import check_finite
from thinwire.codecs.sparse import check_size
from thinwire.codecs.uniform import Uniform
from thinwire.spec import Spec
from thinwire.types import InputError, Payload, PayloadError, TensorSpec, require
from thinwire.verdicts import refuse

Cut = tuple[tuple[int, int, int], ...]  # of each matrix: where it begins in the tensor, rows, width
MOST_RANK = 1024  # times 127 * 127 is below 2**24, up to which float32 has all whole numbers
_TOP = 127
_LEAST, _MOST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
_PASSES = 2  # of subspace iteration


@dataclass(frozen=True, repr=False)
class Factors(Spec):
    """Send each matrix as a product of ``rank``, its factors in levels that suit their weakest direction.

    Both factors share the size of a direction, so that strong ones have more levels; the weakest has one of
    ``step`` times its root mean square. The right factor is fitted to what the left one became. Levels go to
    an entropy coder: put this inside ``Entropy``. ``rest`` codes what belongs to no matrix, such as biases.
    Sums of products of levels are whole numbers below 2**24: the same bits in any order, on any device.

    Without ``placed`` a tensor is its own matrices: along the last dimension, a sample each; one of two
    dimensions is one, and one of fewer is all rest.
    Source: PowerSGD (arXiv 1905.13727) sends factors of gradients in float32; levels, the shared size and the
    fit are ours. Errors: ``InputError`` for a NaN or an infinity.

    >>> import torch
    >>> x = torch.outer(torch.arange(1.0, 65), torch.linspace(-1, 1, 32))
    >>> codec = Factors(rank=1, step=0.1)
    >>> bool((codec.decode(codec.encode(x)) - x).norm() < 0.05 * x.norm())
    True
    """

    rank: int = 4
    step: float = 1.0
    rest: Codec = Uniform(4, group=64)  # noqa: RUF009 -- frozen
    finite = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_codec("rest", self.rest)
        require(1 <= self.rank <= MOST_RANK, InputError, f"rank={self.rank} is not in 1..{MOST_RANK}")
        require(self.step > 0, InputError, f"step={self.step} is not above 0")

    def placed(self, cut: Cut) -> PlacedFactors:
        """Return the codec for tensors whose matrices are those of ``cut``; what it encodes, this decodes."""
        return PlacedFactors(self.rank, self.step, self.rest, cut)

    def cut_of(self, spec: TensorSpec) -> Cut:
        """Return the matrices of a tensor."""
        count, rows, width = matrices(spec)
        return tuple((i * rows * width, rows, width) for i in range(count)) if len(spec.shape) > 1 else ()

    def encode(self, x: Tensor) -> Payload:
        return self.roundtrip(x)[0]

    def roundtrip(self, x: Tensor) -> tuple[Payload, Tensor]:
        spec, cut = TensorSpec.of(x), self.cut_of(TensorSpec.of(x))
        values = x.detach().to(torch.float32).reshape(-1)
        check_finite(values)
        found, each = torch.empty_like(values), []
        for matrix, out in zip(_seen(values, cut), _seen(found, cut), strict=True):
            each.append(_factored(matrix, self.rank, self.step))
            _multiply(*each[-1], out)
        payload, rest = roundtrip(self.rest, torch.cat([values[gap] for gap in _gaps(cut, values.numel())]))
        _spread(rest, cut, found)
        lefts, rights, scales = zip(*each, strict=True) if each else ((), (), ())
        parts = (
            _where(cut, x.device),
            _joined(scales, torch.float32, x),
            *(_joined(levels, torch.int8, x) for levels in (lefts, rights)),
        )
        return Payload(spec, (*parts, *payload.parts)), _shaped(found, spec)

    def decode(self, payload: Payload) -> Tensor:
        spec = payload.spec
        check_size(spec)
        cut = self._read(payload)
        scales, left, right = payload.parts[1:4]
        found, done = torch.empty(spec.numel, dtype=torch.float32, device=scales.device), [0, 0]
        for scale, out in zip(scales.unbind(), _seen(found, cut), strict=True):
            k, factors = min(self.rank, *out.shape), []
            for side, levels in enumerate((left, right)):
                size = out.shape[side] * k
                factors.append(levels[done[side] : done[side] + size].to(torch.float32))
                done[side] += size
            _multiply(factors[0].view(-1, k), factors[1].view(k, -1), scale, out)
        rest = TensorSpec((sum(gap.stop - gap.start for gap in _gaps(cut, spec.numel)),))
        _spread(decoded(self.rest, Payload(rest, payload.parts[4:])), cut, found)
        return _shaped(found, spec)

    def _read(self, payload: Payload) -> Cut:
        """Return the cut of a payload; ``PayloadError`` where its parts do not fit that, or its spec."""
        require(len(payload.parts) > 4, PayloadError, f"{len(payload.parts)} parts are no factors")
        where, scales, *levels = payload.parts[:4]
        good = where.dtype == torch.int32 and scales.dtype == torch.float32
        good = good and where.numel() == 3 * scales.numel()
        require(good, PayloadError, "matrices and their scales do not fit together")
        refuse(~torch.isfinite(scales).all(), lambda: PayloadError("a scale of factors is not finite"))
        cut = self._found(where, payload.spec)
        for side, part in enumerate(levels):
            n = sum(min(self.rank, *size) * size[side] for _, *size in cut)
            fits = part.dtype == torch.int8 and part.numel() == n
            require(fits, PayloadError, f"{part.numel()} levels of {part.dtype}, expected {n} of int8")
        return cut

    def _found(self, where: Tensor, spec: TensorSpec) -> Cut:
        cut, end = [], 0
        for at, rows, width in where.view(-1, 3).tolist():
            fits = at >= end and rows > 0 and width > 0 and at + rows * width <= spec.numel
            wrong = f"a matrix of {rows} x {width} values at {at} is not within {spec.numel}"
            require(fits, PayloadError, wrong)
            cut.append((at, rows, width))
            end = at + rows * width
        return tuple(cut)

    def nbytes(self, spec: TensorSpec) -> int:
        """Return the bytes of the largest payload, that of matrices of one value each."""
        return 18 * spec.numel + self.rest.nbytes(TensorSpec((spec.numel,)))


@dataclass(frozen=True, repr=False)
class PlacedFactors(Factors):
    """``Factors`` for tensors whose matrices lie in a row as ``cut`` says; packets name ``Factors``."""

    cut: Cut = ()

    def cut_of(self, spec: TensorSpec) -> Cut:
        return self.cut

    def _found(self, where: Tensor, spec: TensorSpec) -> Cut:
        require(where.numel() == 3 * len(self.cut), PayloadError, "factors of other matrices than these here")
        own = _where(self.cut, where.device)  # without a wait for the device
        refuse((where != own).any(), lambda: PayloadError("factors of other matrices than these here"))
        return self.cut

    def __repr__(self) -> str:
        return repr(Factors(self.rank, self.step, self.rest))


def placed(codec: Codec, cut: Cut) -> Codec:
    """Return ``codec`` as it encodes tensors whose matrices are those of ``cut``; itself, if it sees none."""
    make = getattr(codec, "placed", None)
    return codec if make is None else make(cut)


def _factored(x: Tensor, rank: int, step: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return levels [rows, k] and [k, width], as whole numbers in float32, and the scale of their product."""
    k = min(rank, *x.shape)
    peak = x.abs().amax().clamp_min(_LEAST)
    m = x / peak
    right = (uniforms(0, k * x.shape[1], x.device).to(torch.float32) / 2**31 - 1).view(k, -1)
    for _ in range(_PASSES):
        left = torch.linalg.qr(_product(m, right.T))[0]
        right = _product(left.T, m)
    size = right.norm(dim=1).sqrt_()  # of each direction, the same on both sides
    weakest = step * size.amin()
    left, fine = _levels(left * size, weakest / x.shape[0] ** 0.5)
    square = _product(left.T, left)
    square.diagonal().add_(1e-6 * square.diagonal().amax() + _LEAST)
    fitted = torch.linalg.solve_ex(square, _product(left.T, m))[0]
    right, coarse = _levels(fitted, fine * weakest / x.shape[1] ** 0.5)
    scale = coarse * peak
    return left, right, torch.where(scale < _LEAST, 0.0, scale)  # some devices have no denormals


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of two matrices, in place of an empty one: no autocast touches that."""
    return left.new_empty(left.shape[0], right.shape[1]).addmm_(left, right, beta=0)


def _levels(x: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x`` as whole numbers of steps, and the step: a larger one where ``step`` needs too many."""
    step = torch.maximum(step, x.abs().amax() / _TOP).clamp_min(_LEAST)
    return (x / step).round_().clamp_(-_TOP, _TOP), step


def _multiply(left: Tensor, right: Tensor, scale: Tensor, out: Tensor) -> None:
    out.addmm_(left, right, beta=0).mul_(scale).clamp_(-_MOST, _MOST)


def _seen(flat: Tensor, cut: Cut) -> Iterator[Tensor]:
    """Yield the matrices in ``flat``."""
    return (flat[at : at + rows * width].view(rows, width) for at, rows, width in cut)


def _where(cut: Cut, device: torch.device) -> Tensor:
    return torch.tensor(cut, dtype=torch.int32, device=device).flatten()


def _joined(parts: Sequence[Tensor], dtype: torch.dtype, x: Tensor) -> Tensor:
    flat = [part.to(dtype).flatten() for part in parts]
    return torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=x.device)


def matrices_of(shapes: Iterable[Sequence[int]]) -> Cut:
    """Return the matrices in tensors of these shapes that lie one behind another in a row.

    Of three dimensions the first counts matrices, as experts have them; of more, it counts rows, as those
    of convolutions do.

    >>> matrices_of([(3,), (4, 5), (2, 6, 7)])
    ((3, 4, 5), (23, 6, 7), (65, 6, 7))
    """
    found, at = [], 0
    for shape in shapes:
        size = math.prod(shape)
        width = shape[-1] if len(shape) == 3 else size // max(1, shape[0] if shape else 1)
        rows = shape[1] if len(shape) == 3 else shape[0] if len(shape) > 1 else 0
        if min(rows, width) > 1:
            found += [(at + i, rows, width) for i in range(0, size, rows * width)]
        at += size
    return tuple(found)


def within(cut: Cut, start: int, stop: int) -> Cut:
    """Return the matrices of the values from ``start`` to ``stop``: of each, its rows that lie in these.

    >>> within(((0, 4, 10), (40, 2, 5)), 15, 50)
    ((5, 2, 10), (25, 2, 5))
    """
    found = []
    for at, rows, width in cut:
        first = max(0, -(-(start - at) // width))
        last = min(rows, (stop - at) // width)
        if last > first:
            found.append((at + first * width - start, last - first, width))
    return tuple(found)


def _gaps(cut: Cut, n: int) -> Iterator[slice]:
    """Yield where values of no matrix are, one slice at least."""
    end = 0
    for at, rows, width in cut:
        yield slice(end, at)
        end = at + rows * width
    yield slice(end, n)


def _spread(rest: Tensor, cut: Cut, found: Tensor) -> None:
    done = 0
    for gap in _gaps(cut, found.numel()):
        n = gap.stop - gap.start
        found[gap] = rest[done : done + n]
        done += n


def _shaped(found: Tensor, spec: TensorSpec) -> Tensor:
    return saturated(found, spec.dtype).reshape(spec.shape)
