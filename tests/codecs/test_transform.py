"""Transforms: what they gain on the tensors they are for, and that they undo exactly."""

from __future__ import annotations

import pytest
import torch
from codec_examples import tensor
from each import each

from thinwire.codecs import Cast, ChannelMean, Codec, Entropy, Hadamard, HardThreshold, Raw, Sink, Uniform
from thinwire.types import InputError


def error(codec: Codec, x: torch.Tensor) -> float:
    return float((codec.decode(codec.encode(x)) - x).norm() / x.norm())


@each("block", [2, 4, 32, 256])
def test_hadamard_is_the_hadamard_matrix(block: int) -> None:
    h = torch.ones(1, 1)
    while len(h) < block:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    x = tensor((6, 2 * block + 1)).round(decimals=1)
    mixed = Hadamard(Raw(), block=block).encode(x).parts[0].reshape(x.shape)
    want = (x[:, :-1].reshape(-1, block) @ h / block).reshape(6, -1)
    torch.testing.assert_close(mixed[:, :-1], want, rtol=1e-5, atol=1e-5)
    assert torch.equal(mixed[:, -1], x[:, -1])


def test_hadamard_undoes_itself_exactly_on_integers() -> None:
    x = torch.randint(-1000, 1000, (7, 96), generator=torch.Generator().manual_seed(0)).float()
    assert torch.equal(Hadamard(Raw()).decode(Hadamard(Raw()).encode(x)), x)


def test_hadamard_spreads_an_outlier() -> None:
    x = torch.randn((64, 128), generator=torch.Generator().manual_seed(0)) * 0.1
    x[:, ::32] = 3.0
    plain, mixed = Uniform(bits=2), Hadamard(Uniform(bits=2))
    quiet = (x != 3.0).float()
    left = [(c.decode(c.encode(x)) * quiet).norm() for c in (plain, mixed)]
    assert left[0] == 0.0, "the outlier's scale swallows its neighbours"
    assert left[1] > 0.5 * (x * quiet).norm()


def test_channel_mean_removes_constant_outlier_channels() -> None:
    x = torch.randn((32, 20, 64), generator=torch.Generator().manual_seed(0))
    x[..., 5] += 50.0
    assert error(ChannelMean(Uniform(bits=4)), x) < 0.3 * error(Uniform(bits=4), x)


def test_sink_gives_the_first_position_its_own_codec() -> None:
    x = torch.randn((4, 16, 64), generator=torch.Generator().manual_seed(0))
    x[:, 0] *= 1000.0
    codec = Sink(Uniform(bits=4, scale="tensor"), first=Cast("float32"))
    y = codec.decode(codec.encode(x))
    assert torch.equal(y[:, 0], x[:, 0])
    rest = Uniform(bits=4, scale="tensor")
    assert torch.equal(y[:, 1:], rest.decode(rest.encode(x[:, 1:])))


@each("positions", [1, 3, 7, 9])
def test_sink_of_any_number_of_positions(positions: int) -> None:
    x = tensor((2, 7, 3, 16))
    codec = Sink(Uniform(bits=2), first=Raw(), positions=positions)
    y = codec.decode(codec.encode(x))
    assert torch.equal(y[:, :positions], x[:, :positions])


def test_sink_needs_a_fixed_rate_for_the_first() -> None:
    for first in (HardThreshold(threshold=1.0), Entropy(Uniform())):
        with pytest.raises(InputError, match="no fixed payload size"):
            Sink(Uniform(), first=first)


@each("block", [0, 1, 3, 48, 8192])
def test_hadamard_blocks_are_powers_of_two(block: int) -> None:
    with pytest.raises(InputError, match=f"block={block}"):
        Hadamard(Uniform(), block=block)


@each("codec", [Hadamard, ChannelMean, Sink, Entropy])
def test_inner_must_be_a_codec(codec: type) -> None:
    with pytest.raises(InputError, match="not a codec"):
        codec(3)
