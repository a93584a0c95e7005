"""RankOne, LowRank and Factors: exact to the bit at both ends, near to what they are for, and quick."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.channels.channel import Receiver, Scheme, Sender
from thinwire.channels.memory import Delta, SecondOrderDelta
from thinwire.codecs import Codec, Entropy, Factors, LowRank, RankOne, Raw, Uniform, roundtrip
from thinwire.codecs.kernels import kernel_calls
from thinwire.codecs.kernels.bits import unpack
from thinwire.codecs.matrices.factors import Cut, placed, within
from thinwire.types import InputError, Payload, PayloadError, TensorSpec

MAGNITUDES = {
    1: [1.0],
    2: [9 / 16, 15 / 8],
    3: [5 / 16, 15 / 16, 27 / 16, 43 / 16],
    4: [5 / 32, 31 / 64, 53 / 64, 19 / 16, 25 / 16, 65 / 32, 83 / 32, 55 / 16],
}
LEVELS = {bits: [*(-x for x in reversed(found)), *found] for bits, found in MAGNITUDES.items()}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def residual(count: int, rows: int, width: int) -> Tensor:
    """Return values whose size depends on the token and, more, on the channel."""
    tokens, channels = normal(count, rows, 1, seed=1).mul(0.5).exp(), normal(count, 1, width, seed=2).exp()
    return normal(count, rows, width) * tokens * channels


def error(codec: Codec, x: Tensor) -> float:
    return apart(codec.decode(codec.encode(x)), x)


def apart(found: Tensor, x: Tensor) -> float:
    return float((found - x).double().norm() / x.double().norm())


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 1000),
    st.sampled_from([2.0**-149, 1e-30, 1.0, 1e30, 2.0**120]),
    st.sampled_from([1, 2, 3, 4]),
    st.booleans(),
)
def test_products_of_scales_and_levels_are_exact(seed: int, size: float, bits: int, compiled: bool) -> None:
    """So a device that fuses them with the addition to a reference rounds once, as one that does not."""
    x = normal(2, 20, 24, seed=seed) * normal(2, 1, 24, seed=seed + 1).mul(4).exp() * size
    x.clamp_(-3e38, 3e38)
    codec = RankOne(bits)
    payload = codec.encode(x)
    packed, row, column = payload.parts
    levels = torch.tensor(LEVELS[bits], dtype=torch.float64)[unpack(packed, bits, x.numel()).long()]
    scales = row.double().reshape(2, 20, 1) * column.double().reshape(2, 1, 24)
    y = codec.decode(payload) if compiled else without(codec, payload)
    assert torch.equal(y.double(), levels.reshape(x.shape) * scales)
    assert float(y.abs().min()) >= 2.0**-126, "a denormal, which some devices lose"


def without(codec: RankOne, payload: Payload) -> Tensor:
    with kernel_calls.without():
        return codec.decode(payload)


@each("rank", [1, 8, 32])
@each("size", [1e-30, 1.0, 1e30])
def test_sums_of_integers_are_exact_in_any_order(rank: int, size: float) -> None:
    codec, shape = LowRank(rank), (2, 50, 40)
    payload = codec.encode(normal(*shape) * size)
    u, v, rows, columns = (p.double() for p in payload.parts)
    u, v, order = u.reshape(2, 50, rank), v.reshape(2, 40, rank), torch.randperm(rank)
    wanted = u[..., order] @ v[..., order].transpose(1, 2)
    wanted = wanted * 2 ** rows.reshape(2, 50, 1) * 2 ** columns.reshape(2, 1, 40)
    assert torch.equal(codec.decode(payload).double(), wanted)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(codec.decode(payload).double(), wanted)


def test_the_largest_integers_of_a_stranger_are_summed_exactly() -> None:
    low, n = torch.full((1024 * 1024,), -128, dtype=torch.int8), torch.full((1024,), -6, dtype=torch.int8)
    payload = Payload(TensorSpec((1024, 1024)), (low, low, n, n))
    assert torch.equal(LowRank(1024).decode(payload), torch.full((1024, 1024), 2.0**24 * 2.0**-12))


@each("bits, expected", [(1, 0.603), (2, 0.343), (3, 0.186), (4, 0.0975)])
def test_the_error_is_that_of_the_best_levels_whatever_rows_and_columns_are_scaled_by(
    bits: int, expected: float
) -> None:
    for x in (normal(2, 512, 384), residual(2, 512, 384)):
        assert error(RankOne(bits), x) == pytest.approx(expected, rel=0.02)
    assert error(Uniform(bits=1, group=32), residual(2, 512, 384)) > 0.8


def test_magnitudes_of_rank_one_and_matrices_of_low_rank_come_back() -> None:
    x = normal(2, 60, 1).exp() * normal(2, 1, 80, seed=1).exp() * normal(2, 60, 80, seed=2).sign()
    assert error(RankOne(), x) < 0.01
    assert error(LowRank(4), torch.bmm(normal(2, 60, 4), normal(2, 4, 80, seed=1))) < 0.01


@each("codec", [RankOne(), RankOne(bits=2), RankOne(bits=4), LowRank()])
def test_a_sample_of_three_dimensions_is_coded_as_by_itself(codec: RankOne | LowRank) -> None:
    x = torch.stack([normal(30, 40), normal(30, 40, seed=1) * 1000])
    together = codec.decode(codec.encode(x))
    alone = torch.stack([codec.decode(codec.encode(part)) for part in x])
    assert torch.equal(together, alone)


@each("codec", [RankOne(), RankOne(bits=2), RankOne(bits=4), LowRank()])
@each("memory", [Delta(), SecondOrderDelta(0.5)])
def test_both_ends_of_a_delta_hold_the_same_bits_and_follow(
    codec: RankOne | LowRank, memory: Delta | SecondOrderDelta
) -> None:
    scheme = Scheme(codec, memory, Uniform(bits=8))
    sender, receiver = Sender(scheme), Receiver()
    x, move = normal(2, 32, 48), residual(2, 32, 48) * 0.1
    for step in range(12):
        x = x + move * (1 - step / 12)
        packet, own = sender.encode(x, [0, 1])
        with kernel_calls.without():
            assert torch.equal(receiver.decode(packet), own)
    assert float((own - x).norm()) < 0.5 * 12 / 2 * float(move.norm())


def test_bits_a_value() -> None:
    spec = TensorSpec((2, 1024, 768))
    bits = [8 * c.nbytes(spec) / spec.numel for c in (RankOne(), RankOne(bits=2), LowRank())]
    assert bits == pytest.approx([1.0365, 2.0365, 0.1641], abs=1e-4)


@each("make", [lambda: RankOne(0), lambda: RankOne(5), lambda: LowRank(0), lambda: LowRank(1025)])
def test_fields_out_of_range_are_refused(make: type) -> None:
    with pytest.raises(InputError, match="is not"):
        make()


@each("wrong", [float("inf"), float("-inf"), float("nan")])
@each("codec", [RankOne(), RankOne(bits=2), RankOne(bits=4), LowRank()])
def test_values_that_are_none_are_refused(wrong: float, codec: RankOne | LowRank) -> None:
    x = normal(3, 5, 7)
    x[1, 2, 3] = wrong
    with pytest.raises(InputError, match="NaN or infinite"):
        codec.encode(x)
    with kernel_calls.without(), pytest.raises(InputError, match="NaN or infinite"):
        roundtrip(codec, x)


@each(
    "codec, part, wrong",
    [
        *[(RankOne(), 1, v) for v in (0.0, -1.0, 2.0**-100, 2.0**101, float("nan"))],
        *[(RankOne(), 2, v) for v in (0.0, -1.0, 2.0**-25, 2.0**25, float("inf"))],
        *[(LowRank(), 2, v) for v in (-41, -5)],
        *[(LowRank(), 3, v) for v in (-87, 101)],
    ],
)
def test_scales_that_nobody_writes_are_refused(codec: RankOne | LowRank, part: int, wrong: float) -> None:
    payload = codec.encode(normal(3, 5, 7))
    payload.parts[part][-1] = wrong
    with pytest.raises(PayloadError, match="lies outside"):
        codec.decode(payload)


@pytest.mark.serial
@pytest.mark.skipif(not kernel_calls.there(), reason="no C compiler when thinwire was installed")
def test_one_bit_is_coded_and_decoded_in_milliseconds() -> None:
    """1 ms on one core of a server of 2024, of the 3 that an exchange may take; torch alone takes 14."""
    x, codec, threads = normal(2, 1024, 768), RankOne(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = []
        for _ in range(20):
            start = time.thread_time()
            codec.decode(codec.encode(x))
            times.append(time.thread_time() - start)
    finally:
        torch.set_num_threads(threads)
    assert statistics.quantiles(times, n=4)[0] < 0.009


def in_a_row(*shapes: tuple[int, int]) -> tuple[Tensor, Cut]:
    """Return matrices of rank 3 with what stands between them, and where they are."""
    values, cut = [normal(5)], []
    for k, (rows, width) in enumerate(shapes):
        cut.append((sum(map(len, values)), rows, width))
        values += [(normal(rows, 3, seed=k) @ normal(3, width, seed=k + 9)).flatten(), normal(k, seed=k)]
    return torch.cat(values), tuple(cut)


@each("size", [1e-30, 1.0, 1e30])
@each("rank", [1, 3, 8])
def test_placed_factors_are_what_any_end_decodes(rank: int, size: float) -> None:
    x, cut = in_a_row((50, 40), (8, 300), (2, 2))
    for codec in (Factors(rank, step=0.1, rest=Raw()), Entropy(Factors(rank, step=0.1, rest=Raw()))):
        payload, found = roundtrip(placed(codec, cut), x * size)
        assert repr(placed(codec, cut)) == repr(codec)
        assert torch.equal(codec.decode(payload), found)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(placed(codec, cut).decode(payload), found)
            assert torch.equal(codec.decode(placed(codec, cut).encode(x * size)), found)
        assert apart(found, x * size) < (0.05 if rank >= 3 else 0.9)
        for gap in (slice(0, 5), slice(len(x) - 2, None)):
            assert torch.equal(found[gap], (x * size)[gap])
        with pytest.raises(PayloadError, match="other matrices"):
            placed(codec, cut[:2]).decode(payload)


def test_sums_of_levels_are_exact_in_any_order() -> None:
    codec, x = Factors(rank=8), normal(60, 44)
    _, scale, left, right, *_ = codec.encode(x).parts
    order = torch.randperm(8)
    total = left.double().view(60, 8)[:, order] @ right.double().view(8, 44)[order]
    assert torch.equal(codec.decode(codec.encode(x)), total.float() * scale)


def test_levels_take_half_of_what_bytes_take_at_nearly_their_error() -> None:
    x = normal(512, 4) @ torch.diag(torch.tensor([8.0, 4.0, 2.0, 1.0])) @ normal(4, 384, seed=1)
    x = x + 0.5 * normal(512, 384, seed=2)
    ours, wide = Entropy(Factors(4)), LowRank(4)
    assert error(wide, x) < 0.06 and error(ours, x) < 0.25  # a sixteenth of the energy
    assert ours.encode(x).nbytes < 0.5 * wide.encode(x).nbytes


@each("start, stop", [(0, 60), (7, 33), (12, 13), (45, 60)])
def test_a_piece_of_the_values_has_the_whole_rows_in_it(start: int, stop: int) -> None:
    cut = ((0, 4, 10), (40, 2, 5), (55, 5, 1))
    rows = {(at + i * w, w) for at, n, w in cut for i in range(n)}
    found = {(start + at + i * w, w) for at, n, w in within(cut, start, stop) for i in range(n)}
    assert found == {(at, w) for at, w in rows if start <= at and at + w <= stop}


def test_matrices_that_are_not_there_are_refused() -> None:
    codec, x = Factors(rank=2), normal(6, 8)
    for where in ([0, 6, 9], [-1, 6, 8], [0, 0, 8], [1, 6, 8], [0, 2**20, 2**20]):
        payload = codec.encode(x)
        payload.parts[0][:] = torch.tensor(where, dtype=torch.int32)
        with pytest.raises(PayloadError, match="is not within"):
            codec.decode(payload)
    payload = codec.encode(x)
    payload.parts[1][0] = float("nan")
    with pytest.raises(PayloadError, match="not finite"):
        codec.decode(payload)
