"""Rows of a tensor, a sample each: some of them, put together again, and their sums, on any device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.channels.entries import Entries
from thinwire.codecs.kernels import kernel_calls
from thinwire.types import InputError
from thinwire.verdicts import FINITE, refuse_outside


def check_finite(x: Tensor) -> None:
    """Refuse a NaN or an infinity in what will be remembered: no later message mends it. ``InputError``."""
    if x.numel():
        refuse_outside(*torch.aminmax(x), FINITE, _not_finite)  # a NaN is both


def _not_finite() -> InputError:
    return InputError("a NaN or infinite value cannot be remembered; look for the overflow that made it")


def row_sums(x: Tensor) -> Tensor:
    """Return a 32-bit sum for each row of ``x`` [B, ...], float32: int32 [B]; equal bits, equal sums."""
    x = x.contiguous()
    if x.is_cpu and kernel_calls.there(x):
        return kernel_calls.sums(x)
    words = x.view(torch.int32).reshape(len(x), math.prod(x.shape[1:]))
    return words.sum(1, dtype=torch.int32)  # modulo 2**32


def checks(x: Tensor) -> list[int]:
    """Return the sums of ``row_sums`` as a packet has them."""
    return Entries([], [], [], row_sums(x)).checks


def some_rows(x: Tensor, rows: list[int]) -> Tensor:
    """Return these rows of ``x``, increasing; itself where they are all."""
    if len(rows) == len(x):
        return x
    if x.device.type == "cpu":
        return x[rows]
    return torch.cat([x[at : at + n] for at, n in runs(rows)])  # an index would cross to the device


def runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Return increasing numbers as runs: where each begins, and its length.

    >>> runs([0, 1, 2, 7])
    [(0, 3), (7, 1)]
    """
    found: list[tuple[int, int]] = []
    for row in rows:
        at, n = found[-1] if found else (row, 0)
        if at + n == row and found:
            found[-1] = at, n + 1
        else:
            found.append((row, 1))
    return found


def merged(outputs: list[tuple[list[int], Tensor]]) -> Tensor:
    """Return the tensor of which each output has some rows."""
    if len(outputs) == 1:
        return outputs[0][1]
    first = outputs[0][1]
    x_hat = first.new_empty((sum(len(rows) for rows, _ in outputs), *first.shape[1:]))
    for rows, x in outputs:
        if x.device.type == "cpu":
            x_hat[rows] = x
        else:
            done = 0
            for at, n in runs(rows):
                x_hat[at : at + n] = x[done : done + n]
                done += n
    return x_hat
