"""Principal components of keys and values: in which directions a cache varies, and how much each matters.

A row is what some layers keep of one token, turns undone. Errors in it do not matter alike: ``weights`` say
by how much the loss of the text that follows grows, as the mean square of its gradient (Fisher's information)
for each head. Components are those of weighted rows, so that one step for all of them spends bits where they
count (reverse water-filling), and keys and values need no steps of their own.
Source: transform coding (Goyal 2001) [from memory]; principal components of caches: KVTC (ICLR 2026)
[second-hand]; weights by gradients [derived].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import torch
from torch import Tensor

from thinwire.codecs.caches.rotations import STILL, Rotation
from thinwire.types import InputError, require

KEYS, VALUES, BOTH = KINDS = ("keys", "values", "both")
FLOOR = 0.03  # of a head's mean weight: what no direction is below
_SMALLEST = 1e-30


@dataclass(frozen=True)
class LayerForm:
    """What a layer keeps of a token: ``heads`` keys and values of so many numbers each.

    ``window``: of how many of the last tokens (0: of all); ``rotation``: the turn of its keys.
    """

    heads: int
    key: int
    value: int
    window: int = 0
    rotation: Rotation = STILL

    def width(self, kind: str) -> int:
        """Return the numbers of a row that are this layer's."""
        return self.heads * {KEYS: self.key, VALUES: self.value, BOTH: self.key + self.value}[kind]


@dataclass(frozen=True, eq=False)
class Basis:
    """Components of the rows of some layers: of their keys, of their values, or of both.

    ``vectors`` [width, rank] are orthonormal, and ``deviations`` [rank], which fall, are of weighted rows
    along them; ``mean`` [width] is of rows as they are. ``weights``: for each of the
    ``columns`` the symmetric matrices that the numbers of its heads are multiplied with. All float32.
    """

    layers: tuple[int, ...]
    kind: str
    mean: Tensor
    vectors: Tensor
    deviations: Tensor
    weights: tuple[Tensor, ...]  # [heads, width, width] each

    @property
    def columns(self) -> tuple[tuple[int, str], ...]:
        """What a row is made of: layer and kind of each, in order."""
        kinds = (KEYS, VALUES) if self.kind == BOTH else (self.kind,)
        return tuple((layer, kind) for layer in self.layers for kind in kinds)

    @cached_property
    def analysis(self) -> Tensor:
        """What rows without their mean are multiplied with, float32 [width, rank]."""
        return self._weighted(self.weights)

    @cached_property
    def synthesis(self) -> Tensor:
        """What brings components back, float32 [rank, width]."""
        return self._weighted([torch.linalg.inv(w.double()).float() for w in self.weights]).T.contiguous()

    def _weighted(self, weights: Sequence[Tensor]) -> Tensor:
        parts = self.vectors.split([w.shape[0] * w.shape[1] for w in weights])
        found = [w @ p.unflatten(0, (w.shape[0], -1)) for w, p in zip(weights, parts, strict=True)]
        return torch.cat([f.flatten(0, 1) for f in found])


