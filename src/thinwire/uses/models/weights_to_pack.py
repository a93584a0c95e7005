"""A model that is to be packed: its tensors, what is known of them, and which are worth coding."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from thinwire.types import InputError, require
from thinwire.uses.models.choices import Matrix
from thinwire.uses.models.entry import DTYPES, PackedTensor, pack_entry
from thinwire.uses.models.moments import Moments
from thinwire.uses.models.tensors import Plain, Tied, as_matrix, power_of, times_power

FIRST = 8  # values that tensors are compared by before all of them are
_CPU = torch.device("cpu")
LEAST = 1024  # weights of a tensor that is worth steps
MOST = 0.5  # of what a type reaches: masks hold more, and codes of more may go beyond it


@dataclass(frozen=True, eq=False)
class Model:
    """What is to be packed: tensors by name, moments of some of them, and which are special.

    ``swapped`` are matrices [inputs, outputs]; ``lookups`` those whose rows a text looks up: embeddings.
    ``device``: where matrices are coded.
    """

    tensors: Mapping[str, Tensor]
    moments: Mapping[str, Moments] = field(default_factory=dict)
    swapped: Set[str] = frozenset()
    lookups: Set[str] = frozenset()
    device: torch.device = _CPU

    def __post_init__(self) -> None:
        for name, x in self.tensors.items():
            known = x.dtype in DTYPES.values()
            require(known, InputError, f"{name} is {x.dtype}, which cannot be packed; cast it")
            finite = not x.is_floating_point() or x.dtype.itemsize < 2 or bool(x.isfinite().all())
            require(finite, InputError, f"{name} has a NaN or an infinity; repair the model")

    @cached_property
    def same(self) -> dict[str, str]:
        """Tensors that have the values of one before them, and its name."""
        found, seen = dict[str, str](), dict[tuple[object, ...], list[str]]()
        for name, x in self.tensors.items():
            about = (tuple(x.shape), x.dtype, tuple(x.reshape(-1)[:FIRST].tolist()))  # soon told apart
            twin = next((n for n in seen.get(about, []) if torch.equal(self.tensors[n], x)), None)
            if twin is None or x.numel() < LEAST:
                seen.setdefault(about, []).append(name)
            else:
                found[name] = twin
        return found

    @cached_property
    def coded(self) -> list[str]:
        """Names of the tensors that steps or widths are chosen for."""
        return [
            name
            for name, x in self.tensors.items()
            if x.ndim >= 2 and x.numel() >= LEAST and x.is_floating_point() and x.dtype.itemsize > 1
            if name not in self.same and _within(x)
        ]

    def matrix(self, name: str, swapped: bool | None = None) -> Matrix:
        """Return one of the tensors as a matrix with its moments; flat ones where nothing is known.

        ``swapped``: as an earlier version had it, if there is one; moments of the other way say nothing then.
        """
        x, own = self.tensors[name], name in self.swapped
        swapped = own if swapped is None else swapped
        power = self.powers[name]
        flat = as_matrix(x, swapped, power).to(self.device)
        moments = self.moments.get(name) if swapped == own else None
        if moments is None:
            moments = Moments.flat(flat.shape[0], flat.shape[1], self._usual / _square(flat))
        rows = name not in self.lookups
        return Matrix(name, flat, moments.to(self.device), tuple(x.shape), x.dtype, swapped, rows, power)

    @cached_property
    def powers(self) -> dict[str, int]:
        """The powers of two that tensors are divided by to be coded."""
        return {name: power_of(x) for name, x in self.tensors.items() if x.is_floating_point()}

    @cached_property
    def _usual(self) -> float:
        """What a weight costs that is wrong by its tensor's deviation, where nothing is known of it."""
        known = [m.mean * _square(self.tensors[n], self.powers[n]) for n, m in self.moments.items()]
        return statistics.median(known) if known else 1.0

    def whole(self, name: str) -> PackedTensor:
        """Return the entry of a tensor that is kept as it is."""
        twin = self.same.get(name)
        return pack_entry(Tied(twin) if twin is not None else Plain(self.tensors[name]))

    @property
    def feedback(self) -> bool:
        """Whether errors are worth feeding forward: not where nothing is known of the inputs."""
        return bool(self.moments)

    @property
    def weights(self) -> int:
        """Weights that are coded."""
        return sum(self.tensors[name].numel() for name in self.coded)

    def in_order(self, entries: Mapping[str, PackedTensor]) -> dict[str, PackedTensor]:
        """Return entries in the order of the model's tensors."""
        return {name: entries[name] for name in self.tensors if name in entries}

    def kept(self) -> dict[str, PackedTensor]:
        """Return entries of the tensors that are always as they are."""
        coded = set(self.coded)
        return {name: self.whole(name) for name in self.tensors if name not in coded}

    def lossless(self) -> dict[str, PackedTensor]:
        """Return entries of all tensors as they are."""
        return {name: self.whole(name) for name in self.tensors}


def _square(x: Tensor, power: int = 0) -> float:
    own = times_power(x, -power) if power else x
    return max(float(own.float().square().mean()), 1e-30)


def _within(x: Tensor) -> bool:
    """Say whether codes of a tensor stay within its type; those of float16 are kept there."""
    return x.dtype == torch.float16 or bool(x.abs().max() < MOST * torch.finfo(x.dtype).max)
