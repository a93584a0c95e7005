"""Sparse codecs: what is kept, what it takes, and counts that must not be believed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from codec_examples import tensor
from each import each

from thinwire.channels import wire
from thinwire.channels.channel import Receiver, Scheme, Sender
from thinwire.channels.memory import ErrorFeedback
from thinwire.codecs import ChunkTopK, HardThreshold, InTurn, RandomK, Raw, TopK, Uniform
from thinwire.codecs.kernels.bits import pack
from thinwire.types import InputError, Payload, PayloadError, TensorSpec


def test_topk_keeps_the_largest_of_the_whole_tensor() -> None:
    x = tensor((8, 125))
    y = TopK(ratio=0.1).decode(TopK(ratio=0.1).encode(x))
    kept = y != 0
    assert kept.sum() == 100
    assert torch.equal(y[kept], x[kept])
    assert x[kept].abs().min() >= x[~kept].abs().max()


def test_at_least_one_value_is_kept() -> None:
    assert TopK(ratio=1e-6).decode(TopK(ratio=1e-6).encode(torch.tensor([1.0, 5.0]))).tolist() == [0.0, 5.0]


def test_one_value_in_a_hundred_takes_9_bits_of_index_and_15_5_in_all() -> None:
    x = torch.randn(1, 50_000, generator=torch.Generator().manual_seed(0))
    for codec in (TopK(ratio=0.01), HardThreshold(threshold=2.576)):
        kept = int(codec.decode(codec.encode(x)).count_nonzero())
        assert kept == pytest.approx(500, rel=0.05)
        assert sum(p.nbytes for p in codec.encode(x).parts[:-1]) * 8 <= 9 * kept
        packet, x_hat = Sender(Scheme(replace(codec, values=Uniform(bits=4)), ErrorFeedback())).encode(x, [0])
        assert torch.equal(Receiver().decode(wire.unpack(wire.pack(packet))), x_hat)
        assert len(wire.pack(packet)) * 8 <= 15.5 * kept


def test_values_may_be_coded_in_turn() -> None:
    x = tensor((40, 50))
    plain, coded = TopK(ratio=0.05), TopK(ratio=0.05, values=Uniform(bits=8))
    a, b = plain.decode(plain.encode(x)), coded.decode(coded.encode(x))
    assert torch.equal(a != 0, b != 0)
    assert (a - b).norm() / a.norm() < 0.02
    assert coded.nbytes(TensorSpec.of(x)) < 0.7 * plain.nbytes(TensorSpec.of(x))


def test_hard_threshold_keeps_what_reaches_it() -> None:
    x = tensor((30, 30))
    y = HardThreshold(threshold=1.5).decode(HardThreshold(threshold=1.5).encode(x))
    assert torch.equal(y, torch.where(x.abs() >= 1.5, x, 0.0))
    nothing = HardThreshold(threshold=1e9).encode(x)
    assert nothing.nbytes == 4  # the count alone


def test_hard_threshold_makes_no_zero_of_a_nan() -> None:
    x = torch.tensor([float("nan"), 2.0, 0.5])
    codec = HardThreshold(threshold=1.0)
    assert torch.equal(codec.decode(codec.encode(x)).isnan(), torch.tensor([True, False, False]))
    with pytest.raises(InputError, match="a NaN or infinite value"):
        HardThreshold(threshold=1.0, values=Uniform(bits=4)).encode(x)


@each("count", [-1, 0, 1, 3, 11, 2**31 - 1, -(2**31)])
def test_a_count_that_does_not_fit_the_indices_is_refused(count: int) -> None:
    """It is checked before anything is allocated for it."""
    codec = HardThreshold(threshold=1.0)
    payload = codec.encode(torch.tensor([0.0, 2.0, *[0.0] * 60, 3.0, 0.0]))
    head = torch.tensor([count], dtype=torch.int32).view(torch.uint8)
    parts = torch.cat([head, payload.parts[0][4:]]), payload.parts[1]
    with pytest.raises(PayloadError):
        codec.decode(Payload(payload.spec, parts))
    for cut in (parts[0][:3], parts[0].to(torch.int32)):
        with pytest.raises(PayloadError, match="begin with a count"):
            codec.decode(Payload(payload.spec, (cut, payload.parts[1])))


def test_random_k_sends_no_indices_and_keeps_one_of_each_run() -> None:
    x = torch.arange(1.0, 1001.0)
    codec = RandomK(ratio=0.1)
    assert codec.nbytes(TensorSpec.of(x)) == 8 + 400
    y = codec.decode(codec.encode(x))
    assert ((y != 0).reshape(100, 10).sum(1) == 1).all()
    assert torch.equal(y[y != 0], x[y != 0])


def test_random_k_chooses_anew_when_the_content_or_seed_changes() -> None:
    x = tensor((1000,))
    first = RandomK(ratio=0.1).decode(RandomK(ratio=0.1).encode(x)) != 0
    x[0] += 1
    other = RandomK(ratio=0.1).decode(RandomK(ratio=0.1).encode(x)) != 0
    seeded = RandomK(ratio=0.1, seed=1).decode(RandomK(ratio=0.1, seed=1).encode(x)) != 0
    assert (first & other).sum() < 40 and (other & seeded).sum() < 40


def test_unbiased_random_k_has_the_right_mean_and_reaches_every_value() -> None:
    codec = RandomK(ratio=0.3, unbiased=True)
    x = tensor((101,)).abs() + 1
    total, hits = torch.zeros(101), torch.zeros(101)
    calls = 3000
    for i in range(calls):
        x[-1] = 1 + i / calls
        y = codec.decode(codec.encode(x))
        total += y / x
        hits += y != 0
    assert (hits[:-1] > 0).all()
    # variance of one draw: run length - 1, at most 3
    assert ((total / calls - 1)[:-1].abs() < 5 * (3 / calls) ** 0.5).all()


@each(
    "chunk, ratio", [(4096, 0.01), (4096, 1e-6), (64, 0.05), (100, 0.1), (24, 0.3), (2, 0.5), (65536, 0.02)]
)
@each("n", [1, 99, 4096, 20_011])
def test_chunk_topk_keeps_the_largest_of_each_run(chunk: int, ratio: float, n: int) -> None:
    x, codec = tensor((n,)), ChunkTopK(ratio=ratio, chunk=chunk)
    y = codec.decode(codec.encode(x))
    for run, kept in zip(x.split(chunk), y.split(chunk), strict=True):
        k = min(len(run), max(1, round(ratio * min(chunk, len(run)))))
        chosen = run.abs().topk(k).indices
        assert torch.equal(kept, torch.zeros_like(run).index_copy_(0, chosen, run[chosen]))


def test_chunk_topk_takes_at_most_21_bits_a_kept_value_of_8_bits() -> None:
    spec, kept = TensorSpec((4096 * 100,)), 41 * 100
    for values in (Uniform(bits=8), Uniform(bits=8, group=64)):
        assert 20 < 8 * ChunkTopK(ratio=0.01, values=values).nbytes(spec) / kept <= 21


def test_positions_beyond_their_run_or_out_of_order_are_refused() -> None:
    codec, spec = ChunkTopK(ratio=0.2, chunk=10), TensorSpec((13,))
    for at, good in (([0, 9, 2], True), ([9, 0, 2], False), ([3, 3, 2], False), ([0, 9, 3], False)):
        payload = Payload(spec, (pack(torch.tensor(at, dtype=torch.uint8), 4), torch.ones(3)))
        if good:
            assert codec.decode(payload).nonzero().flatten().tolist() == [0, 9, 12]
        else:
            with pytest.raises(PayloadError, match="not increasing"):
                codec.decode(payload)


def test_in_turn_every_value_has_its_turn_and_no_index_travels() -> None:
    x, total = tensor((1003,)), torch.zeros(1003)
    for step in range(10):
        codec = InTurn(every=10, at=step)
        payload = codec.encode(x)
        assert payload.nbytes == 4 * (101 if step < 3 else 100)
        total += codec.decode(payload)
    assert torch.equal(total, x)


def test_cocktail_is_a_composition_of_less_than_a_fifth_of_a_bit_a_value() -> None:
    """A tenth in turn, of these the largest fifth: .085 bits of index, .08 of values, .0025 of scales."""
    x = torch.randn(1_280_000, generator=torch.Generator().manual_seed(0))
    codec = InTurn(every=10, at=7, values=TopK(ratio=0.2, values=Uniform(bits=4, group=128)))
    payload = codec.encode(x)
    assert payload.nbytes == codec.nbytes(payload.spec)
    assert 8 * payload.nbytes / x.numel() == pytest.approx(0.1675, abs=1e-4)
    y, turn = codec.decode(payload), x[7::10]
    assert torch.equal(y.nonzero().flatten() % 10, torch.full((25_600,), 7))  # none is coded as zero
    assert turn[y[7::10] != 0].abs().min() >= turn[y[7::10] == 0].abs().max()


@each("options", [{"every": 0}, {"every": 3, "at": 3}, {"every": 3, "at": -1}, {"every": 3, "values": "Raw"}])
def test_a_turn_that_never_comes_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"every=|at=|not a codec"):
        InTurn(**options)  # type: ignore[arg-type]


@each("chunk", [0, 1, 65537])
def test_wrong_lengths_of_runs_are_refused(chunk: int) -> None:
    with pytest.raises(InputError, match="chunk="):
        ChunkTopK(0.1, chunk)


@each("ratio", [0.0, -0.1, 1.1, float("nan")])
def test_wrong_ratios_are_refused(ratio: float) -> None:
    for codec in (TopK, RandomK, ChunkTopK):
        with pytest.raises(InputError, match="ratio="):
            codec(ratio=ratio)


def test_values_must_be_a_codec() -> None:
    with pytest.raises(InputError, match="not a codec"):
        TopK(ratio=0.1, values="Raw")  # type: ignore[arg-type]
    assert TopK(ratio=0.1).values == Raw()
