"""A checksum of all bits of a tensor, which its own device makes: the same on every device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from thinwire.staging import bytes_of, to_host

_PIECE = 1 << 20  # words that are summed at a time
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # the golden ratio, as a whole number of 64 bits
_WORD = 4  # bytes


def bit_sum(x: Tensor) -> Tensor:
    """Return a checksum of all bits of ``x``: int64 [], on its device.

    The sum of all words, 32 bits each, times odd numbers that depend on the place; modulo 2**64, so it has
    the same bits in any order of summation. A tensor that differs in one word has another one.

    >>> x = torch.arange(6.0)
    >>> bool(bit_sum(x) == bit_sum(x.clone())), bool(bit_sum(x) == bit_sum(x.flip(0)))
    (True, False)
    """
    words = _words(x)
    if len(words) <= _PIECE:
        return _summed(words)
    pieces = torch.stack([_summed(piece) for piece in words.split(_PIECE)])
    return (pieces * factors(len(pieces), x.device)).sum()


def sums_of(parts: Sequence[Tensor]) -> list[int]:
    """Return ``bit_sum`` of each tensor, as numbers."""
    return [int(n) for n in numbers([bit_sum(x) for x in parts])]


def numbers(parts: Sequence[Tensor]) -> list[float]:
    """Return the number in each of these tensors [], wherever they are: one copy from each device."""
    found = dict[int, float]()
    for device in dict.fromkeys(x.device for x in parts):
        here = [i for i, x in enumerate(parts) if x.device == device]
        copied = to_host([parts[i] for i in here], align=8).tensors()
        found |= {i: x.item() for i, x in zip(here, copied, strict=True)}
    return [found[i] for i in range(len(parts))]


def factors(n: int, device: torch.device) -> Tensor:
    """Return ``n`` odd numbers of 64 bits, int64, all different."""
    return (torch.arange(1, n + 1, device=device) * _FACTOR) | 1


@lru_cache(maxsize=16)  # 8 MB a device
def _factors(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return factors(_PIECE, device)


def _summed(words: Tensor) -> Tensor:
    return (words.to(torch.int64) * _factors(words.device)[: len(words)]).sum()


def _words(x: Tensor) -> Tensor:
    """Return the bytes of ``x`` as int32 [words], zeros behind them where they end within one."""
    data = bytes_of(x)
    if len(data) % _WORD or data.storage_offset() % _WORD:
        data = torch.nn.functional.pad(data, (0, -len(data) % _WORD))
    return data.view(torch.int32)
