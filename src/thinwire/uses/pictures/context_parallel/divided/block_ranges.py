"""Which blocks of a model each rank has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from thinwire.types import InputError, require
from thinwire.uses.pictures.absent_block import part_of


def cut(blocks: Sequence[object], ranks: int, shares: Sequence[float] | None = None) -> list[range]:
    """Return which blocks each rank has: as even as they go, or by ``shares``, and one at least.

    >>> cut("abcdefg", 3), cut("abcdefg", 2, [5, 2])
    ([range(0, 3), range(3, 5), range(5, 7)], [range(0, 5), range(5, 7)])
    """
    n = len(blocks)
    text = f"mode pipe cuts {n} blocks over the ranks, and there are {ranks} of these; use fewer ranks"
    require(n >= ranks, InputError, text)
    if shares is None:
        ends = [n // ranks * k + min(k, n % ranks) for k in range(ranks)]
    else:
        check_shares(shares, ranks)
        ends = [0]
        for k in range(1, ranks):
            end = round(n * sum(shares[:k]) / sum(shares))
            ends.append(min(max(end, ends[-1] + 1), n - ranks + k))
    return [range(*pair) for pair in pairwise([*ends, n])]


def check_shares(shares: Sequence[float], ranks: int) -> None:
    """Raise ``InputError`` unless there is a share above 0 for each rank."""
    good = isinstance(shares, Sequence) and not isinstance(shares, str)
    good = good and all(isinstance(s, int | float) and 0 < s < math.inf for s in shares)
    text = f"shares {shares!r:.60} are not {ranks} numbers above 0; give one for each rank, such as [2, 1]"
    require(good and len(shares) == ranks, InputError, text)


def ranges_of(model: nn.Module, blocks: Sequence[object], ranks: int) -> list[range]:
    """Return which blocks each rank has: those that it was loaded with, or as even as they go."""
    part = part_of(model)
    return cut(blocks, ranks) if part is None else list(part.ranges)
