"""Coded indices: both forms and every width, what they take, and bytes that must not be believed."""

from __future__ import annotations

import math

import pytest
import torch
from each import each
from hypothesis import given
from hypothesis import strategies as st

from thinwire.codecs.indices import indices_nbytes, pack_indices, unpack_indices
from thinwire.codecs.kernels.bits import pack, packed_nbytes
from thinwire.types import PayloadError


def drawn(k: int, n: int, seed: int = 0) -> torch.Tensor:
    """Return ``k`` indices below ``n``, increasing."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:k].sort().values


@given(n=st.integers(0, 3000), share=st.floats(0, 1), seed=st.integers(0, 99))
def test_indices_come_back_from_as_many_bytes_as_foretold(n: int, share: float, seed: int) -> None:
    index = drawn(round(share * n), n, seed)
    packed = pack_indices(index, n)
    assert packed.dtype == torch.uint8
    assert packed.numel() == indices_nbytes(len(index), n) <= packed_nbytes(n, 1)
    assert torch.equal(unpack_indices(packed, len(index), n), index)


@each("n", [1, 2, 255, 65_537, 2**28])
def test_the_ends_of_the_range_come_back(n: int) -> None:
    for index in ([0], [n - 1], sorted({0, n // 2, n - 1}), list(range(min(n, 40))), []):
        at = torch.tensor(index, dtype=torch.int64)
        assert unpack_indices(pack_indices(at, n), len(at), n).tolist() == index


@each("every", [2, 4, 5, 30, 100, 1000, 8191])
def test_they_take_at_most_2_bits_more_than_the_logarithm_of_their_distance(every: int) -> None:
    k = 1000
    bits = 8 * indices_nbytes(k, k * every) / k
    assert bits <= min(every, 2 + math.log2(every)) + 0.07  # of whole bytes


def test_the_layout_is_low_bits_and_then_gaps_in_unary() -> None:
    """Of 3, 6, 90 below 128: the low 4 bits are 3, 6, 10; above these are 0, 0 and 5."""
    low = pack(torch.tensor([3, 6, 10], dtype=torch.uint8), 4)
    high = pack(torch.tensor([1, 1, 0, 0, 0, 0, 0, 1, 0, 0], dtype=torch.uint8), 1)
    assert pack_indices(torch.tensor([3, 6, 90]), 128).tolist() == [*low.tolist(), *high.tolist()]


@each("k, n", [(3, 1000), (40, 100), (100, 50_000)])
def test_damaged_indices_are_refused_or_still_increasing(k: int, n: int) -> None:
    packed = pack_indices(drawn(k, n), n)
    refused = 0
    for place in range(8 * packed.numel()):
        hurt = packed.clone()
        hurt[place // 8] ^= 1 << place % 8
        try:
            index = unpack_indices(hurt, k, n)
        except PayloadError:
            refused += 1
            continue
        assert len(index) == k and int(index[0]) >= 0 and int(index[-1]) < n
        assert bool((index.diff() > 0).all())
    assert refused > 0


def test_wrong_lengths_and_types_are_refused() -> None:
    for k, n in ((5, 1000), (50, 100)):
        packed = pack_indices(drawn(k, n), n)
        for wrong in (packed[:-1], packed[:0], torch.cat([packed, packed[:1]]), packed.to(torch.int32)):
            with pytest.raises(PayloadError):
                unpack_indices(wrong, k, n)


def test_a_mask_of_another_count_is_refused() -> None:
    mask = pack_indices(drawn(50, 100), 100)
    mask[0] ^= 1
    with pytest.raises(PayloadError, match="expected 50"):
        unpack_indices(mask, 50, 100)


@each("low, good", [((8, 9, 14), True), ((9, 9, 14), False), ((9, 8, 14), False), ((8, 9, 15), False)])
def test_low_bits_that_do_not_rise_or_end_behind_the_last_are_refused(low: list[int], good: bool) -> None:
    packed = pack_indices(torch.tensor([8, 9, 94]), 95)
    packed[:2] = pack(torch.tensor(low, dtype=torch.uint8), 4)
    if good:
        assert unpack_indices(packed, 3, 95).tolist() == [8, 9, 94]
    else:
        with pytest.raises(PayloadError, match="not increasing"):
            unpack_indices(packed, 3, 95)
