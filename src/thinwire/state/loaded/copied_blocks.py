"""What a loader copies: elements of a checkpoint's tensor, and where they are in the host's memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Strided:
    """Where elements of a block are in a flat memory: the first one, and how far apart they are by dimension.

    >>> import torch
    >>> Strided(3, (8, 1)).offsets(torch.tensor([[0, 0], [1, 2]])).tolist()
    [3, 13]
    """

    at: int
    strides: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor) -> Strided:
        """Return where a tensor is in its storage."""
        return cls(int(x.storage_offset()), x.stride())

    def offsets(self, index: Tensor) -> Tensor:
        """Return the offsets of indices [n, dimensions]: int64 [n]."""
        return index @ index.new_tensor(self.strides) + self.at

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

        Both are on the memory's device; an element is there once at most.
        """
        index, inside = self._indices(at)
        target = self.target.offsets(index[inside])
        self.memory.index_copy_(0, target, values[inside].to(self.memory.dtype))

    def _indices(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Return each element's index [k, dimensions] in the block, and whether it is in it at all."""
        left = at - self.source.at
        inside, index = left >= 0, left.new_zeros((len(at), len(self.size)))
        order = sorted(range(len(self.size)), key=self.source.strides.__getitem__, reverse=True)
        for d in order:
            if self.size[d] > 1:
                index[:, d] = left // self.source.strides[d]
                left = left - index[:, d] * self.source.strides[d]
                inside &= index[:, d] < self.size[d]
        return index, inside & (left == 0)


def memory_of(x: Tensor) -> Tensor:
    """Return the whole storage of a tensor as its dtype: [n], the same memory."""
    n = x.untyped_storage().nbytes() // x.element_size()
    return x.detach().as_strided((n,), (1,), 0)
