"""Reproducible randomness without state: a hash of the content picks it, so equal inputs give equal bytes.

Nothing here depends on the library version or the device: all of it is integer arithmetic modulo 2**64.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from thinwire.codecs.codec import in_a_row
from thinwire.codecs.kernels import kernel_calls

TABLE = 1 << 16
_GOLDEN = 0x9E3779B97F4A7C15
_MIX1, _MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def mix(z: Tensor) -> Tensor:
    """Return a hash of each int64: the finaliser of SplitMix64 (Steele et al. 2014, "Fast splittable...")."""
    z = (z ^ _shift(z, 30)) * _signed(_MIX1)
    z = (z ^ _shift(z, 27)) * _signed(_MIX2)
    return z ^ _shift(z, 31)


def mix_int(z: int) -> int:
    """Return the hash of one unsigned 64-bit number."""
    z = ((z ^ (z >> 30)) * _MIX1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX2) & _MASK
    return z ^ (z >> 31)


def fingerprint(x: Tensor, seed: int = 0) -> int:
    """Return a 64-bit hash of ``seed`` and the bits of ``x`` (float32), whatever the order of summation."""
    words = in_a_row(x).view(torch.int32)
    if words.storage_offset() % 2:  # a wider view must start on its own boundary
        words = words.clone()
    even = words.numel() // 2 * 2
    total = int(words[:even].view(torch.int64).sum())
    if even < words.numel():
        total += int(words[even])
    return mix_int((total + (seed + 1) * _GOLDEN) & _MASK)


def uniforms(key: int, n: int, device: torch.device | str = "cpu") -> Tensor:
    """Return ``n`` integers in 0..2**32-1, the ``key``-th stream of the generator: int64 [n]."""
    counter = torch.arange(1, n + 1, dtype=torch.int64, device=device) * _signed(_GOLDEN)
    return _shift(mix(counter + _signed(key & _MASK)), 32)


def add_dither(y: Tensor, key: int, start: int = 0) -> None:
    """Add noise uniform in (-1/2, 1/2) to ``y`` (flat float32) in place; ``start`` is the index of ``y[0]``.

    The noise is read from one table of 2**16 evenly spaced values in random order, from an offset that
    ``key`` gives, anew every 2**16 elements: far cheaper than drawing it, and its mean is exactly zero.
    """
    table = _table(y.device.type, y.device.index)
    done = 0
    while done < y.numel():
        lap, at = divmod(start + done, TABLE)
        n = min(y.numel() - done, TABLE - at)
        first = mix_int((key + lap * _GOLDEN) & _MASK) % TABLE + at
        y[done : done + n].add_(table[first : first + n])
        done += n


def dithered(x: Tensor, key: int, step: Tensor, sign: int = 1) -> Tensor:
    """Return ``x`` (flat float32) and ``sign * step`` times the noise of ``key``; ``step``: float32 [1].

    The noise has 16 significant bits. Where the step has at most 8, their product is exact, as a level times
    the step is: a sum that a device fuses with either comes to the same.
    """
    if x.numel() and kernel_calls.there(x):
        return kernel_calls.dithered(x, key, _table("cpu", None), sign * float(step))
    noise = torch.zeros_like(x)
    add_dither(noise, key)
    return noise.mul_(sign * step).add_(x)


def table() -> Tensor:
    """Return the table of the noise, twice over, in a CPU's memory."""
    return _table("cpu", None)


def table_on(device: torch.device) -> Tensor:
    """Return the table of the noise, twice over, on a device."""
    return _table(device.type, device.index)


@lru_cache(maxsize=8)
def _table(kind: str, index: int | None) -> Tensor:
    device = torch.device(kind) if index is None else torch.device(kind, index)
    order = mix(torch.arange(TABLE, dtype=torch.int64, device="cpu")).argsort()
    values = (order.to(torch.float32) + 0.5) / TABLE - 0.5
    return torch.cat([values, values]).to(device)  # twice, so that no read wraps


def _shift(z: Tensor, by: int) -> Tensor:
    return (z >> by) & ((1 << (64 - by)) - 1)  # int64 shifts keep the sign; this one is logical


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
