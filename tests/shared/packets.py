"""Packets of every memory and codec, and ways to damage their bytes."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

import torch
from codec_examples import CODECS

from thinwire.channels import wire
from thinwire.channels.channel import Receiver, Scheme, Sender
from thinwire.channels.memory import (
    Delta,
    ErrorFeedback,
    FirstVisit,
    Memory,
    NoMemory,
    RunningMean,
    SecondOrderDelta,
)
from thinwire.codecs import Cast, Codec, Entropy, Sink, TileAdaptive, TopK, Uniform
from thinwire.types import DesyncError, Packet, PayloadError, TensorSpec

MEMORIES: list[Memory] = [
    NoMemory(),
    Delta(),
    Delta("step"),
    SecondOrderDelta(0.25),
    RunningMean(),
    ErrorFeedback(),
    ErrorFeedback(decay=0.5),
    FirstVisit(),
]
INT8 = Uniform(bits=8, group=16)
SHAPE = (3, 4, 16)
SPEC = TensorSpec(SHAPE)


def frames(seed: int = 0) -> Iterator[tuple[torch.Tensor, list[int]]]:
    """Two frames of which the second holds two revisits and a first visit."""
    g = torch.Generator().manual_seed(seed)
    yield torch.randn(SHAPE, generator=g), [1, 2, 3]
    yield torch.randn(SHAPE, generator=g), [2, 4, 1]


def sequence(memory: Memory, codec: Codec) -> list[tuple[Packet, torch.Tensor]]:
    """Return the packets of one sender, and what each decodes to."""
    sender = Sender(Scheme(codec, memory, codec, INT8))
    return [sender.encode(x, ids) for x, ids in frames()]


def every_kind() -> list[Packet]:
    """Return a first and a later packet of each memory, and one of each codec."""
    kept: list[Codec] = [Uniform(bits=3), Entropy(Uniform(bits=2)), TopK(ratio=0.1), Cast(), TileAdaptive()]
    found = [packet for m in MEMORIES for c in kept for packet, _ in sequence(m, c)]
    found += [sequence(Delta(), Sink(Entropy(Uniform(bits=3))))[1][0]]
    return found + [sequence(NoMemory(), c)[0][0] for c in CODECS]


def signed(body: bytes) -> bytes:
    """Return ``body`` behind a header whose check sum is right: without it nothing behind it is ever read."""
    return wire.HEAD.pack(wire.MAGIC, wire.VERSION, 0, zlib.crc32(body)) + body


def resigned(data: bytes) -> bytes:
    """Return damaged bytes with the check sum made right again."""
    return data[:4] + struct.pack("<I", zlib.crc32(data[8:])) + data[8:]


def receive(data: bytes, receiver: Receiver | None = None, expect: TensorSpec | None = SPEC) -> str:
    """Read bytes as a stage does; return what became of them. Anything but a refusal or a tensor raises."""
    try:
        packet = wire.unpack(data, max_nbytes=1 << 20)
        x = (receiver or Receiver()).decode(packet, expect=expect)
    except (PayloadError, DesyncError) as e:
        return type(e).__name__
    if x.shape != packet.spec.shape or (expect is not None and x.shape != expect.shape):
        raise ValueError(f"decoded to {tuple(x.shape)}")
    return "tensor"
