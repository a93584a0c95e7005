"""Bit packing by planes, as in ``codecs.kernels.bits``, of arrays: numpy starts no threads of its own."""

from __future__ import annotations

import math

import numpy as np

from thinwire.state.layout import Array


def wide_nbytes(n: int, bits: int) -> int:
    """Return the bytes that ``n`` codes of any width take: planes of whole bytes, then what is left, packed.

    >>> wide_nbytes(10, 12)
    15
    """
    whole, rest = divmod(bits, 8)
    return n * whole + (math.prod(_form(n, rest)) if rest else 0)


def pack(codes: Array, bits: int) -> Array:
    """Pack uint8 [n], each below ``2**bits``, of 1 to 7 bits, into uint8 [wide_nbytes(n, bits)].

    >>> pack(np.array([1, 2, 3, 0], np.uint8), 2).tolist()
    [57]
    """
    width, m = _form(codes.size, bits)
    out = np.zeros((width, m), np.uint8)
    for k in range(8 * width // bits):
        plane = codes[k * m : (k + 1) * m]
        byte, shift = divmod(k * bits, 8)
        out[byte, : plane.size] |= plane << np.uint8(shift)  # what overflows is dropped
        if shift + bits > 8:
            out[byte + 1, : plane.size] |= plane >> np.uint8(8 - shift)
    return out.reshape(-1)


def unpack(packed: Array, bits: int, n: int) -> Array:
    """Return the ``n`` codes that ``pack`` packed into uint8 [wide_nbytes(n, bits)]: uint8 [n].

    >>> unpack(np.array([57], np.uint8), 2, 4).tolist()
    [1, 2, 3, 0]
    """
    width, m = _form(n, bits)
    words, mask = packed.reshape(width, m), np.uint8((1 << bits) - 1)
    codes = np.empty((8 * width // bits, m), np.uint8)
    for k, plane in enumerate(codes):
        byte, shift = divmod(k * bits, 8)
        plane[:] = words[byte] >> np.uint8(shift)
        if shift + bits > 8:
            plane |= words[byte + 1] << np.uint8(8 - shift)
        plane &= mask
    return codes.reshape(-1)[:n]


def _form(n: int, bits: int) -> tuple[int, int]:
    """Return the bytes of a word, which holds a code of each plane, and the number of words."""
    planes = 8 // math.gcd(8, bits)
    return planes * bits // 8, -(-n // planes)