@dataclass(frozen=True, eq=False)
class Components:
    """All components of the model ``model``, in the order of its layers, for at most ``tokens`` tokens."""

    model: str
    tokens: int
    layers: tuple[LayerForm, ...]
    bases: tuple[Basis, ...]

    def __post_init__(self) -> None:
        held = [(i, k) for b in self.bases for i in b.layers for k in (KEYS, VALUES) if b.kind in (k, BOTH)]
        wanted = {(i, k) for i in range(len(self.layers)) for k in (KEYS, VALUES)}
        require(
            len(held) == len(wanted) and {*held} == wanted, InputError, "components that leave out a layer"
        )
        for basis in self.bases:
            width = sum(self.layers[i].width(basis.kind) for i in basis.layers)
            rank, n = basis.deviations.numel(), basis.mean.numel()
            good = n == width and basis.vectors.shape == (width, rank) and rank <= width
            require(good, InputError, f"components of {tuple(basis.vectors.shape)} for rows of {width}")

    @cached_property
    def digest(self) -> bytes:
        """What caches say of the components that they were packed with, 16 bytes."""
        found = blake2b(f"{self.model}:{self.tokens}:{self.layers}".encode(), digest_size=16)
        for b in self.bases:
            found.update(f"{b.layers}:{b.kind}".encode())
            for part in (b.mean, b.vectors, b.deviations, *b.weights):
                found.update(part.flatten().view(torch.uint8).numpy().data)
        return found.digest()

    @property
    def numbers(self) -> int:
        """Numbers of one token in all layers."""
        return sum(form.width(BOTH) for form in self.layers)

    def step(self, bits: float) -> float:
        """Return the step at which a number takes ``bits``. Errors: ``InputError``.

        Each component takes what ``laplacian_bits`` says of its deviation, in steps [derived].
        """
        require(0.05 <= bits <= 12, InputError, f"bits={bits} is not in 0.05..12")
        if bits not in self._steps:
            self._steps[bits] = self._step(bits)
        return self._steps[bits]

    @cached_property
    def _steps(self) -> dict[float, float]:
        return {}

    def _step(self, bits: float) -> float:
        deviations = torch.cat([b.deviations for b in self.bases]).double()
        low, high = math.log(_SMALLEST), math.log(float(deviations.max()) * 64 + _SMALLEST)
        for _ in range(60):
            middle = (low + high) / 2
            found = float(laplacian_bits(deviations / math.exp(middle)).sum()) / self.numbers
            low, high = (middle, high) if found > bits else (low, middle)
        return math.exp(high)


def laplacian_bits(deviations: Tensor, offset: float = 0.4) -> Tensor:
    """Return the entropy in bits of Laplacian values of so many steps of deviation, each rounded to a level.

    Zero has probability 1 - exp((offset - 1) s), each further level exp(-s) times that of the one before,
    with s = sqrt(2) / deviation [derived].
    """
    rate = math.sqrt(2) / deviations.clamp(min=1e-9)
    beyond, next_one = ((offset - 1) * rate).exp(), (-rate).exp().clamp(max=1 - 1e-12)
    return _binary(beyond) + beyond * (1 + _binary(next_one) / (1 - next_one))


def _binary(p: Tensor) -> Tensor:
    """Return the entropy of a yes with probability ``p``."""
    return -(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p)) / math.log(2)


def weight_of(information: Tensor) -> Tensor:
    """Return the square root of Fisher's information [heads, width, width], float32, none of it zero."""
    width, each = information.shape[-1], information.double()
    level = each.diagonal(dim1=-2, dim2=-1).mean(-1)
    level = torch.maximum(level, level.mean() * 1e-4 + _SMALLEST)
    raised = each + FLOOR * level[:, None, None] * torch.eye(width, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(raised)
    return ((vectors * values.clamp(min=0).sqrt()[:, None, :]) @ vectors.transpose(-1, -2)).float()


def fitted(
    layers: tuple[int, ...],
    kind: str,
    mean: Tensor,
    covariance: Tensor,
    weights: Sequence[Tensor],
    least: float,
) -> Basis:
    """Return the components of rows of such a mean [width] and covariance [width, width].

    Those of a deviation below ``least`` times the largest are left out: no step that is of use reaches them.
    """
    turned = covariance.double()
    for axis in (0, 1):
        parts = turned.split([w.shape[0] * w.shape[1] for w in weights], axis)
        turned = torch.cat([_by_head(w.double(), p, axis) for w, p in zip(weights, parts, strict=True)], axis)
    values, vectors = torch.linalg.eigh((turned + turned.T) / 2)
    deviations, vectors = values.flip(0).clamp(min=0).sqrt(), vectors.flip(1)
    rank = max(1, int((deviations > least * deviations[0]).sum()))
    signs = vectors.gather(0, vectors.abs().argmax(0)[None]).sign()  # or they were another machine's choice
    kept = (vectors * signs)[:, :rank].bfloat16().float().contiguous()  # as a file keeps them
    return Basis(layers, kind, mean.float(), kept, deviations[:rank].float(), tuple(weights))


def _by_head(weight: Tensor, part: Tensor, axis: int) -> Tensor:
    """Return what the rows, or columns, of a part become when the weight of each head multiplies its own."""
    moved = part.movedim(axis, 0)
    return (weight @ moved.unflatten(0, (weight.shape[0], -1))).flatten(0, 1).movedim(0, axis)
