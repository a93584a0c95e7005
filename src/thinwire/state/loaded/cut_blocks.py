"""Copied blocks of a whole tensor, cut to the boxes that are held of it: each box fills its own part."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from thinwire.state.boxes import Box, strides
from thinwire.state.loaded.copied_blocks import CopiedBlock, Strided
from thinwire.types import InputError


class _Side(NamedTuple):
    """A dimension of a block: ``n`` elements, ``step`` apart along dimension ``d`` of the tensor.

    ``stride`` is how far apart they are in the host's memory.
    """

    n: int
    d: int
    step: int
    stride: int

    def within(self, first: int, low: int, high: int) -> range:
        """Return which of the elements, the first of which is at ``first``, are from ``low`` to ``high``."""
        return range(max(0, -((first - low) // self.step)), min(self.n, (high - 1 - first) // self.step + 1))


def cut(block: CopiedBlock, box: Box, slot: int, name: str) -> Iterator[CopiedBlock]:
    """Yield what a block of a whole tensor takes of a box, as blocks of that box's own slot.

    Errors: ``InputError`` with the tensor's ``name`` where the block runs across its dimensions.
    """
    whole = strides(box.shape)
    first = [block.source.at // s % n for s, n in zip(whole, box.shape, strict=True)]
    sides = _sides(block, box.shape, first, name)
    one = {side.d: max((s for s in sides if s.d == side.d), key=lambda s: s.n) for side in sides}
    rest = [side for side in sides if one[side.d] is not side]
    for index in product(*(range(side.n) for side in rest)):
        start, at = list(first), block.target.at
        for i, side in zip(index, rest, strict=True):
            start[side.d] += i * side.step
            at += i * side.stride
        part = _within(box, start, at, list(one.values()))
        if part is not None:
            yield CopiedBlock(slot, *part, block.memory)


def _within(
    box: Box, start: list[int], at: int, sides: list[_Side]
) -> tuple[tuple[int, ...], Strided, Strided] | None:
    """Return size, source and target of what is inside the box; ``start`` and ``at``: of the first element.

    At most one side goes along each dimension. None: nothing is.
    """
    own = strides(box.size)
    size, sources, targets = list[int](), list[int](), list[int]()
    for side in sides:
        low = box.at[side.d]
        inside = side.within(start[side.d], low, low + box.size[side.d])
        if not inside:
            return None
        start[side.d] += inside[0] * side.step
        at += inside[0] * side.stride
        size.append(len(inside))
        sources.append(side.step * own[side.d])
        targets.append(side.stride)
    offsets = [a - low for a, low in zip(start, box.at, strict=True)]
    if any(not 0 <= x < n for x, n in zip(offsets, box.size, strict=True)):
        return None
    source = Strided(sum(x * s for x, s in zip(offsets, own, strict=True)), tuple(sources))
    return tuple(size), source, Strided(at, tuple(targets))


def _sides(block: CopiedBlock, shape: tuple[int, ...], first: list[int], name: str) -> list[_Side]:
    """Return the dimensions of a block along those of its tensor; one that runs over several is split."""
    whole = strides(shape)
    todo = list(zip(block.size, block.source.strides, block.target.strides, strict=True))
    found = list[_Side]()
    while todo:
        n, s, t = todo.pop()
        if n == 1:
            continue
        d = next((i for i, w in enumerate(whole) if shape[i] > 1 and w <= s), None)
        if d is None or s % whole[d]:
            raise _across(name)
        step, rows = s // whole[d], shape[d]
        if first[d] + (n - 1) * step < rows:
            found.append(_Side(n, d, step, t))
        elif step == 1 and not first[d] and n % rows == 0 and d:
            todo += [(n // rows, s * rows, t * rows), (rows, s, t)]
        else:
            raise _across(name)
    for d, rows in enumerate(shape):  # nothing is carried from one dimension to the next
        if first[d] + sum((side.n - 1) * side.step for side in found if side.d == d) >= rows:
            raise _across(name)
    return found


def _across(name: str) -> InputError:
    return InputError(
        f"the host copies {name} across its dimensions, which shards of it cannot fill; publish it whole"
    )
