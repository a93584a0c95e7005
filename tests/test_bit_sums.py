"""Sums of a tensor's bits: of all of them, the same wherever they lie, asked of a device once."""

from __future__ import annotations

import torch
from each import each
from other_device import DEVICE, Elsewhere

from thinwire.checksum.bit_sums import sums_of

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.float64, torch.complex64]


@each("dtype", DTYPES)
def test_a_sum_of_bits_is_of_all_bits_wherever_they_lie(dtype: torch.dtype) -> None:
    x = (torch.randn(4, 1 << 19, generator=torch.Generator().manual_seed(0)) * 3).clamp(0, 9).to(dtype)
    other = x.clone()
    other[3, -1] = 1 - other[3, -1].to(torch.complex64).real
    parts = [x, x.mT, x.mT.contiguous(), x.flatten()[1:], x.flatten()[1:].clone(), other, x.flip(0), x[:0]]
    found = sums_of([*parts, torch.tensor(2.0)])
    assert found[1] == found[2] and found[3] == found[4]
    assert len({found[0], found[5], found[6]}) == 3
    with Elsewhere() as seen:
        there = [part.to(DEVICE) for part in parts]
        seen.clear()
        assert sums_of(there) == found[:-1]
        assert (seen.to_host, len(seen.waits)) == (1, 1)
