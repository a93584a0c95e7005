"""What a loader copies: elements of a checkpoint's tensor, and where they are in the host's memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor


@dataclass(frozen=True)
class Strided:
    """Where elements of a block are in a flat memory: the first one, and how far apart they are by dimension.

    >>> import torch
    >>> Strided(3, (4, 1)).view(torch.arange(9), (2, 2)).tolist()
    [[3, 4], [7, 8]]
    """

    at: int
    strides: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor) -> Strided:
        """Return where a tensor is in its storage."""
        return cls(int(x.storage_offset()), x.stride())

    def view(self, flat: Tensor, size: Sequence[int]) -> Tensor:
        """Return the block of a flat memory, not copied."""
        return flat.as_strided(size, self.strides, self.at)


@dataclass(frozen=True)
class CopiedBlock:
    """A block [*size] that a loader copied: out of the tensor of a slot, into a host's memory [n].

    Elements of the source are apart: no two of its indices have one offset, as in all that slicing, splitting
    and transposing make.
    """

    slot: int
    size: tuple[int, ...]
    source: Strided
    target: Strided
    memory: Tensor

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def fill(self, values: Tensor) -> None:
        """Copy the whole block out of a slot's values [N]."""
        self.target.view(self.memory, self.size).copy_(self.source.view(values, self.size))

    def update(self, at: Tensor, values: Tensor) -> None:
        """Write ``values`` [k], of the elements ``at`` [k] of the slot, where they are in this block.

        Both are on the memory's device; what is there twice has one value.
        """
        left, inside = at - self.source.at, at >= self.source.at
        target = at.new_full((1,), self.target.at).expand(len(at))
        for size, apart, there in self._sides:
            index = left if apart == 1 else left.div(apart, rounding_mode="floor")
            left = left - index * apart if apart > 1 else left.new_zeros(1)
            inside &= index < size
            target = target + (index if there == 1 else index * there)
        inside &= left == 0
        if not inside.all():
            target, values = target[inside], values[inside]
        self.memory.index_copy_(0, target, values.to(self.memory.dtype))

    @cached_property
    def _sides(self) -> list[tuple[int, int, int]]:
        """Size, and strides in source and target, of each dimension: as few as can be, the longest first.

        A copy of whole rows has one.
        """
        found = list[tuple[int, int, int]]()
        sides = zip(self.size, self.source.strides, self.target.strides, strict=True)
        for n, apart, there in sorted((side for side in sides if side[0] != 1), key=lambda side: -side[1]):
            if found and found[-1][1:] == (apart * n, there * n):
                found[-1] = found[-1][0] * n, apart, there
            else:
                found.append((n, apart, there))
        return found


def memory_of(x: Tensor) -> Tensor:
    """Return the whole storage of a tensor as its dtype: [n], the same memory."""
    n = x.untyped_storage().nbytes() // x.element_size()
    return x.detach().as_strided((n,), (1,), 0)
