"""Sketches of updates: short enough to keep for rounds, and alike where the updates are."""

from __future__ import annotations

import base64

import torch
from torch import Tensor

from thinwire.rounds.parameters import pieces

WIDTH = 512  # numbers of a sketch


class Sketches:
    """Draw sketches of rows of ``values`` numbers, by signs that only the owner of ``seed`` knows.

    By its sign each value is added to one of ``WIDTH`` sums, or taken off it: a count sketch (Charikar, Chen
    and Farach-Colton, 2002). The cosine between two sketches is that between the rows with an error of about
    1 / sqrt(WIDTH), 4 %, and of much less near 1 and -1. Who does not know the signs cannot make a copy whose
    sketch is another.

    >>> sketches = Sketches(10000, seed=3)
    >>> row = torch.randn(1, 10000)
    >>> a, b = (unit(sketches.sums(x)) for x in (row, row * -2))
    >>> round(float(a @ b), 4)
    -1.0
    """

    def __init__(self, values: int, seed: int) -> None:
        self.values = values
        draw = torch.Generator().manual_seed(seed)
        signs = torch.randint(0, 2, (values,), generator=draw, dtype=torch.int8) * 2 - 1
        self._signs = signs

    def sums(self, row: Tensor) -> Tensor:
        """Return the sums [WIDTH] of a row [1, N], float64 on the CPU."""
        self._signs = self._signs.to(row.device)
        row, found = row.flatten(), torch.zeros(WIDTH, dtype=torch.float64, device=row.device)
        for part in pieces(row):
            signed = row[part].float() * self._signs[part]
            signed = torch.nn.functional.pad(signed, (0, -signed.numel() % WIDTH))
            found += signed.view(-1, WIDTH).sum(0, dtype=torch.float64)
        return found.cpu()


def unit(sums: Tensor) -> Tensor:
    """Return sums at length 1; zeros for zeros.

    >>> unit(torch.tensor([3e200, 4e200], dtype=torch.float64)).tolist()
    [0.6, 0.8]
    """
    largest = sums.abs().max()
    if not largest > 0:
        return torch.zeros_like(sums)
    return (sums / largest) / (sums / largest).norm()


def packed(sketch: Tensor) -> str:
    """Return a sketch as text, a byte a number; cosines move by less than 1 %.

    >>> x = unit(torch.randn(WIDTH, dtype=torch.float64))
    >>> float(x @ unpacked(packed(x))) > 0.999
    True
    """
    whole = (sketch * (127 / sketch.abs().max().clamp(min=1e-30))).round().to(torch.int8)
    return base64.b85encode(whole.numpy().tobytes()).decode()


def unpacked(text: str) -> Tensor:
    """Return the sketch [WIDTH] that ``packed`` wrote."""
    return unit(torch.frombuffer(bytearray(base64.b85decode(text)), dtype=torch.int8).double())
