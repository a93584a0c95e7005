"""Rows: which travel, what they cost, and what they are over a memory. Truth values take a bit each."""

from __future__ import annotations

import pytest
import torch

from thinwire.channels import wire
from thinwire.channels.channel import Receiver, Scheme, Sender
from thinwire.channels.memory import Delta
from thinwire.codecs import RankOne, Raw, Rows, Uniform
from thinwire.types import InputError, Payload, PayloadError, TensorSpec


def some(n: int, every: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(n, 128, generator=torch.Generator().manual_seed(2))
    marked = torch.arange(n) % every == 0
    return x, marked


def test_the_marked_rows_are_as_the_inner_codec_has_them() -> None:
    x, marked = some(50, 3)
    y = Rows(Uniform(bits=4)).decode(Rows(Uniform(bits=4)).encode(x * marked[:, None]))
    alone = Uniform(bits=4).decode(Uniform(bits=4).encode(x[marked]))
    assert torch.equal(y[marked], alone) and not y[~marked].any()


def test_a_row_with_a_nan_or_one_value_travels() -> None:
    x = torch.zeros(3, 4)
    x[0, 3], x[2, 0] = float("nan"), 1e-40
    y = Rows(Raw()).decode(Rows(Raw()).encode(x))
    assert y[0, 3].isnan() and torch.equal(y[1:], x[1:])


def test_over_a_delta_a_row_without_news_stays_as_it_was_and_costs_a_bit() -> None:
    """In one entry, so that 512 rows at 1 bit take far less than with an entry a row."""
    (x, marked), keys = some(512, 8), [7]
    sender, receiver = Sender(Scheme(Rows(RankOne()), Delta(), keyframe=Rows(Raw()))), Receiver()

    def sent(values: torch.Tensor) -> tuple[int, torch.Tensor]:
        packet, x_hat = sender.encode(values[None], keys)
        data = wire.pack(packet)
        assert torch.equal(receiver.decode(wire.unpack(data)), x_hat)
        return len(data), x_hat[0]

    _, before = sent(x)
    few, after = sent(torch.where(marked[:, None], x + 0.1, before))
    assert torch.equal(after[~marked], before[~marked]) and not torch.equal(after[marked], before[marked])
    assert few <= 512 // 8 + 64 * 128 // 8 + 2 * (64 + 128) + 150
    whole, _ = sent(x + 0.2)
    rows = Sender(Scheme(RankOne(), Delta()))
    rows.encode(x, range(512))
    assert whole + 8_000 < len(wire.pack(rows.encode(x + 0.2, range(512))[0]))


def test_a_bitmap_that_says_more_rows_than_there_are_is_refused() -> None:
    payload = Rows(Raw()).encode(torch.eye(3, 8))
    with pytest.raises(PayloadError):
        Rows(Raw()).decode(Payload(TensorSpec((2, 8)), payload.parts))
    with pytest.raises(InputError, match="inner=4 is not a codec"):
        Rows(4)  # type: ignore[arg-type]


def test_truth_values_take_a_bit_and_are_no_part_of_a_packet() -> None:
    mask = torch.rand(3, 1001, generator=torch.Generator().manual_seed(1)) < 0.3
    packet, _ = Sender().encode(mask, [1, 2, 3])
    assert packet.sections[0].payload.nbytes == -(-mask.numel() // 8)
    assert torch.equal(Receiver().decode(wire.unpack(wire.pack(packet))), mask)
    bad = Payload(packet.spec, (mask.flatten(),))
    section = type(packet.sections[0])(packet.sections[0].mode, "Raw()", bad)
    wrong = type(packet)(packet.spec, packet.memory, packet.references, packet.entries, (section,))
    with pytest.raises(InputError, match=r"made a part of torch\.bool"):
        wire.pack(wrong)
