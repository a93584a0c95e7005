"""Whether what a loader copies fills a host's parameters, each element from one place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from thinwire.state.layout import Layout
from thinwire.state.loaded.adapter_names import is_kept
from thinwire.state.loaded.copied_blocks import CopiedBlock
from thinwire.types import InputError, require


def check_filled(
    own: Mapping[str, Tensor],
    layout: Layout,
    blocks: Sequence[CopiedBlock],
    fills: Sequence[Tensor],
    kept: frozenset[str],
) -> None:
    """Raise ``InputError`` naming a parameter of ``own`` that is not filled, or only in part.

    ``fills``: parts that the loader fills itself, such as padding. ``kept`` may stay: names and shell
    patterns. So is a place of which two tensors would have the values: the loader's last one would win, and
    here whichever changed last.
    """
    for name, x in own.items():
        there = [block for block in blocks if _storage(block.memory) == _storage(x)]
        more = [part for part in fills if _storage(part) == _storage(x)]
        many = _covered(x, there, more, layout)
        if many < x.numel() and not is_kept(name, kept):
            part = f"{x.numel() - many:,} of {x.numel():,} values of " if many else ""
            told = f"nothing in the state fills {part}the host's {name}, which would stay old"
            raise InputError(f"{told}; publish what it is made of, or name it in kept=")
    unknown = {name for name in kept if not any(is_kept(other, frozenset({name})) for other in own)}
    told = f"kept= names {', '.join(sorted(unknown))}, which the host does not have"
    require(not unknown, InputError, told)


def _covered(x: Tensor, blocks: Sequence[CopiedBlock], fills: Sequence[Tensor], layout: Layout) -> int:
    """Return how many elements of a parameter are filled."""
    parts = [_range(b.target.at, b.size, b.target.strides) for b in blocks if b.numel]
    parts += [_range(int(y.storage_offset()), y.shape, y.stride()) for y in fills if y.numel()]
    whole = x.untyped_storage().nbytes() == x.nbytes
    if whole and all(end <= start for (_, end), (start, _) in pairwise(sorted(parts))):
        return sum(b.numel for b in blocks) + sum(y.numel() for y in fills)
    mask = torch.zeros(x.untyped_storage().nbytes() // x.element_size(), dtype=torch.bool)
    for index in dict.fromkeys(b.slot for b in blocks):
        mine = [b for b in blocks if b.slot == index]
        if any(b.target.view(mask, b.size).any() for b in mine):
            raise _twice(index, blocks, layout)
        _mark(mask, mine)
    for y in fills:
        mask.as_strided(y.shape, y.stride(), y.storage_offset()).fill_(True)
    return int(mask.as_strided(x.shape, x.stride(), x.storage_offset()).sum())


def _twice(index: int, blocks: Sequence[CopiedBlock], layout: Layout) -> InputError:
    """Return the error for a slot whose place another one has already."""
    mask = torch.zeros(len(blocks[0].memory), dtype=torch.bool)
    _mark(mask, [b for b in blocks if b.slot == index])
    other = next(b.slot for b in blocks if b.target.view(mask, b.size).any())
    one, two = layout.slots[other].name, layout.slots[index].name
    return InputError(
        f"the host keeps {one} and {two} in one place, and the state has them as two; tie them at the "
        "publisher, or leave one of them out"
    )


def _mark(mask: Tensor, blocks: Iterable[CopiedBlock]) -> None:
    for block in blocks:
        block.target.view(mask, block.size).fill_(True)


def _range(at: int, size: Sequence[int], strides: Sequence[int]) -> tuple[int, int]:
    """Return the first element of a block, and the one after its last."""
    return at, at + sum((n - 1) * s for n, s in zip(size, strides, strict=True)) + 1


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)
