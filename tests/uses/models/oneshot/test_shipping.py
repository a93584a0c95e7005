"""What is sent of a configuration gives the same outputs at the other end, at the bytes that were counted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from thinwire.types import PayloadError
from thinwire.uses.models.oneshot.shipping import (
    packed_nbytes,
    read_shipped,
    restored,
    shipped,
    write_shipped,
)
from thinwire.uses.models.oneshot.supernet import Configuration, Shape, Supernet, costs_of, recalibrate

SHAPE = Shape(channels=(8, 16), stride=1)


@pytest.fixture(scope="module")
def sent() -> tuple[Supernet, Configuration, dict[str, Tensor], Tensor]:
    draw = torch.Generator().manual_seed(0)
    net, images = Supernet(SHAPE, 0), torch.randn(64, 1, 8, 8, generator=draw)
    configuration = ((2, 6), (3, 3), (6, 2), (4, 5), (5, 4))
    with torch.no_grad():
        for norm in (layer.norm for layer in net.layers):
            norm.scale.uniform_(0.5, 2, generator=draw)
            norm.shift.uniform_(-1, 1, generator=draw)
    recalibrate(net, configuration, images.split(16))
    return net.eval(), configuration, shipped(net, configuration), images


@torch.no_grad()
def test_the_other_end_computes_the_same(
    sent: tuple[Supernet, Configuration, dict[str, Tensor], Tensor],
) -> None:
    net, configuration, tensors, images = sent
    other, told = restored(tensors, SHAPE)
    assert told == configuration
    expected = net(images, configuration)
    assert torch.allclose(other(images, told), expected, atol=1e-4)
    assert float(expected.std()) > 0.01
    again = shipped(other, told)
    codes = [name for name in tensors if name.endswith(("codes", "bits"))]
    assert all(torch.equal(again[name], tensors[name]) for name in codes)


def test_codes_fit_their_bits_and_entropy_coding_is_not_larger(
    sent: tuple[Supernet, Configuration, dict[str, Tensor], Tensor],
) -> None:
    net, configuration, tensors, _ = sent
    for i, (w, _) in enumerate(configuration, 1):
        codes = tensors[f"{i}.codes"]
        assert int(codes.min()) >= -(2 ** (w - 1)) and int(codes.max()) < 2 ** (w - 1)
    others = sum(x.nbytes for name, x in tensors.items() if not name.endswith(("codes", "bits")))
    counted = costs_of(net, 8)
    ends = net.stem.weight.numel() + net.head.linear.weight.numel()
    assert counted.fixed_nbytes == others + ends, "both ends have eight bits"
    assert packed_nbytes(tensors) < counted.nbytes(configuration) * 1.25


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("2.norm", torch.zeros(2, 3), "2.norm has shape"),
        ("1.bits", torch.tensor([9, 2], dtype=torch.uint8), "which the network does not have"),
        ("head.steps", torch.tensor([0.0, 1.0]), "a step of 0.0"),
        ("1.steps", torch.tensor([torch.nan, 1.0]), "a step of nan"),
        ("3.codes", None, "3.codes is missing"),
    ],
)
def test_what_does_not_fit_is_refused(
    sent: tuple[Supernet, Configuration, dict[str, Tensor], Tensor],
    name: str,
    value: Tensor | None,
    told: str,
) -> None:
    damaged = {key: x for key, x in sent[2].items() if key != name} | ({} if value is None else {name: value})
    with pytest.raises(PayloadError, match=told):
        restored(damaged, SHAPE)


def test_a_deeper_network_comes_back_as_it_was(tmp_path: Path) -> None:
    net = Supernet(Shape(channels=(4, 8), stride=1, repeats=2), 0)
    images, configuration = torch.randn(16, 1, 8, 8), net.uniform(3)
    assert [block.first.stride for block in net.blocks] == [1, 1, 2, 1]
    recalibrate(net, configuration, [images])
    write_shipped(net.eval(), configuration, tmp_path / "net.safetensors")
    other, told = read_shipped(tmp_path / "net.safetensors")
    assert other.shape == net.shape and told == configuration
    assert torch.allclose(other(images, told), net(images, configuration), atol=1e-4)
