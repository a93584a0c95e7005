"""Which tokens go to which experts: read of the device once a layer, and the indices that follow from it.

An index that is made here tells the host how many rows there are. So nothing waits for the device to say it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.staging import put_together, to_host


class Marked(NamedTuple):
    """Some of many rows: which, bool [all] on the host; their numbers, int64 [count] on the device."""

    here: Tensor
    there: Tensor

    @property
    def many(self) -> int:
        """How many there are."""
        return len(self.there)


class WantedPairs(NamedTuple):
    """The pairs of tokens and experts that are computed in a turn of a layer."""

    wanted: Tensor  # bool [T, experts], on the host
    numbers: Tensor  # int64 [T, experts], on the device: of each wanted pair, its row among the outputs
    many: int
    tokens: Mapping[int, Marked]  # of [T]: those that a rank's experts take
    made: Mapping[int, Marked]  # of [T * experts of a rank]: the outputs that come of its experts
    rows: Mapping[int, Tensor]  # int64, on the device: which of all outputs those are

    @classmethod
    def of_turn(cls, wanted: Tensor, owned: Mapping[int, Sequence[int]]) -> WantedPairs:
        """Return them for ``wanted`` [T, experts] on a device: one copy from it, and one to it."""
        [here] = to_host([wanted]).tensors()
        numbers = numbered(here)
        parts = {rank: here[:, experts] for rank, experts in owned.items()}
        marks = [part.any(1) for part in parts.values()] + [part.flatten() for part in parts.values()]
        rows = [numbers[:, owned[rank]][part] for rank, part in parts.items()]
        there = moved([*(m.nonzero()[:, 0] for m in marks), *rows, numbers], wanted.device)
        both, n = list(map(Marked, marks, there)), len(parts)
        tokens, made = (dict(zip(parts, some, strict=True)) for some in (both[:n], both[n:]))
        places = dict(zip(parts, there[2 * n : 3 * n], strict=True))
        return cls(here, there[-1].view_as(numbers), int(here.sum()), tokens, made, places)

    def of(self, experts: Sequence[int]) -> Tensor:
        """Return which tokens some experts take: bool [T, experts], on the host."""
        return self.wanted[:, experts]


def numbered(wanted: Tensor) -> Tensor:
    """Return the number of each pair that is wanted, token by token; of the others nothing that is of use."""
    return wanted.flatten().cumsum(0).view_as(wanted) - 1


def marked(marks: Sequence[Tensor], device: torch.device) -> list[Marked]:
    """Return marks [all] of the host with the numbers of what they mark on ``device``: one copy to it."""
    return list(map(Marked, marks, moved([mark.nonzero()[:, 0] for mark in marks], device)))


def moved(indices: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return int64 tensors of the host, flat, on ``device``: one copy."""
    if device.type == "cpu" or not indices:
        return [index.flatten() for index in indices]
    views = to_host(indices).views()
    return put_together(views, [(torch.int64, index.numel()) for index in indices], device)
