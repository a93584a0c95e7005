"""Bit packing against a slow reference that follows the documented layout."""

from __future__ import annotations

import math

import pytest
import torch
from each import each
from hypothesis import given
from hypothesis import strategies as st

from thinwire.codecs.kernels import bits
from thinwire.types import InputError, PayloadError


def codes_of(n: int, width: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(n * 8 + width)
    return torch.randint(0, 1 << width, (n,), generator=g, dtype=torch.uint8)


def slow_pack(codes: list[int], width: int) -> list[int]:
    planes = 8 // math.gcd(8, width)
    m = -(-len(codes) // planes)
    nbytes = planes * width // 8
    out = [0] * (m * nbytes)
    for i in range(m):
        word = sum(codes[k * m + i] << (k * width) for k in range(planes) if k * m + i < len(codes))
        for j in range(nbytes):
            out[j * m + i] = word >> (8 * j) & 255
    return out


@pytest.mark.parametrize("width", range(1, 9))
@given(n=st.integers(0, 70))
def test_pack_follows_the_documented_layout(width: int, n: int) -> None:
    codes = codes_of(n, width)
    before = codes.tolist()
    packed = bits.pack(codes, width)
    assert packed.tolist() == slow_pack(before, width) and codes.tolist() == before
    assert packed.numel() == bits.packed_nbytes(n, width) == -(-n * width // 8) or n % 8
    assert torch.equal(bits.unpack(packed, width, n), codes)


@each("width", range(1, 9))
@each("n", [0, 1, 2, 7, 8, 9, 1000, 4099])
def test_aligned_codes_stay_inside_their_byte(width: int, n: int) -> None:
    codes = codes_of(n, width)
    packed = bits.pack_aligned(codes, width)
    assert packed.numel() == bits.aligned_nbytes(n, width) == -(-n // (8 // width))
    assert int(packed.max() if n else 0) < 1 << (8 // width * width)
    assert torch.equal(bits.unpack_aligned(packed, width, n), codes)


@each("dtype, widths", [(torch.int32, range(32)), (torch.int64, range(0, 41, 3))])
@each("n", [0, 1, 9, 1000])
def test_wide_codes_are_whole_bytes_and_what_is_left(n: int, dtype: torch.dtype, widths: range) -> None:
    g = torch.Generator().manual_seed(n)
    codes = torch.randint(0, torch.iinfo(dtype).max, (n,), generator=g, dtype=dtype)
    for width in widths:
        want = codes & (1 << width) - 1
        before = codes.clone()
        packed = bits.pack_wide(codes, width)
        assert torch.equal(codes, before)
        planes = [byte for i in range(width // 8) for byte in (want >> 8 * i & 255).tolist()]
        rest = slow_pack((want >> width // 8 * 8).tolist(), width % 8) if width % 8 else []
        assert packed.tolist() == planes + rest and packed.numel() == bits.wide_nbytes(n, width)
        assert torch.equal(bits.unpack_wide(packed, width, n, dtype), want)
        with pytest.raises(PayloadError):
            bits.unpack_wide(torch.cat([packed, packed.new_zeros(1)]), width, n, dtype)


@each("width", range(1, 9))
def test_wrong_lengths_and_types_are_payload_errors(width: int) -> None:
    packed = bits.pack(codes_of(100, width), width)
    for wrong in (packed[:-1], torch.cat([packed, packed[:1]]), packed.to(torch.int32)):
        with pytest.raises(PayloadError):
            bits.unpack(wrong, width, 100)


@each("width", [0, 9, -1])
def test_bits_out_of_range(width: int) -> None:
    with pytest.raises(InputError, match=r"1\.\.8"):
        bits.pack(codes_of(4, 1), width)
