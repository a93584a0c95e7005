"""The short cuts of the data path give, to the last bit, what the long way gives."""

from __future__ import annotations

import torch
from codec_examples import CODECS, DTYPES, SHAPES, tensor
from each import each

from thinwire.channels import wire
from thinwire.channels.channel import Receiver, Scheme, Sender
from thinwire.channels.memory import Delta, Memory, NoMemory
from thinwire.channels.rows import checks
from thinwire.codecs import Codec, Raw, Uniform, roundtrip


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


@each("codec", CODECS)
def test_a_round_trip_is_encode_and_decode(codec: Codec) -> None:
    for shape in SHAPES:
        for dtype in DTYPES:
            x = tensor(shape, dtype)
            before = x.clone()
            payload, x_hat = roundtrip(codec, x)
            expected = codec.encode(x)
            assert payload.spec == expected.spec
            assert len(payload.parts) == len(expected.parts)
            assert all(same(a, b) for a, b in zip(payload.parts, expected.parts, strict=True))
            assert same(x_hat, codec.decode(expected))
            assert same(x, before)


def test_check_sums_are_the_sums_of_the_words_modulo_two_to_the_32() -> None:
    x = torch.randn(5, 3, 1001) * torch.tensor([1e-30, 1.0, -1.0, 1e30, 0.0]).reshape(5, 1, 1)
    words = x.view(torch.int32).reshape(5, -1).to(torch.int64)
    assert checks(x) == [int(row.sum()) % 2**32 for row in words]
    assert checks(x.transpose(1, 2)) == checks(x)


@each("memory", [Delta(), NoMemory()])
def test_what_a_sender_remembers_is_not_the_caller_s_buffer(memory: Memory) -> None:
    """A schedule reuses its buffers: a reference that followed them would part from the receiver's."""
    sender, receiver = Sender(Scheme(Uniform(bits=4), memory)), Receiver()
    for step in range(3):
        x = torch.randn(2, 3, 32)
        packet, x_hat = sender.encode(x, [0, 1])
        data, kept = wire.pack(packet), x_hat.clone()
        if memory.mirrored:
            x.zero_()
            assert torch.equal(x_hat, kept), step
        assert torch.equal(receiver.decode(wire.unpack(data)), kept)


def test_a_keyframe_under_raw_is_a_copy() -> None:
    x = torch.randn(1, 3, 32)
    _, x_hat = Sender(Scheme(Raw(), Delta())).encode(x, [0])
    assert torch.equal(x, x_hat) and x.data_ptr() != x_hat.data_ptr()
