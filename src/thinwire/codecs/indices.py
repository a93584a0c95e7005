"""Increasing indices in few bits: their low bits as they are, the rest as gaps.

Of k indices below n, the low ``width`` bits of each go first, as wide codes of ``bits``. What is above these
only rises, and goes as gaps in unary: a bitmap with a one for each index, and before it a zero for each unit
that it lies above the one before. That is Elias and Fano's code (Elias 1974, "Efficient storage and retrieval
by content and address of static files"). A mask of one bit a value takes its place where it is no larger.

``width`` is the one that takes the fewest bytes, which both ends derive from k and n: the size is known
beforehand, and nothing else travels. It is at most 2 + log2(n / k) bits an index [derived]: of one value in
100 it is 8.56, where no code of random indices takes less than 8.08 [derived]. State patches, which may be of
any size, use an entropy coder (``state/patch_code/positions.py``); it needs an extra, and codecs do not.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs.kernels.bits import pack, pack_wide, packed_nbytes, unpack, unpack_wide, wide_nbytes
from thinwire.types import PayloadError, require
from thinwire.verdicts import collecting, refuse


def increasing(index: Tensor, n: int) -> Tensor:
    """Return ``index``, int64; ``PayloadError`` unless it is increasing and below ``n``."""
    if not index.numel():
        return index
    good = (index[0] >= 0) & (index[-1] < n) & (index[1:] > index[:-1]).all()
    refuse(~good, lambda: disorder(n))
    return index if collecting(index) is None else index.clamp(0, n - 1)  # before it is known to be refused


def disorder(n: int) -> PayloadError:
    """Return the error for indices that do not increase within 0..n - 1."""
    return PayloadError(f"indices that are not increasing within 0..{n - 1}")


_MASK = -1


def marked(mask: Tensor) -> Tensor:
    """Return where ``mask`` [n] is not 0, int64: by numpy in a seventh of torch's time [measured]."""
    if mask.is_cpu and type(mask) is Tensor:
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().flatten()


def indices_nbytes(k: int, n: int) -> int:
    """Return the bytes that ``k`` indices below ``n`` take: never more than a mask.

    >>> indices_nbytes(500, 50_000), indices_nbytes(50_000, 50_000)
    (536, 6250)
    """
    return _nbytes(k, n, _width(k, n))


def pack_indices(index: Tensor, n: int, mask: Tensor | None = None) -> Tensor:
    """Pack increasing indices below ``n`` (int64, [k]) into uint8 [indices_nbytes(k, n)].

    ``mask``: what has ones at these places, bool [n], where that is at hand.

    >>> pack_indices(torch.tensor([3, 700]), 1000).tolist()
    [3, 188, 9]
    """
    k = index.numel()
    width = _width(k, n)
    if width == _MASK:
        return _bitmap(index, n) if mask is None else pack(mask.view(torch.uint8), 1)
    ones = (index >> width) + torch.arange(k, dtype=torch.int64, device=index.device)
    return torch.cat([pack_wide(index, width), _bitmap(ones, _span(k, n, width))])


def unpack_indices(packed: Tensor, k: int, n: int) -> Tensor:
    """Return the ``k`` indices that ``pack_indices`` packed: int64, increasing and below ``n``.

    Errors: ``PayloadError`` for anything else. What is allocated is in proportion to ``packed``.
    """
    width = _width(k, n)
    edge = 0 if width == _MASK else wide_nbytes(k, width)
    ones = _ones(unpack(packed[edge:], 1, _span(k, n, width)), k)
    if width == _MASK:
        return ones
    high = ones - torch.arange(k, dtype=torch.int64, device=ones.device)
    return increasing(high << width | unpack_wide(packed[:edge], width, k), n)


def _ones(bitmap: Tensor, k: int) -> Tensor:
    """Return where the ``k`` ones of ``bitmap`` are, int64; ``PayloadError`` for any other number of them."""
    if collecting(bitmap) is None:
        ones = marked(bitmap)
        require(ones.numel() == k, PayloadError, f"a bitmap of {ones.numel()} indices, expected {k}")
        return ones
    order = bitmap.cumsum(0, dtype=torch.int64)
    wrong = order[-1] != k if bitmap.numel() else torch.full((), k > 0, device=bitmap.device)
    refuse(wrong, lambda: PayloadError(f"a bitmap of another number of indices than {k}"))
    places = torch.where(bitmap > 0, order - 1, k).clamp_(max=k)  # the last one is for zeros, and too many
    found = torch.zeros(k + 1, dtype=torch.int64, device=bitmap.device)
    return found.scatter_(0, places, torch.arange(len(bitmap), device=bitmap.device))[:k]


@lru_cache(maxsize=1024)  # asked for each packet
def _width(k: int, n: int) -> int:
    """Return how many low bits of an index go as they are, or ``_MASK``: what takes the fewest bytes."""
    return min(range(_MASK, n.bit_length() + 1), key=lambda width: _nbytes(k, n, width))


def _nbytes(k: int, n: int, width: int) -> int:
    return packed_nbytes(_span(k, n, width), 1) + (0 if width == _MASK else wide_nbytes(k, width))


def _span(k: int, n: int, width: int) -> int:
    """Return the bits of the bitmap: one for each index, and the zeros before the last one at most."""
    return n if width == _MASK else k + (max(0, n - 1) >> width)


def _bitmap(ones: Tensor, n: int) -> Tensor:
    return pack(torch.zeros(n, dtype=torch.uint8, device=ones.device).index_fill_(0, ones, 1), 1)
