"""Bit packing: small unsigned codes to bytes and back, by planes.

Layout. ``n`` codes of ``bits`` bits are cut into ``P`` consecutive runs (planes) of ``m = ceil(n / P)``
codes, the last ones short or empty, where ``P`` is the number of codes that fill whole bytes
(8 / gcd(8, bits)). Word ``i`` is the little-endian number ``sum_k code[k * m + i] << (k * bits)``, of
``P * bits / 8`` bytes; byte ``j`` of word ``i`` is stored at ``j * m + i``. So both sides are long contiguous
runs, and packing is a few vectorised byte operations on whole planes, on any device, with no strided copy.

The aligned form has ``8 // bits`` codes a byte and no code across a byte's edge: bytes are then symbols that
an entropy coder can model.

Codes wider than a byte go as planes of whole bytes, the lowest first; then the bits that are left, packed.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from thinwire.types import InputError, PayloadError


def packed_nbytes(n: int, bits: int) -> int:
    """Return the bytes that ``n`` codes take.

    >>> packed_nbytes(10, 3)
    6
    """
    planes = plane_count(bits)
    return -(-n // planes) * (planes * bits // 8)


def aligned_nbytes(n: int, bits: int) -> int:
    """Return the bytes that ``n`` codes take in the aligned form.

    >>> aligned_nbytes(10, 3)
    5
    """
    plane_count(bits)
    return -(-n // (8 // bits))


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack ``codes`` (uint8, [n], each below ``2**bits``) into uint8 [packed_nbytes(n, bits)].

    >>> pack(torch.tensor([1, 2, 3, 0], dtype=torch.uint8), 2).tolist()
    [57]
    """
    planes = plane_count(bits)
    return _pack(codes, bits, planes, planes * bits // 8)


def unpack(packed: Tensor, bits: int, n: int) -> Tensor:
    """Return the ``n`` codes that ``pack`` packed: uint8 [n]. ``PayloadError`` where the length does not fit.

    >>> unpack(torch.tensor([57], dtype=torch.uint8), 2, 4).tolist()
    [1, 2, 3, 0]
    """
    planes = plane_count(bits)
    return _unpack(packed, bits, n, planes, planes * bits // 8)


def pack_aligned(codes: Tensor, bits: int) -> Tensor:
    """Pack ``8 // bits`` codes a byte: uint8 [aligned_nbytes(n, bits)]."""
    plane_count(bits)
    return _pack(codes, bits, 8 // bits, 1)


def unpack_aligned(packed: Tensor, bits: int, n: int) -> Tensor:
    """Return the ``n`` codes that ``pack_aligned`` packed: uint8 [n]."""
    plane_count(bits)
    return _unpack(packed, bits, n, 8 // bits, 1)


def wide_nbytes(n: int, bits: int) -> int:
    """Return the bytes that ``n`` codes of any width take.

    >>> wide_nbytes(10, 12)
    15
    """
    whole, rest = divmod(bits, 8)
    return n * whole + (packed_nbytes(n, rest) if rest else 0)


def pack_wide(codes: Tensor, bits: int) -> Tensor:
    """Pack the low ``bits`` of ``codes`` (int32 or int64, [n]) into uint8 [wide_nbytes(n, bits)].

    >>> pack_wide(torch.tensor([0x123, 0x456]), 12).tolist()
    [35, 86, 65]
    """
    n, (whole, rest) = codes.numel(), divmod(bits, 8)
    out = torch.empty(wide_nbytes(n, bits), dtype=torch.uint8, device=codes.device)
    for i in range(whole):
        out[i * n : (i + 1) * n] = codes  # without what is above the low byte
        codes = codes >> 8
    if rest:
        out[whole * n :] = pack(codes.to(torch.uint8).bitwise_and_(_byte((1 << rest) - 1)), rest)
    return out


def unpack_wide(packed: Tensor, bits: int, n: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return the ``n`` codes that ``pack_wide`` packed. ``PayloadError`` where the length does not fit."""
    if packed.dtype != torch.uint8 or packed.numel() != wide_nbytes(n, bits):
        raise PayloadError(f"{packed.numel()} bytes of {packed.dtype} do not hold {n} codes of {bits} bits")
    whole, rest = divmod(bits, 8)
    planes = [packed[i * n : (i + 1) * n] for i in range(whole)]
    if rest:
        planes.append(unpack(packed[whole * n :], rest, n))
    codes = planes.pop().to(dtype) if planes else torch.zeros(n, dtype=dtype, device=packed.device)
    for plane in reversed(planes):
        codes.bitwise_left_shift_(8).bitwise_or_(plane)
    return codes


def plane_count(bits: int) -> int:
    """Return in how many runs codes of ``bits`` bits are cut."""
    if not 1 <= bits <= 8:
        raise InputError(f"bits={bits} is not in 1..8; choose how many bits a code takes")
    return 8 // math.gcd(8, bits)


@lru_cache(maxsize=256)
def _byte(value: int) -> Tensor:
    """Return a number as a tensor; to wrap it at each use would double the time of a small plane."""
    return torch.tensor(value, dtype=torch.uint8, device="cpu")  # it goes with data on any device


def _pack(codes: Tensor, bits: int, planes: int, width: int) -> Tensor:
    n = codes.numel()
    m = -(-n // planes)
    if planes == 1:
        return codes
    out = torch.zeros((width, m), dtype=torch.uint8, device=codes.device)
    for k in range(planes):
        plane = codes[k * m : (k + 1) * m]
        byte, shift = divmod(k * bits, 8)
        # A sum of disjoint bits is their union, and uint8 drops what overflows: shift, mask and or in one.
        out[byte, : plane.numel()].add_(plane, alpha=1 << shift)
        if shift + bits > 8:
            out[byte + 1, : plane.numel()].add_(plane >> _byte(8 - shift))
    return out.flatten()


def _unpack(packed: Tensor, bits: int, n: int, planes: int, width: int) -> Tensor:
    m = -(-n // planes)
    if packed.dtype != torch.uint8 or packed.numel() != m * width:
        raise PayloadError(f"{packed.numel()} bytes of {packed.dtype} do not hold {n} codes of {bits} bits")
    if planes == 1:
        return packed
    words, mask = packed.reshape(width, m), _byte((1 << bits) - 1)
    codes = torch.empty(planes * m, dtype=torch.uint8, device=packed.device)
    for k in range(planes):
        plane = codes[k * m : (k + 1) * m]
        byte, shift = divmod(k * bits, 8)
        if not shift:
            torch.bitwise_and(words[byte], mask, out=plane)
            continue
        torch.bitwise_right_shift(words[byte], _byte(shift), out=plane)
        if shift + bits > 8:
            plane.add_(words[byte + 1], alpha=1 << (8 - shift))
        if shift + bits != 8:
            plane.bitwise_and_(mask)
    return codes[:n]
